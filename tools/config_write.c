/* config_write.c: values and keys as text: the resolved cfg, the keys of --help, docs/cfg.md. */
#include "config.h"

#include <stdlib.h>
#include <string.h>

/* The shortest text that reads back as the same number. */
static int real_text(double v, char *buf, size_t size)
{
    int len = 0;
    for (int digits = 6; digits <= 17; digits++) {
        len = snprintf(buf, size, "%.*g", digits, v);
        if (strtod(buf, NULL) == v)
            break;
    }
    return len;
}

const char *cfg_value(const cfg *c, const cfg_key *k, char buf[CFG_TEXT])
{
    const void *field = (const char *)c + k->offset;
    buf[0] = 0;
    switch (k->type) {
    case CFG_BOOL:
        snprintf(buf, CFG_TEXT, "%s", *(const bool *)field ? "true" : "false");
        break;
    case CFG_INT:
        snprintf(buf, CFG_TEXT, "%lld", (long long)*(const int64_t *)field);
        break;
    case CFG_REAL:
        real_text(*(const double *)field, buf, CFG_TEXT);
        break;
    case CFG_REALS: {
        const cfg_list *list = field;
        int at = 0;
        for (int64_t i = 0; i < list->n; i++) {
            if (i)
                buf[at++] = ' ';
            at += real_text(list->v[i], buf + at, 32);
        }
        break;
    }
    case CFG_CHOICE: {
        const char *p = k->choices;
        for (int64_t i = *(const int64_t *)field; i > 0; i--)
            p = strchr(p, '|') + 1;
        snprintf(buf, CFG_TEXT, "%.*s", (int)strcspn(p, "|"), p);
        break;
    }
    case CFG_STRING:
    case CFG_PATH:
        snprintf(buf, CFG_TEXT, "%s", (const char *)field);
        break;
    }
    return buf;
}

/* Length of "train" of "train.batch"; 0 for a key without a section. */
static int section_length(const cfg_key *k)
{
    const char *dot = strchr(k->name, '.');
    return dot ? (int)(dot - k->name) : 0;
}

static bool starts_section(int i)
{
    int n = section_length(&cfg_keys[i]);
    return n && (i == 0 || section_length(&cfg_keys[i - 1]) != n ||
                 strncmp(cfg_keys[i - 1].name, cfg_keys[i].name, (size_t)n));
}

static const char *short_name(const cfg_key *k)
{
    int n = section_length(k);
    return k->name + (n ? n + 1 : 0);
}

/* Read back as it is, would it lose blanks, quotes or what looks like a comment? */
static bool needs_quotes(const char *v)
{
    size_t n = strlen(v);
    bool needs = n && (strchr(" \t\"#;", *v) || strchr(" \t", v[n - 1]));
    for (size_t i = 1; i < n; i++)
        needs = needs || (strchr("#;", v[i]) && strchr(" \t\v\f", v[i - 1]));
    return needs;
}

/* Is key i the last of section [cudnn]? */
static bool ends_cudnn(int i)
{
    return !strncmp(cfg_keys[i].name, "cudnn.", 6) &&
           (i + 1 == cfg_n_keys || strncmp(cfg_keys[i + 1].name, "cudnn.", 6));
}

void cfg_write(const cfg *c, FILE *out)
{
    char value[CFG_TEXT];
    for (int i = 0; i < cfg_n_keys; i++) {
        const cfg_key *k = &cfg_keys[i];
        if (starts_section(i))
            fprintf(out, "\n[%.*s]\n", section_length(k), k->name);
        cfg_value(c, k, value);
        const char *quote = needs_quotes(value) ? "\"" : "";
        fprintf(out, "%s =%s%s%s%s\n", short_name(k), *value ? " " : "", quote, value, quote);
        for (int p = 0; ends_cudnn(i) && p < c->n_pins; p++)
            fprintf(out, "pin.%s = %s\n", c->pins[p].name, c->pins[p].engine);
    }
}

