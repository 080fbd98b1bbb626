/* tool.c: errors, nearest names, arguments, formats. */
#include "tool.h"

#include <ctype.h>
#include <getopt.h>
#include <limits.h>
#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

dnr_status tool_fail(dnr_error *err, dnr_status status, const char *where, const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(err->what, sizeof err->what, fmt, ap);
    va_end(ap);
    snprintf(err->where, sizeof err->where, "%s", where);
    err->remedy[0] = 0;
    return err->status = status;
}

dnr_status tool_remedy(dnr_error *err, const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(err->remedy, sizeof err->remedy, fmt, ap);
    va_end(ap);
    return err->status;
}

dnr_status tool_lib_error(dnr_error *err, const char *where, const char *what)
{
    const dnr_error *e = dnr_last_error();
    err->status = e->status;
    snprintf(err->where, sizeof err->where, "%.56s%s%.36s", where ? where : "", where ? ", " : "",
             e->where);
    snprintf(err->what, sizeof err->what, "%.100s%s%.530s", what ? what : "", what ? ": " : "",
             e->what);
    snprintf(err->remedy, sizeof err->remedy, "%s", e->remedy);
    return err->status;
}

/* ---------------------------------------------------------------- names */

enum { NAME_MAX_LEN = 63 }; /* what follows is not compared */

static int name_length(const char *s)
{
    size_t n = strlen(s);
    return n < NAME_MAX_LEN ? (int)n : NAME_MAX_LEN;
}

int tool_distance(const char *a, const char *b)
{
    int d[3][NAME_MAX_LEN + 2]; /* rows i-2, i-1, i of the table */
    int n = name_length(a), m = name_length(b);
    for (int j = 0; j <= m; j++)
        d[0][j] = j;
    for (int i = 1; i <= n; i++) {
        int *row = d[i % 3], *up = d[(i + 2) % 3], *up2 = d[(i + 1) % 3];
        row[0] = i;
        for (int j = 1; j <= m; j++) {
            int ca = tolower((unsigned char)a[i - 1]), cb = tolower((unsigned char)b[j - 1]);
            int best = up[j - 1] + (ca != cb);
            best = up[j] + 1 < best ? up[j] + 1 : best;
            best = row[j - 1] + 1 < best ? row[j - 1] + 1 : best;
            if (i > 1 && j > 1 && ca == tolower((unsigned char)b[j - 2]) &&
                cb == tolower((unsigned char)a[i - 2]) && up2[j - 2] + 1 < best)
                best = up2[j - 2] + 1;
            row[j] = best;
        }
    }
    return d[n % 3][m];
}

const char *tool_nearest(const char *wrong, const char *const names[], int n)
{
    const char *best = NULL;
    int length = name_length(wrong),
        least = length / 3 + 1; /* still near: a third of the letters, and one */
    for (int i = 0; i < n; i++) {
        if (abs(length - name_length(names[i])) > least) /* the distance is no less */
            continue;
        int d = tool_distance(wrong, names[i]);
        if (d < least || (d == least && !best)) {
            least = d;
            best = names[i];
        }
    }
    return best;
}

/* ---------------------------------------------------------------- arguments */

static const struct option all_options[] = {
    {"help", no_argument, NULL, 'h'},
    {"out", required_argument, NULL, ARG_OUT},
    {"dry-run", no_argument, NULL, ARG_DRY_RUN},
    {"resume", required_argument, NULL, ARG_RESUME},
    {"init", required_argument, NULL, ARG_INIT},
    {"allow-changes", no_argument, NULL, ARG_ALLOW_CHANGES},
    {"weights", required_argument, NULL, ARG_WEIGHTS},
    {"json", no_argument, NULL, ARG_JSON},
    {"top", required_argument, NULL, ARG_TOP},
    {"show", no_argument, NULL, ARG_SHOW},
    {"warmup", required_argument, NULL, ARG_WARMUP},
    {"runs", required_argument, NULL, ARG_RUNS},
    {"baseline", required_argument, NULL, ARG_BASELINE},
    {"tolerance", required_argument, NULL, ARG_TOLERANCE},
    {"python", required_argument, NULL, ARG_PYTHON},
    {"exchange", required_argument, NULL, ARG_EXCHANGE},
    {"infer", no_argument, NULL, ARG_INFER},
    {"log-all-ranks", no_argument, NULL, ARG_LOG_ALL},
    {"most", required_argument, NULL, ARG_MOST},
    {"measure", no_argument, NULL, ARG_MEASURE},
    {"export", no_argument, NULL, ARG_EXPORT},
    {"profile", required_argument, NULL, ARG_PROFILE},
};
enum { N_OPTIONS = sizeof all_options / sizeof all_options[0] };

