/* screen.h: one live line on a terminal, plain lines elsewhere, and the library's remarks between them. */
#ifndef SCREEN_H
#define SCREEN_H

#include "dnnrun.h"

/* A line to stdout; a live line makes room for it. */
void screen_print(const char *fmt, ...) __attribute__((format(printf, 1, 2)));
/* Where a terminal is: replaces the live line, ten times a second at most. Elsewhere: prints a line, each 5 s at
 * most. `now` in seconds. */
void screen_live(double now, const char *line);
/* Is it time for another? Lets the caller save the work of making the line. */
bool screen_due(double now);
/* Leaves the live line behind, before something else writes to stderr. */
void screen_end(void);
/* Of several ranks, rank 0 speaks. The others only warn, behind "[rank K]"; with `all` they say everything so. */
void screen_rank(int rank, int world, bool all);
/* The message that ends the process, to stderr. Another thread may be about to say one, too: only the first is said, and
 * the other thread waits here for the end, or after some seconds brings it about. */
void screen_last_words(const dnr_error *e);
/* For dnr_set_log: to stderr. */
void screen_log(void *user, dnr_log_level level, const char *line);

#endif
