/* status.h: errors with a place and a remedy.
 *
 * Every fallible function returns a dnr_status. The details of a thread's last failure (what,
 * where, remedy) are kept per thread and read with dnr_last_error(). A remedy is mandatory:
 * DNR_FAIL does not compile without one. The library never prints, exits or aborts. */
#ifndef DNR_STATUS_H
#define DNR_STATUS_H

#include "dnnrun.h"

/* Records the error of this thread and returns `status`. `where` is "file:line". */
dnr_status dnri_fail(dnr_status status, const char *where, const char *remedy, const char *fmt, ...)
    __attribute__((format(printf, 4, 5)));

/* Puts "context: " before the message of this thread's last error; returns its status.
 * Use where the caller knows the file, the layer or the key that the callee could not know. */
dnr_status dnri_fail_context(const char *fmt, ...) __attribute__((format(printf, 1, 2)));

/* Makes `e` (of another thread, say a loader worker) this thread's last error. */
dnr_status dnri_fail_as(const dnr_error *e);

/* Sends one line to the log callback set by dnr_set_log (silent without one). */
void dnri_log(dnr_log_level level, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

#define DNRI_STR2(x) #x
#define DNRI_STR(x)  DNRI_STR2(x)
#define DNRI_HERE    __FILE__ ":" DNRI_STR(__LINE__)

/* return DNR_FAIL(DNR_EUSAGE, "use a positive stride", "stride is %d", s); */
#define DNR_FAIL(status, remedy, ...) dnri_fail((status), DNRI_HERE, "" remedy, __VA_ARGS__)

/* Fails out of memory of the host. */
#define DNR_FAIL_NOMEM()                                                                           \
    DNR_FAIL(DNR_EMEM, "free some host memory, or lower train.batch", "out of host memory")

/* Forwards a failure to the caller. */
#define DNR_TRY(expr)                                                                              \
    do {                                                                                           \
        dnr_status dnri_s_ = (expr);                                                               \
        if (dnri_s_ != DNR_OK)                                                                     \
            return dnri_s_;                                                                        \
    } while (0)

/* Forwards a failure through the function's `out:` label; `st` is the status that it returns. */
#define DNR_GOTO(st, expr)                                                                         \
    do {                                                                                           \
        if (((st) = (expr)) != DNR_OK)                                                             \
            goto out;                                                                              \
    } while (0)

#endif