static dnr_status whole(const char *option, const char *text, int64_t min, int64_t *out,
                        dnr_error *err)
{
    char *end;
    long long v = strtoll(text, &end, 10);
    if (end != text && !*end && v >= min && v <= 1000000000) {
        *out = v;
        return DNR_OK;
    }
    tool_fail(err, DNR_EUSAGE, "command line", "%s %.100s", option, text);
    return tool_remedy(err, "give a whole number from %lld on", (long long)min);
}

/* "5%" or "0.05" */
static dnr_status share(const char *text, double *out, dnr_error *err)
{
    char *end;
    double v = strtod(text, &end);
    if (end != text && *end == '%' && !end[1]) {
        v /= 100;
        end++;
    }
    if (end != text && !*end && v >= 0 && v < 10) {
        *out = v;
        return DNR_OK;
    }
    tool_fail(err, DNR_EUSAGE, "command line", "--tolerance %.100s", text);
    return tool_remedy(err, "give a share, such as 5%% or 0.05");
}

/* The options of predict, bench and report. */
static dnr_status take_more(int c, const char *value, tool_args *a, dnr_error *err)
{
    switch (c) {
    case ARG_TOP:
        return whole("--top", value, 1, &a->top, err);
    case ARG_MOST:
        return whole("--most", value, 1, &a->most, err);
    case ARG_WARMUP:
        return whole("--warmup", value, 1, &a->warmup, err);
    case ARG_PROFILE:
        return whole("--profile", value, 1, &a->profile, err);
    case ARG_RUNS:
        return whole("--runs", value, 2, &a->runs, err);
    case ARG_TOLERANCE:
        return share(value, &a->tolerance, err);
    case ARG_BASELINE:
        a->baseline = value;
        break;
    case ARG_PYTHON:
        a->python = value;
        break;
    case ARG_EXCHANGE:
        a->exchange = value;
        break;
    case ARG_SHOW:
        a->show = true;
        break;
    case ARG_INFER:
        a->infer = true;
        break;
    case ARG_LOG_ALL:
        a->log_all_ranks = true;
        break;
    }
    return DNR_OK;
}

dnr_status tool_parse(int argc, char **argv, int allowed, tool_args *a, dnr_error *err)
{
    struct option options[N_OPTIONS + 1] = {{0}};
    const char *names[N_OPTIONS];
    int n = 0, c;
    for (int i = 0; i < N_OPTIONS; i++) {
        if (all_options[i].val == 'h' || (all_options[i].val & allowed)) {
            names[n] = all_options[i].name;
            options[n++] = all_options[i];
        }
    }
    *a = (tool_args){
        .top = -1, .warmup = -1, .runs = -1, .most = -1, .profile = -1, .tolerance = -1};
    opterr = 0;
    optind = 1;
    while ((c = getopt_long(argc, argv, allowed & ARG_OUT ? ":ho:" : ":h", options, NULL)) != -1) {
        switch (c) {
        case 'h':
            a->help = true;
            return DNR_OK;
        case 'o':
        case ARG_OUT:
            a->out = optarg;
            break;
        case ARG_WEIGHTS:
            a->weights = optarg;
            break;
        case ARG_RESUME:
            a->resume = optarg;
            break;
        case ARG_INIT:
            a->init = optarg;
            break;
        case ARG_ALLOW_CHANGES:
            a->allow_changes = true;
            break;
        case ARG_DRY_RUN:
            a->dry_run = true;
            break;
        case ARG_JSON:
            a->json = true;
            break;
        case ARG_MEASURE:
            a->measure = true;
            break;
        case ARG_EXPORT:
            a->export = true;
            break;
        case ':':
            tool_fail(err, DNR_EUSAGE, "command line", "option %s needs a value", argv[optind - 1]);
            return tool_remedy(err, "see dnnrun %s --help", argv[0]);
        default: {
            if (c != '?') {
                if (take_more(c, optarg, a, err) != DNR_OK)
                    return err->status;
                break;
            }
            /* optopt is the letter of a short option; a long one is the last word taken */
            char wrong[64];
            if (optopt && optopt != '?' && !strchr(argv[optind - 1], '=') &&
                argv[optind - 1][1] != '-')
                snprintf(wrong, sizeof wrong, "-%c", optopt);
            else
                snprintf(wrong, sizeof wrong, "%.*s", (int)strcspn(argv[optind - 1], "="),
                         argv[optind - 1]);
            tool_fail(err, DNR_EUSAGE, "command line", "%s has no option %s", argv[0], wrong);
            const char *near = wrong[1] == '-' ? tool_nearest(wrong + 2, names, n) : NULL;
            return near ? tool_remedy(err, "did you mean --%s? See dnnrun %s --help", near, argv[0])
                        : tool_remedy(err,
                                      "see dnnrun %s --help; cfg keys are set as section.key=value",
                                      argv[0]);
        }
        }
    }
    if (optind < argc) {
        a->cfg = argv[optind];
        a->set = argv + optind + 1;
        a->n_set = argc - optind - 1;
    }
    return DNR_OK;
}

