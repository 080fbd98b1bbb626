/* star_internal.h: what the files of the star share. */
#ifndef DNR_STAR_INTERNAL_H
#define DNR_STAR_INTERNAL_H

#include "star.h"

#include <pthread.h>
#include <stdatomic.h>

#define MAGIC 0x646e7231u /* "dnr1" */
enum { HOST = 64 };       /* bytes of a host's name */
enum { HELLO_CONTROL = 1, HELLO_DATA, WELCOME, REFUSED, BEAT, BYE, LOST };

/* All messages, on both connections of the bootstrap; machines of one kind, so as it lies in memory. */
typedef struct frame {
    uint32_t magic;
    int32_t kind, rank, world, status, pid;
    int32_t local_rank, local_world;
    int64_t point; /* common points reached */
    double allow;
    char host[HOST], job[128], build[64];
    char text[640], remedy[320];
} frame;

typedef struct peer {
    int control, data;   /* -1: none */
    frame in;            /* the message that is coming */
    size_t have;         /* bytes of it */
    frame is;            /* the last heartbeat, or the hello */
    char host[HOST];     /* of the hello: read without the lock */
    double heard, moved; /* when; when it last came to a new common point */
    bool gone;           /* it said farewell */
} peer;

struct dnri_star {
    dnri_launch l;
    dnri_star_opts o;
    char build[64];
    peer *peer; /* [world]: in rank 0 all others are connected, elsewhere rank 0 */
    frame me;
    pthread_t thread;
    bool started;
    int wake; /* eventfd: the thread is to leave, or to look */
    _Atomic bool stop;
    _Atomic(const char *) doing;
    _Atomic int64_t point;
    pthread_mutex_t lock; /* of all below, and of me's text and allow */
    bool is_lost, told;
    double tell_at; /* when on_loss is due */
    dnr_error lost;
    double limit_at; /* when this rank counts as lost; 0: never */
    const char *limit_what;
    double allowed; /* the most that any rank is allowed now */
    int64_t furthest;
    double furthest_at;
};

static inline bool dnri_star_is_hub(const dnri_star *s)
{
    return s->l.rank == 0;
}

/* ---- star_meet.c */

/* A message of this kind that says who this rank is. */
frame dnri_star_hello(const dnri_star *s, int kind);
/* Ends the texts of a message that came from outside. */
void dnri_star_terminate(frame *f);
/* Connects all ranks; s->peer and s->l then say where they are. */
dnr_status dnri_star_meet(dnri_star *s);

/* ---- star_watch.c */

/* Starts the side thread. */
dnr_status dnri_star_watch(dnri_star *s);
/* Tells the others, once the thread has ended, that this rank leaves, and why (NULL: it is done). */
void dnri_star_farewell(dnri_star *s, const dnr_error *why);
void dnri_star_hang_up(peer *p);

#endif
