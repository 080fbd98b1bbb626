/* cmd_report.c: dnnrun report: runs as one page that needs nothing else: the data and the charting library are in it. */
#include "embedded.h"
#include "rundir.h"

#include <errno.h>
#include <jansson.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static const char help[] =
    "dnnrun report RUN... -o FILE: runs as one self-contained page.\n"
    "\n"
    "  dnnrun report runs/quickstart-20250131-120000 -o report.html\n"
    "  dnnrun report runs/* -o all.html                  several runs overlaid\n"
    "\n"
    "  -o, --out FILE     the page (report.html); /dev/stdout for a pipe\n"
    "\n"
    "Loss, accuracy, learning rate, loss scale, throughput, where a step's time goes, the map of a "
    "step's memory, the\n"
    "cfgs and manifests. Opens in any browser, without a network.\n";

static char *read_text(const char *folder, const char *name)
{
    char path[CFG_TEXT + 64];
    char *text = NULL;
    size_t size = 0, n;
    char buf[8192];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *f = fopen(path, "r"), *m = f ? open_memstream(&text, &size) : NULL;
    while (m && (n = fread(buf, 1, sizeof buf, f)) > 0)
        fwrite(buf, 1, n, m);
    if (f)
        fclose(f);
    if (m && fclose(m) != 0) {
        free(text);
        text = NULL;
    }
    return text;
}

static json_t *read_json(const char *folder, const char *name)
{
    char *text = read_text(folder, name);
    json_t *j = text ? json_loads(text, 0, NULL) : NULL;
    free(text);
    return j ? j : json_null();
}

/* metrics.jsonl; a run that goes on, or was killed, may end within a line. */
static json_t *read_metrics(const char *folder)
{
    char *text = read_text(folder, "metrics.jsonl"), *save = NULL;
    if (!text)
        return NULL;
    json_t *list = json_array();
    for (char *line = strtok_r(text, "\n", &save); line; line = strtok_r(NULL, "\n", &save)) {
        json_t *record = json_loads(line, 0, NULL);
        if (record)
            json_array_append_new(list, record);
    }
    free(text);
    return list;
}

static dnr_status add_run(json_t *runs, const char *path, dnr_error *err)
{
    char folder[CFG_TEXT];
    snprintf(folder, sizeof folder, "%s", path);
    for (size_t n = strlen(folder); n > 1 && folder[n - 1] == '/'; n--)
        folder[n - 1] = 0;
    json_t *metrics = read_metrics(folder);
    if (!metrics) {
        tool_fail(err, DNR_EUSAGE, "command line", "%.400s is no run: it has no metrics.jsonl",
                  path);
        return tool_remedy(err, "give folders that dnnrun train has written");
    }
    char *cfg_text = read_text(folder, "resolved.cfg"), *name = strrchr(folder, '/');
    json_t *run = json_pack("{s:o, s:o, s:o, s:o, s:o}", "name",
                            rundir_text(name && name[1] ? name + 1 : folder), "cfg",
                            rundir_text(cfg_text ? cfg_text : ""), "manifest",
                            read_json(folder, "manifest.json"), "plan",
                            read_json(folder, "plan.json"), "metrics", metrics);
    free(cfg_text);
    if (run && json_array_append_new(runs, run) == 0)
        return DNR_OK;
    tool_fail(err, DNR_EMEM, "report", "out of host memory");
    return tool_remedy(err, "report fewer runs at once");
}

/* The data stand in a <script>, which only "</" could end. */
static void put_data(const json_t *data, FILE *out)
{
    char *text = json_dumps(data, JSON_COMPACT | JSON_REAL_PRECISION(7));
    for (const char *p = text; p && *p; p++) {
        putc(*p, out);
        if (*p == '<' && p[1] == '/')
            putc('\\', out);
    }
    free(text);
}

/* The page with the library and the data in their places. */
static void put_page(const json_t *data, FILE *out)
{
    static const char chart[] = "/*CHART.JS*/", json[] = "/*DATA*/";
    const char *page = embedded_report_html, *a = strstr(page, chart), *b = strstr(page, json);
    fwrite(page, 1, (size_t)(a - page), out);
    fputs(embedded_chart_js, out);
    a += sizeof chart - 1;
    fwrite(a, 1, (size_t)(b - a), out);
    put_data(data, out);
    fputs(b + sizeof json - 1, out);
}

/* Is there something at `path` that a rename would replace in place of writing to it: a pipe, a device? */
static bool is_no_file(const char *path)
{
    struct stat sb;
    return stat(path, &sb) == 0 && !S_ISREG(sb.st_mode);
}

/* A file appears whole or stays what it was; a link to one stays a link. */
static dnr_status write_page(const json_t *data, const char *path, dnr_error *err)
{
    char temp[PATH_MAX + 16];
    const bool direct = is_no_file(path);
    char *real = direct ? NULL : realpath(path, NULL); /* NULL: there is none yet */
    const char *to = real ? real : path;
    int n = snprintf(temp, sizeof temp, "%s%s", to, direct ? "" : ".partial");
    errno = ENAMETOOLONG;
    FILE *f = n < (int)sizeof temp ? fopen(temp, "w") : NULL;
    bool good = f != NULL;
    if (f) {
        put_page(data, f);
        good = !ferror(f);
        good = fclose(f) == 0 && good;
        good = good && (direct || rename(temp, to) == 0);
    }
    const int reason = errno;
    if (!good && f && !direct)
        unlink(temp);
    free(real);
    if (good)
        return DNR_OK;
    tool_fail(err, DNR_EDISK, "report", "cannot write %.400s: %s", path, strerror(reason));
    return tool_remedy(err, reason == ENOSPC
                                ? "free some space, or choose another place with -o FILE"
                                : "choose another place with -o FILE");
}

dnr_status cmd_report(int argc, char **argv, dnr_error *err)
{
    tool_args a;
    json_t *data = NULL;
    dnr_status st;
    TOOL_TRY(st, tool_parse(argc, argv, ARG_OUT, &a, err));
    if (a.help) {
        fputs(help, stdout);
        return DNR_OK;
    }
    if (!*embedded_chart_js) {
        tool_fail(err, DNR_EFAIL, "report",
                  "this dnnrun was built without Chart.js, which draws the "
                  "curves");
        return tool_remedy(err, "sudo apt-get install libjs-chart.js, then configure and build "
                                "dnnrun anew");
    }
    if (!a.cfg) {
        tool_fail(err, DNR_EUSAGE, "command line", "report of which runs?");
        return tool_remedy(err, "for example dnnrun report runs/* -o report.html");
    }
    const char *path = a.out ? a.out : "report.html";
    json_t *runs = json_array();
    data = json_pack("{s:s, s:o}", "dnnrun", dnr_version(), "runs", runs);
    TOOL_TRY(st, add_run(runs, a.cfg, err));
    for (int i = 0; i < a.n_set; i++)
        TOOL_TRY(st, add_run(runs, a.set[i], err));
    TOOL_TRY(st, write_page(data, path, err));
    if (!is_no_file(path))
        printf("%s: %d run%s\n", path, a.n_set + 1, a.n_set ? "s" : "");
out:
    json_decref(data);
    return st;
}
