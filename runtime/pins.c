#include "pins.h"

#include <stdio.h>
#include <string.h>

static const char *const passes[] = {"fprop", "dgrad", "wgrad"};

const char *dnri_conv_pass(const dnri_op *op)
{
    if (strncmp(op->def->name, "conv", 4) != 0)
        return NULL;
    const char *dot = strchr(op->def->name, '.');
    for (int i = 1; dot && i < 3; i++)
        if (strcmp(dot + 1, passes[i]) == 0)
            return passes[i];
    return passes[0]; /* conv.fprop and what is fused with it */
}

/* A line of pins: its length, the layer's and the text. */
typedef struct line {
    const char *at, *text;
    int length, layer, text_length;
    const char *pass; /* NULL: of the wrong form */
} line;

/* The line that begins at `at`; false at the end. */
static bool read_line(const char *at, line *out)
{
    if (!at || !*at)
        return false;
    const char *end = strchrnul(at, '\n'), *equals = memchr(at, '=', (size_t)(end - at));
    *out = (line){.at = at, .length = (int)(end - at) + (*end == '\n')};
    if (!equals)
        return true;
    out->text = equals + 1;
    out->text_length = (int)(end - out->text);
    for (int i = 0; i < 3; i++) {
        const int layer = (int)(equals - at) - 6; /* without ".fprop" */
        if (layer > 0 && at[layer] == '.' && strncmp(at + layer + 1, passes[i], 5) == 0) {
            out->pass = passes[i];
            out->layer = layer;
        }
    }
    return true;
}

static bool is_of(const line *l, const dnri_op *op)
{
    return strlen(op->name) == (size_t)l->layer && strncmp(op->name, l->at, (size_t)l->layer) == 0;
}

bool dnri_pin_of(const dnri_lower_opts *o, const dnr_graph *g, const dnri_op *op,
                 char text[DNRI_PIN])
{
    const char *pass = dnri_conv_pass(op);
    line l;
    if (!pass || !dnri_graph_training(g))
        return false;
    for (const char *at = o->pins; read_line(at, &l); at += l.length)
        if (l.pass == pass && is_of(&l, op)) {
            snprintf(text, DNRI_PIN, "%.*s", l.text_length, l.text);
            return true;
        }
    return false;
}

dnr_status dnri_pins_check(const char *pins, const dnr_graph *g)
{
    line l;
    for (const char *at = pins; read_line(at, &l); at += l.length) {
        bool layer = false;
        if (!l.pass || l.text_length >= DNRI_PIN)
            return DNR_FAIL(DNR_EUSAGE,
                            "write cudnn.pin.LAYER.fprop, dgrad or wgrad = ENGINE, as dnnrun "
                            "tune --export does",
                            "cudnn.pin.%.*s pins no pass of a layer", l.length, at);
        for (int i = 0; i < dnri_graph_ops(g); i++) {
            const dnri_op *op = dnri_graph_op_c(g, i);
            layer |= is_of(&l, op) && dnri_conv_pass(op);
        }
        if (!layer)
            return DNR_FAIL(
                DNR_EUSAGE, "dnnrun plan lists the layers; leave the pin out, or correct its name",
                "cudnn.pin.%.*s: this model has no convolution %.*s", l.layer + 6, at, l.layer, at);
    }
    return DNR_OK;
}

void dnri_pins_remark(const char *pins, const dnr_graph *g)
{
    line l;
    for (const char *at = pins; read_line(at, &l); at += l.length) {
        bool computed = false;
        for (int i = 0; i < dnri_graph_ops(g); i++) {
            const dnri_op *op = dnri_graph_op_c(g, i);
            computed |= is_of(&l, op) && dnri_conv_pass(op) == l.pass;
        }
        if (!computed)
            dnri_log(
                DNR_LOG_INFO,
                "cudnn.pin.%.*s has no effect: this run has other ops in the place of that pass",
                l.layer + 6, at);
    }
}

void dnri_tell_tried(const dnri_lower_opts *o, const dnr_graph *g, const dnri_op *op,
                     const dnr_tune_way *ways, int n, int chosen, const char *pin)
{
    char problem[256], a[64], b[64], c[64];
    if (!o->tried || op->clone)
        return;
    snprintf(problem, sizeof problem, "%s %s → %s", dnri_desc_text(dnri_desc(g, op->in[0]), a),
             dnri_desc_text(dnri_desc(g, op->in[1]), b),
             dnri_desc_text(dnri_desc(g, op->out[0]), c));
    const dnr_tune_contest contest = {.layer = op->name,
                                      .pass = dnri_conv_pass(op),
                                      .op = op->def->name,
                                      .training = dnri_graph_training(g),
                                      .problem = problem,
                                      .ways = ways,
                                      .n = n,
                                      .chosen = chosen,
                                      .pin = pin};
    o->tried(o->tried_user, &contest);
}
