/* resnet.c: the models.
 *
 * ResNet-18 … 152 are v1.5 (He et al. 2015, arXiv:1512.03385, with the stride on the 3×3
 * convolution), with torchvision's names, so that weights travel both ways. ResNet-8 … 110 for
 * CIFAR are section 4.2 of the paper: three stages of 16, 32 and 64 channels with parameter-free
 * shortcuts (option A). */
#include "../layers/layers.h"
#include "../runtime/extend.h"

#include <string.h>

typedef struct {
    const char *name;
    int blocks[4]; /* in each stage */
    bool bottleneck;
    bool cifar; /* the paper's CIFAR family */
} spec;

static const spec specs[] = {
    {"resnet18", {2, 2, 2, 2}, false, false},  {"resnet34", {3, 4, 6, 3}, false, false},
    {"resnet50", {3, 4, 6, 3}, true, false},   {"resnet101", {3, 4, 23, 3}, true, false},
    {"resnet152", {3, 8, 36, 3}, true, false}, {"resnet8", {1, 1, 1}, false, true},
    {"resnet20", {3, 3, 3}, false, true},      {"resnet32", {5, 5, 5}, false, true},
    {"resnet44", {7, 7, 7}, false, true},      {"resnet56", {9, 9, 9}, false, true},
    {"resnet110", {18, 18, 18}, false, true},
};
enum { STEM = 4 }; /* a stage of its own, after 0 … 3 */
#define N_SPECS (int)(sizeof specs / sizeof specs[0])

/* conv NAME.conv<i> and norm NAME.bn<i> */
static dnr_tid conv_norm(dnr_graph *g, const char *name, int i, dnr_tid x, const dnr_conv_opts *c,
                         dnr_tid residual, const dnr_norm_opts *n)
{
    char conv[DNRI_NAME], bn[DNRI_NAME];
    const char *dot = *name ? "." : "";
    snprintf(conv, sizeof conv, "%s%sconv%d", name, dot, i);
    snprintf(bn, sizeof bn, "%s%sbn%d", name, dot, i);
    return dnr_norm(g, bn, dnr_conv(g, conv, x, c), residual, n);
}

/* What is added to a block's output: the input itself, or its projection (option B), or, for CIFAR,
 * option A. */
static dnr_tid shortcut(dnr_graph *g, const spec *m, const char *name, dnr_tid x, int out,
                        int stride)
{
    char conv[DNRI_NAME], bn[DNRI_NAME];
    if (x < 0 || (stride == 1 && dnri_desc(g, x)->dim[3] == out))
        return x;
    snprintf(conv, sizeof conv, "%s.downsample.0", name);
    snprintf(bn, sizeof bn, "%s.downsample.1", name);
    if (m->cifar)
        return dnr_shortcut_a(g, conv, x, out, stride);
    dnr_tid y = dnr_conv(g, conv, x, &(dnr_conv_opts){out, 1, stride, 0});
    return dnr_norm(g, bn, y, DNRI_NONE, &(dnr_norm_opts){.relu = false});
}

static dnr_tid block(dnr_graph *g, const spec *m, const char *name, dnr_tid x, int width,
                     int stride, bool zero_init)
{
    const dnr_norm_opts inner = {.relu = true}, last = {.relu = true, .zero_init = zero_init};
    int out = m->bottleneck ? 4 * width : width;
    dnr_tid skip = shortcut(g, m, name, x, out, stride);
    if (!m->bottleneck) {
        dnr_tid y =
            conv_norm(g, name, 1, x, &(dnr_conv_opts){width, 3, stride, 1}, DNRI_NONE, &inner);
        return conv_norm(g, name, 2, y, &(dnr_conv_opts){width, 3, 1, 1}, skip, &last);
    }
    dnr_tid y = conv_norm(g, name, 1, x, &(dnr_conv_opts){width, 1, 1, 0}, DNRI_NONE, &inner);
    y = conv_norm(g, name, 2, y, &(dnr_conv_opts){width, 3, stride, 1}, DNRI_NONE, &inner);
    return conv_norm(g, name, 3, y, &(dnr_conv_opts){out, 1, 1, 0}, skip, &last);
}

static dnr_tid build(dnr_graph *g, const spec *m, dnr_tid x, const dnr_model_opts *o)
{
    const dnr_norm_opts relu = {.relu = true};
    bool small = o->stem ? strcmp(o->stem, "cifar") == 0 : m->cifar;
    int width = m->cifar ? 16 : 64, number = 0;
    dnri_graph_scope(g, STEM, number++);
    if (small) {
        x = conv_norm(g, "", 1, x, &(dnr_conv_opts){width, 3, 1, 1}, DNRI_NONE, &relu);
    } else {
        x = conv_norm(g, "", 1, x, &(dnr_conv_opts){width, 7, 2, 3}, DNRI_NONE, &relu);
        x = dnr_max_pool(g, "maxpool", x, &(dnr_pool_opts){3, 2, 1});
    }
    for (int s = 0; s < 4 && m->blocks[s]; s++)
        for (int b = 0; b < m->blocks[s]; b++) {
            char name[DNRI_NAME];
            snprintf(name, sizeof name, "layer%d.%d", s + 1, b);
            dnri_graph_scope(g, s, number++);
            x = block(g, m, name, x, width << s, s > 0 && b == 0 ? 2 : 1, o->zero_init_residual);
        }
    dnri_graph_scope(g, -1, -1);
    return dnr_dense(g, "fc", dnr_global_avg_pool(g, "avgpool", x), o->classes);
}

static const spec *find(const char *name)
{
    for (int i = 0; i < N_SPECS; i++)
        if (strcmp(specs[i].name, name) == 0)
            return &specs[i];
    return NULL;
}

static dnr_tid resnet(dnr_graph *g, dnr_tid x, const dnr_model_opts *o)
{
    const char *stem = o->stem ? o->stem : "imagenet";
    if (strcmp(stem, "imagenet") && strcmp(stem, "cifar")) {
        DNR_FAIL(DNR_EUSAGE, "use model.stem = imagenet or cifar", "there is no stem \"%s\"", stem);
        dnri_graph_fail(g);
        return DNRI_NONE;
    }
    if (o->classes < 1) {
        DNR_FAIL(DNR_EUSAGE, "set model.classes to the number of classes", "a model of %d classes",
                 o->classes);
        dnri_graph_fail(g);
        return DNRI_NONE;
    }
    return build(g, find(o->name), x, o);
}

const char *const *dnr_model_names(void)
{
    static const char *names[N_SPECS + 1];
    for (int i = 0; i < N_SPECS; i++)
        names[i] = specs[i].name;
    return names;
}

dnr_status dnri_model_find(const char *name, dnri_model_fn *out)
{
    *out = find(name) ? resnet : dnri_extended_model(name);
    if (*out)
        return DNR_OK;
    return DNR_FAIL(
        DNR_EUSAGE,
        "use resnet18, 34, 50, 101, 152 (ImageNet) or resnet8, 20, 32, 44, 56, 110 (CIFAR)",
        "there is no model \"%s\"", name);
}
