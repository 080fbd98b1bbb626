/* screen.c: the terminal. The library may log from its threads, hence the lock. */
#include "screen.h"

#include <pthread.h>
#include <stdarg.h>
#include <sys/ioctl.h>
#include <unistd.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static bool live;           /* a live line stands without a newline */
static double shown = -1e9; /* when */

static void clear(void)
{
    if (live)
        fputs("\r\033[K", stdout);
    live = false;
}

void screen_print(const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    pthread_mutex_lock(&lock);
    clear();
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
    pthread_mutex_lock(&lock);
    clear();
    fflush(stdout);
    fprintf(stderr, "%s: %s\n", level == DNR_LOG_WARN ? "warning" : "note", line);
    pthread_mutex_unlock(&lock);
}
