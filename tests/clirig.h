/* clirig.h: the tool from outside: runs it in a scratch folder and looks at what it says and leaves. */
#ifndef DNR_CLIRIG_H
#define DNR_CLIRIG_H

#include <jansson.h>
#include <setjmp.h>
#include <stdarg.h>
#include <cmocka.h>

#include "dnnrun.h"

extern char tool[1024];           /* path of the binary */
extern char *out_text, *err_text; /* of the last command */

/* For the group of tests: enters the scratch folder, and removes it. */
int cli_set_up(void **state);
int cli_tear_down(void **state);

char *slurp(const char *path);
void sh(const char *fmt, ...) __attribute__((format(printf, 1, 2)));
/* Runs the tool; returns its exit code. */
int dnnrun(const char *fmt, ...) __attribute__((format(printf, 1, 2)));
void has(const char *text, const char *part);
/* The command fails with `code`, one line of what and where, one of remedy. */
void fails(int code, const char *args, const char *what, const char *remedy);

bool have_cpu(void);
#define NEEDS_CPU()                                                                                \
    if (!have_cpu())                                                                               \
    skip()

json_t *parse(const char *text);
json_t *metrics(const char *run); /* metrics.jsonl as a JSON array */
const char *text_of(const json_t *j, const char *key);
double number_of(const json_t *j, const char *key);

#endif
