/* screen.c: the terminal. The library may log from its threads, hence the lock. */
#include "screen.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <sys/ioctl.h>
#include <unistd.h>

enum { TEAR_DOWN_S = 5 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static bool live;           /* a live line stands without a newline */
static double shown = -1e9; /* when */
static char prefix[24];     /* "[rank 3] " */
static bool quiet;          /* another rank speaks */

void screen_rank(int rank, int world, bool all)
{
    if (world > 1 && (rank > 0 || all))
        snprintf(prefix, sizeof prefix, "[rank %d] ", rank);
    quiet = rank > 0 && !all;
}

static void clear(void)
{
    if (live)
        fputs("\r\033[K", stdout);
    live = false;
}

void screen_print(const char *fmt, ...)
{
    va_list ap;
    if (quiet)
        return;
    va_start(ap, fmt);
    pthread_mutex_lock(&lock);
    clear();
    fputs(prefix, stdout);
    vfprintf(stdout, fmt, ap);
    fputc('\n', stdout);
    fflush(stdout);
    pthread_mutex_unlock(&lock);
    va_end(ap);
}

bool screen_due(double now)
{
    return now - shown >= (isatty(STDOUT_FILENO) ? 0.1 : 5);
}

void screen_live(double now, const char *line)
{
    struct winsize w = {0};
    bool terminal = isatty(STDOUT_FILENO);
    if (*prefix) /* other ranks' lines lie between */
        return;
    pthread_mutex_lock(&lock);
    if (terminal) {
        int width = ioctl(STDOUT_FILENO, TIOCGWINSZ, &w) == 0 && w.ws_col > 1 ? w.ws_col - 1 : 79;
        printf("\r%.*s\033[K", width,
               line); /* a line that wraps could not be replaced; it is ASCII */
        live = true;
    } else {
        puts(line);
    }
    fflush(stdout);
    shown = now;
    pthread_mutex_unlock(&lock);
}

void screen_end(void)
{
    pthread_mutex_lock(&lock);
    if (live)
        fputc('\n', stdout);
    live = false;
    fflush(stdout);
    pthread_mutex_unlock(&lock);
}

void screen_log(void *user, dnr_log_level level, const char *line)
{
    (void)user;
    if (quiet && level != DNR_LOG_WARN)
        return;
    pthread_mutex_lock(&lock);
    clear();
    fflush(stdout);
    fprintf(stderr, "%s%s: %s\n", prefix, level == DNR_LOG_WARN ? "warning" : "note", line);
    pthread_mutex_unlock(&lock);
}

void screen_last_words(const dnr_error *e)
{
    static atomic_flag said = ATOMIC_FLAG_INIT;
    static _Atomic int status;
    static _Thread_local bool mine;
    char text[sizeof *e + 64];
    if (mine)
        return;
    if (atomic_flag_test_and_set(&said)) {
        sleep(TEAR_DOWN_S);
        _exit(status ? status : (int)e->status);
    }
    mine = true;
    status = (int)e->status;
    /* at once, and without the lock: another thread may hold it for ever */
    int n = snprintf(text, sizeof text, "%s%sdnnrun: %s (%s)\n  remedy: %s\n", live ? "\n" : "",
                     prefix, e->what, e->where, e->remedy);
    live = false;
    if (write(STDERR_FILENO, text, (size_t)n) != n)
        return; /* there is nobody to tell */
}