dnr_status tool_need_cfg(const tool_args *a, const char *command, dnr_error *err)
{
    if (a->cfg && (!strchr(a->cfg, '=') || access(a->cfg, F_OK) == 0))
        return DNR_OK;
    tool_fail(err, DNR_EUSAGE, "command line", "%s needs a cfg%s%.200s", command,
              a->cfg ? " before " : "", a->cfg ? a->cfg : "");
    return tool_remedy(err, "for example dnnrun %s quickstart.cfg; see dnnrun %s --help", command,
                       command);
}

/* ---------------------------------------------------------------- formats */

const char *tool_bytes(double bytes, char buf[32])
{
    static const char *const unit[] = {"B", "KiB", "MiB", "GiB", "TiB"};
    int u = 0;
    while (bytes >= 1024 && u < 4) {
        bytes /= 1024;
        u++;
    }
    snprintf(buf, 32, "%.*f %s", u == 0 || bytes >= 100 ? 0 : 1, bytes, unit[u]);
    return buf;
}

const char *tool_thousands(int64_t n, char buf[32])
{
    char digits[24];
    int len = snprintf(digits, sizeof digits, "%lld", (long long)n), o = 0;
    for (int i = 0; i < len; i++) {
        buf[o++] = digits[i];
        if ((len - 1 - i) % 3 == 0 && i < len - 1 && digits[i] != '-')
            buf[o++] = ',';
    }
    buf[o] = 0;
    return buf;
}

const char *tool_duration(double seconds, char buf[32])
{
    if (!isfinite(seconds) || seconds < 0 || seconds > 1e8) {
        snprintf(buf, 32, "?");
    } else if (seconds < 10) {
        snprintf(buf, 32, "%.1f s", seconds);
    } else {
        long s = lround(seconds);
        if (s < 3600)
            snprintf(buf, 32, "%ld:%02ld", s / 60, s % 60);
        else
            snprintf(buf, 32, "%ld:%02ld:%02ld", s / 3600, s / 60 % 60, s % 60);
    }
    return buf;
}

bool tool_share(int i, char *buf, size_t size)
{
    static const char *const places[] = {"../share/dnnrun", "share/dnnrun"};
    char exe[PATH_MAX];
    ssize_t n = readlink("/proc/self/exe", exe, sizeof exe - 1);
    exe[n > 0 ? n : 0] = 0;
    char *slash = strrchr(exe, '/');
    if (slash)
        *slash = 0;
    return i < 2 && (size_t)snprintf(buf, size, "%s/%s", exe, places[i]) < size;
}

bool tool_shipped(const char *file, char *buf, size_t size)
{
    char folder[PATH_MAX];
    for (int i = 0; tool_share(i, folder, sizeof folder); i++)
        if ((size_t)snprintf(buf, size, "%s/%s", folder, file) < size && access(buf, R_OK) == 0)
            return true;
    return false;
}

double tool_now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}
