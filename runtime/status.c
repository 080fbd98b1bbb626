#include "status.h"

#include <pthread.h>
#include <stdarg.h>
#include <string.h>

static _Thread_local dnr_error last;

const dnr_error *dnr_last_error(void)
{
    return &last;
}

const char *dnr_version(void)
{
    return DNR_VERSION;
}

dnr_status dnri_fail(dnr_status status, const char *where, const char *remedy, const char *fmt, ...)
{
    dnr_error e = {.status = status}; /* built aside: arguments may point into `last` */
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(e.what, sizeof e.what, fmt, ap);
    va_end(ap);
    snprintf(e.where, sizeof e.where, "%s", where);
    snprintf(e.remedy, sizeof e.remedy, "%s", remedy);
    last = e;
    return status;
}

dnr_status dnri_fail_context(const char *fmt, ...)
{
    char text[2 * sizeof last.what]; /* the message may be cut at its end, never the context */
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof last.what, fmt, ap);
    va_end(ap);
    size_t n = strlen(text);
    snprintf(text + n, sizeof text - n, ": %s", last.what);
    snprintf(last.what, sizeof last.what, "%.*s", (int)sizeof last.what - 1, text);
    return last.status;
}

dnr_status dnri_fail_as(const dnr_error *e)
{
    last = *e;
    return e->status;
}

/* The callback is called by one thread at a time. */
static pthread_mutex_t log_lock = PTHREAD_MUTEX_INITIALIZER;
static dnr_log_fn log_fn;
static void *log_user;

void dnr_set_log(dnr_log_fn fn, void *user)
{
    pthread_mutex_lock(&log_lock);
    log_fn = fn;
    log_user = user;
    pthread_mutex_unlock(&log_lock);
}

void dnri_log(dnr_log_level level, const char *fmt, ...)
{
    char line[1024];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(line, sizeof line, fmt, ap);
    va_end(ap);
    pthread_mutex_lock(&log_lock);
    if (log_fn)
        log_fn(log_user, level, line);
    pthread_mutex_unlock(&log_lock);
}
