/* signals.c: see signals.h. */
#include "signals.h"

#include <signal.h>

static volatile sig_atomic_t seen;
static dnr_trainer *volatile asked;

static void on_signal(int sig)
{
    seen = sig;
    if (asked)
        dnr_trainer_ask_stop(asked);
}

static void on_broken_pipe(int sig)
{
    if (!seen)
        on_signal(sig);
}

/* The second signal kills: a run that does not come to its next step must not be immortal. But SIGPIPE comes with each
 * line once the reader is gone, as where Ctrl-C has ended the `tee` behind a run: what is printed then is lost, no more. */
static void catch_all(void)
{
    struct sigaction sa = {.sa_handler = on_signal, .sa_flags = SA_RESTART | (int)SA_RESETHAND},
                     old;
    sigaction(SIGINT, &sa, NULL);
    sigaction(SIGTERM, &sa, NULL);
    sigaction(SIGUSR1, &sa, NULL);
    if (sigaction(SIGHUP, NULL, &old) == 0 && old.sa_handler != SIG_IGN) /* nohup */
        sigaction(SIGHUP, &sa, NULL);
    sa.sa_handler = on_broken_pipe;
    sa.sa_flags = SA_RESTART;
    sigaction(SIGPIPE, &sa, NULL);
}

void signals_ask(dnr_trainer *t)
{
    asked = t;
    if (t)
        catch_all();
}

int signals_seen(void)
{
    return seen;
}
