/* clirig.c: the tool from outside, in a scratch folder. */
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "clirig.h"

char tool[1024];
char *out_text, *err_text;

char *slurp(const char *path)
{
    FILE *f = fopen(path, "r");
    char *text = NULL;
    size_t size = 0, n;
    char buf[4096];
    if (!f)
        return NULL;
    FILE *m = open_memstream(&text, &size);
    while ((n = fread(buf, 1, sizeof buf, f)) > 0)
        fwrite(buf, 1, n, m);
    fclose(f);
    fclose(m);
    return text;
}

void sh(const char *fmt, ...)
{
    char command[4096];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(command, sizeof command, fmt, ap);
    va_end(ap);
    if (system(command) != 0)
        fail_msg("failed: %s", command);
}

int dnnrun(const char *fmt, ...)
{
    char args[2048], command[4096];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(args, sizeof args, fmt, ap);
    va_end(ap);
    snprintf(command, sizeof command, "'%s' %s >stdout.txt 2>stderr.txt </dev/null", tool, args);
    int status = system(command);
    free(out_text);
    free(err_text);
    out_text = slurp("stdout.txt");
    err_text = slurp("stderr.txt");
    assert_true(WIFEXITED(status));
    return WEXITSTATUS(status);
}

void has(const char *text, const char *part)
{
    if (!text || !strstr(text, part))
        fail_msg("\"%s\" does not contain \"%s\"", text ? text : "(nothing)", part);
}

void fails(int code, const char *args, const char *what, const char *remedy)
{
    int got = dnnrun("%s", args);
    if (got != code)
        fail_msg("dnnrun %s: exit code %d, not %d; stderr: %s", args, got, code, err_text);
    const char *message = strstr(err_text, "dnnrun: "), *second = strstr(err_text, "\n  remedy: ");
    assert_non_null(message);
    assert_non_null(second);
    has(message, what);
    has(second, remedy);
    assert_non_null(strchr(message, '('));
    assert_true(second[strlen("\n  remedy: ")] != '\n');
}

bool have_cpu(void)
{
    static int known = -1;
    if (known < 0)
        known = dnnrun("plan quickstart.cfg device=cpu") != 6;
    if (!known)
        print_message("skipped: no CPU back end in this build\n");
    return known;
}

json_t *parse(const char *text)
{
    json_error_t e;
    json_t *j = json_loads(text, 0, &e);
    if (!j)
        fail_msg("not JSON: %s: %s", e.text, text);
    return j;
}

json_t *metrics(const char *run)
{
    char path[1100], *save = NULL;
    snprintf(path, sizeof path, "%s/metrics.jsonl", run);
    char *text = slurp(path);
    assert_non_null(text);
    assert_true(*text && text[strlen(text) - 1] == '\n');
    json_t *list = json_array();
    for (char *line = strtok_r(text, "\n", &save); line; line = strtok_r(NULL, "\n", &save))
        json_array_append_new(list, parse(line));
    free(text);
    return list;
}

const char *text_of(const json_t *j, const char *key)
{
    const char *s = json_string_value(json_object_get(j, key));
    assert_non_null(s);
    return s;
}

double number_of(const json_t *j, const char *key)
{
    const json_t *v = json_object_get(j, key);
    if (!json_is_number(v))
        fail_msg("\"%s\" is no number", key);
    return json_number_value(v);
}

int cli_set_up(void **state)
{
    static char folder[] = "/tmp/dnnrun-cli-XXXXXX";
    ssize_t n = readlink("/proc/self/exe", tool, sizeof tool - 16);
    if (n <= 0 || !mkdtemp(folder) || chdir(folder) != 0)
        return -1;
    tool[n] = 0;
    *strrchr(tool, '/') = 0; /* BUILD/tests */
    strcpy(strrchr(tool, '/'), "/dnnrun");
    *state = folder;
    return access(tool, X_OK);
}

int cli_tear_down(void **state)
{
    sh("rm -rf '%s'", (char *)*state);
    free(out_text);
    free(err_text);
    return 0;
}
