/* pin.c: convolutions whose engine the user has chosen: "eng67 k2=4,13=0", with "sums+" before it where a pass of our
 * own makes the statistics. */
#include "../pins.h"
#include "convplan.h"

#include <float.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static bool parse(const char *text, bool *sums, dnri_cudnn_config *c)
{
    long long engine, type, value;
    int end = 0;
    *c = (dnri_cudnn_config){0};
    *sums = strncmp(text, "sums+", 5) == 0;
    text += *sums ? 5 : 0;
    if (sscanf(text, "eng%lld%n", &engine, &end) != 1 || !end || engine < 0)
        return false;
    c->engine = engine;
    for (text += end; *text; text += end) {
        end = 0;
        if (c->n == DNRI_KNOBS || strncmp(text, c->n ? "," : " k", c->n ? 1 : 2) ||
            sscanf(text + (c->n ? 1 : 2), "%lld=%lld%n", &type, &value, &end) != 2 || !end)
            return false;
        end += c->n ? 1 : 2;
        c->type[c->n] = type;
        c->value[c->n++] = value;
    }
    return true;
}

const char *dnri_cudnn_pin_text(const dnri_conv_plan *plan, bool sums, char text[DNRI_PIN])
{
    const dnri_cudnn_config *c = &plan->config;
    if (!plan->plan || c->n < 0)
        return NULL;
    int len = snprintf(text, DNRI_PIN, "%seng%lld", sums ? "sums+" : "", (long long)c->engine);
    for (int i = 0; i < c->n && len < DNRI_PIN; i++)
        len += snprintf(text + len, (size_t)(DNRI_PIN - len), "%s%lld=%lld", i ? "," : " k",
                        (long long)c->type[i], (long long)c->value[i]);
    return len < DNRI_PIN ? text : NULL;
}

/* Builds the plan of a pin; plan->plan stays NULL where cuDNN does not make it within the problem's bounds. */
static dnr_status build(dnri_cuda *d, dnri_conv_plan *plan, const dnri_cudnn_config *config)
{
    dnri_cudnn_target t = {.device = d->paper, .said_refused = &d->said_refused};
    dnri_conv_candidate c = {0};
    if (!d->paper)
        DNR_TRY(dnri_cuda_cudnn(d, &t.handle));
    DNR_TRY(dnri_cudnn_rebuild(plan->keep, &t, &plan->problem, config, &c));
    plan->us = FLT_MAX;
    plan->verdict = DNRI_ONE_PLAN;
    plan->plan = c.plan;
    plan->workspace = c.workspace;
    plan->config = c.config;
    memcpy(plan->impl, c.impl, sizeof plan->impl);
    return DNR_OK;
}

static dnr_status find(dnri_cuda *d, const dnri_conv_problem *p, const char *text,
                       const dnri_cudnn_config *config, const char *layer, dnri_conv_plan **out)
{
    for (dnri_conv_plan *q = d->plans; q; q = q->next)
        if (memcmp(&q->problem, p, sizeof *p) == 0 && q->pin && strcmp(q->pin, text) == 0) {
            *out = q;
            return DNR_OK;
        }
    dnri_conv_plan *plan = calloc(1, sizeof *plan);
    if (!plan)
        return DNR_FAIL_NOMEM();
    plan->problem = *p;
    plan->pin = strdup(text);
    plan->keep = dnri_cudnn_keep_new();
    dnr_status st = plan->pin && plan->keep ? build(d, plan, config) : DNR_FAIL_NOMEM();
    if (st == DNR_OK && !plan->plan)
        dnri_log(
            DNR_LOG_WARN,
            "cudnn.pin.%s: this cuDNN does not compute it by %s within %lld MiB and with these "
            "settings: another engine is taken",
            layer, text, (long long)p->workspace_cap >> 20);
    plan->next = d->plans; /* also one without a plan, so that this is said once */
    *out = d->plans = plan;
    return st;
}

dnr_status dnri_cudnn_pinned(dnri_cuda *d, const dnri_conv_problem *p, const dnr_graph *g,
                             const dnri_op *op, const dnri_lower_opts *o, dnri_conv_plan **out)
{
    char text[DNRI_PIN], name[DNRI_NAME + 8];
    dnri_cudnn_config config;
    dnri_conv_problem problem = *p;
    bool sums;
    *out = NULL;
    if (!dnri_pin_of(o, g, op, text))
        return DNR_OK;
    snprintf(name, sizeof name, "%s.%s", op->name, dnri_conv_pass(op));
    if (strcmp(text, DNRI_PIN_OWN) == 0) {
        dnri_log(DNR_LOG_WARN, "cudnn.pin.%s: no %s takes it here: an engine of cuDNN's is taken",
                 name, text);
        return DNR_OK;
    }
    if (!parse(text, &sums, &config) || (sums && p->kind != DNRI_FPROP_STATS))
        return DNR_FAIL(DNR_EUSAGE,
                        "write it as dnnrun tune --export does: eng67 k2=4,13=0, with sums+ before "
                        "it for a convolution whose statistics are made apart",
                        "cudnn.pin.%s = %s", name, text);
    if (sums)
        problem.kind = DNRI_FPROP;
    DNR_TRY(find(d, &problem, text, &config, name, out));
    if (!(*out)->plan)
        *out = NULL;
    return DNR_OK;
}

dnr_status dnri_cudnn_choose_for(dnri_cuda *d, const dnri_conv_problem *p, const dnr_graph *g,
                                 const dnri_op *op, const dnri_lower_opts *o, dnri_conv_plan **out)
{
    DNR_TRY(dnri_cudnn_pinned(d, p, g, op, o, out));
    return *out ? DNR_OK : dnri_cudnn_choose(d, p, out);
}

void dnri_cudnn_tell(const dnri_lower_opts *o, const dnr_graph *g, const dnri_op *op,
                     const dnri_conv_plan *tried, const dnri_conv_plan *taken)
{
    dnr_tune_way ways[DNRI_CANDIDATES + 1];
    char pin[DNRI_PIN], apart[96];
    const bool sums = tried != taken && tried->problem.kind == DNRI_FPROP_STATS;
    int n = 0, chosen = -1;
    if (!o->tried)
        return;
    for (; n < tried->n_tried; n++) {
        ways[n] = tried->tried[n];
        ways[n].implementation = tried->impls[n];
        if (tried == taken && strcmp(tried->impls[n], taken->impl) == 0)
            chosen = n;
    }
    if (tried != taken) { /* by fprop's plan and a pass of our own */
        snprintf(apart, sizeof apart, "%s + a pass of our own",
                 taken->plan ? taken->impl : "plain loops");
        ways[n] = (dnr_tune_way){apart, tried->us_apart > 0 ? (double)tried->us_apart : -1,
                                 taken->workspace};
        chosen = n++;
    }
    dnri_tell_tried(o, g, op, ways, n, chosen, dnri_cudnn_pin_text(taken, sums, pin));
}