void cfg_write_help(FILE *out)
{
    char range[576];
    for (int i = 0; i < cfg_n_keys; i++) {
        const cfg_key *k = &cfg_keys[i];
        cfg_range(k, range);
        if (starts_section(i))
            fputc('\n', out);
        fprintf(out, "  %-26s %-18s %s%s%s\n", k->name, *k->unset ? k->unset : "-", range,
                *range && *k->unit ? " " : "", k->unit);
    }
}

/* What the sections are for, in the order of the table. */
static const struct {
    const char *name, *doc;
} sections[] = {
    {"model", "The network."},
    {"data", "Where pictures come from and what is done to them."},
    {"train", "How long, how much at once, in which precision."},
    {"optim", "Stochastic gradient descent and its learning rate."},
    {"memory", "What may be planned, and what is computed twice to plan less."},
    {"cudnn", "Choices of the CUDA back end."},
    {"run", "What is written where."},
};

static const char intro[] =
    "# The cfg: every key\n"
    "\n"
    "<!-- Made from tools/config_table.c by `dnnrun config-doc`; change it there. -->\n"
    "\n"
    "A cfg is a text file of sections and keys:\n"
    "\n"
    "```ini\n"
    "device = auto            # keys without a section come first\n"
    "\n"
    "[model]\n"
    "name = resnet50\n"
    "\n"
    "[train]\n"
    "batch = 256              # a comment begins with # or ;\n"
    "```\n"
    "\n"
    "On the command line `section.key=value` wins over the file: `dnnrun train resnet50.cfg "
    "train.batch=128`.\n"
    "\n"
    "A key that is not listed here, one given twice, a value of the wrong type or out of its range "
    "is an error that\n"
    "names the line and the nearest right name. `dnnrun train CFG --dry-run` prints every key with "
    "its value.\n"
    "\n"
    "**Cfg files.** `dnnrun train resnet50.cfg` takes the file of that name in the current folder, "
    "else the one that came\n"
    "with dnnrun.\n"
    "\n"
    "**Paths** are relative to the current folder, as on the command line. One that begins with "
    "`@cfg/` is relative to the\n"
    "folder of the cfg file, one that begins with `~/` to the home folder. A value in double "
    "quotes may hold `#` and `;` after a blank.\n"
    "\n"
    "**Lists** of numbers are separated by blanks or commas.\n";

static const char pins[] =
    "\n### cudnn.pin.LAYER.PASS\n"
    "\n"
    "CUDA, in training: the convolution of that name computes its pass (`fprop`, `dgrad` or "
    "`wgrad`) by this engine of\n"
    "cuDNN's, whatever is faster: `cudnn.pin.layer1.0.conv2.wgrad = eng67 k2=4,13=0`. `dnnrun tune "
    "CFG --export` writes such\n"
    "lines; `sums+` before an engine means that the batch norm's statistics are made apart. Where "
    "this cuDNN does not compute\n"
    "the pass so, or not within `cudnn.workspace_mb`, another engine is taken, with a remark. At "
    "most 512.\n"
    "\n"
    "Default: none.\n";

void cfg_write_doc(FILE *out)
{
    char range[576];
    fputs(intro, out);
    for (int i = 0; i < cfg_n_keys; i++) {
        const cfg_key *k = &cfg_keys[i];
        if (starts_section(i)) {
            int n = section_length(k);
            fprintf(out, "\n## [%.*s]\n", n, k->name);
            for (size_t s = 0; s < sizeof sections / sizeof sections[0]; s++)
                if (!strncmp(sections[s].name, k->name, (size_t)n) && !sections[s].name[n])
                    fprintf(out, "\n%s\n", sections[s].doc);
        }
        fprintf(out, "\n### %s\n\n%s\n\n", k->name, k->doc);
        if (*cfg_range(k, range))
            fprintf(out, "Allowed: %s%s%s. ", range, *k->unit ? " " : "", k->unit);
        if (*k->unset)
            fprintf(out, "Default: `%s`.\n", k->unset);
        else
            fprintf(out, "Default: empty.\n");
        if (ends_cudnn(i))
            fputs(pins, out);
    }
}
