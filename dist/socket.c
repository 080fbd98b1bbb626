/* socket.c: see socket.h. */
#include "socket.h"

#include <arpa/inet.h>
#include <errno.h>
#include <ifaddrs.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

enum { SLICE_MS = 100, BACKLOG = 1024 };

double dnri_clock(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Milliseconds to wait for an event now: at most a slice, 0 at the deadline. */
static int slice(double deadline)
{
    double left = (deadline - dnri_clock()) * 1e3;
    return left <= 0 ? 0 : left < SLICE_MS ? (int)left + 1 : SLICE_MS;
}

/* ---- addresses */

typedef struct place {
    int family;
    struct sockaddr_storage at;
    socklen_t size;
} place;

static dnr_status local_place(const char *name, place *out)
{
    struct sockaddr_un un = {.sun_family = AF_UNIX};
    size_t n = strlen(name);
    if (n + 1 > sizeof un.sun_path)
        return DNR_FAIL(DNR_EUSAGE, "set DNR_JOB to a short name", "the job's name is too long: %s",
                        name);
    memcpy(un.sun_path + 1, name, n); /* the 0 before it makes the name abstract */
    *out = (place){.family = AF_UNIX,
                   .size = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + n)};
    memcpy(&out->at, &un, sizeof un);
    return DNR_OK;
}

/* `host` has room for 256 bytes. */
static dnr_status split(const char *address, char *host, const char **port)
{
    const char *colon = strrchr(address, ':');
    const size_t digits = colon ? strspn(colon + 1, "0123456789") : 0;
    const long number = digits > 0 && digits <= 5 && !colon[1 + digits] ? atol(colon + 1) : 0;
    if (number < 1 || number > 65535 || colon == address || colon - address >= 256)
        return DNR_FAIL(DNR_EUSAGE, "set DNR_MASTER=HOST:PORT, rank 0's host and a free port there",
                        "\"%s\" is no HOST:PORT", address);
    bool bracketed = address[0] == '[' && colon[-1] == ']';
    snprintf(host, 256, "%.*s", (int)(colon - address) - 2 * bracketed, address + bracketed);
    *port = colon + 1;
    return DNR_OK;
}

/* The nth of the host's addresses: there may be several, of which one can be reached. `host` NULL: all of this host's. */
static dnr_status look_up(const char *address, const char *host, const char *port, int nth,
                          place *out)
{
    struct addrinfo hint = {.ai_socktype = SOCK_STREAM,
                            .ai_flags = AI_NUMERICSERV | (host ? 0 : AI_PASSIVE)};
    struct addrinfo *found = NULL;
    int error = getaddrinfo(host, port, &hint, &found), n = 0;
    if (error)
        return DNR_FAIL(DNR_EUSAGE, "set DNR_MASTER=HOST:PORT, rank 0's host and a free port there",
                        "%s: %s", address, gai_strerror(error));
    for (const struct addrinfo *i = found; i; i = i->ai_next)
        n++;
    const struct addrinfo *i = found;
    for (nth %= n; nth > 0; nth--)
        i = i->ai_next;
    *out = (place){.family = i->ai_family, .size = i->ai_addrlen};
    memcpy(&out->at, i->ai_addr, i->ai_addrlen);
    freeaddrinfo(found);
    return DNR_OK;
}

static bool is_loopback(const char *host)
{
    return !strcmp(host, "localhost") || !strncmp(host, "127.0.0.", 8) || !strcmp(host, "::1");
}

/* Small messages leave at once; a host that vanished is noticed by the heartbeats. */
static void tune(int fd)
{
    int on = 1;
    (void)setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
}

/* Of those that connect and say nothing, and would be waited for one by one, nothing is heard for half a minute. */
static int listen_at(const place *p)
{
    int on = 1, defer_s = 30, fd = socket(p->family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return -1;
    (void)setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (p->family != AF_UNIX)
        (void)setsockopt(fd, IPPROTO_TCP, TCP_DEFER_ACCEPT, &defer_s, sizeof defer_s);
    if (bind(fd, (const struct sockaddr *)&p->at, p->size) == 0 && listen(fd, BACKLOG) == 0)
        return fd;
    int e = errno;
    close(fd);
    errno = e;
    return -1;
}

/* At that very address if it is the loopback's, else at all of the host's: a host name may stand for one that others
 * cannot reach (Debian's 127.0.1.1). */
dnr_status dnri_listen(const char *address, int *fd)
{
    place p;
    char host[256];
    const char *port;
    if (address[0] == '@') {
        DNR_TRY(local_place(address + 1, &p));
        *fd = listen_at(&p);
    } else {
        DNR_TRY(split(address, host, &port));
        *fd = -1;
        for (int i = 1; i >= 0 && *fd < 0;
             i--) { /* the second of all is IPv6's, which takes IPv4 in too */
            DNR_TRY(look_up(address, is_loopback(host) ? host : NULL, port, i, &p));
            *fd = listen_at(&p);
        }
    }
    if (*fd >= 0)
        return DNR_OK;
    return DNR_FAIL(DNR_EPEER,
                    "rank 0 must run on that host, and the port be free; two runs need two ports",
                    "rank 0 cannot listen at %s: %s", address, strerror(errno));
}

dnr_status dnri_connect(const char *address, int nth, double deadline, int *fd)
{
    place p;
    char host[256];
    const char *port;
    if (address[0] == '@') {
        DNR_TRY(local_place(address + 1, &p));
    } else {
        DNR_TRY(split(address, host, &port));
        DNR_TRY(look_up(address, host, port, nth, &p));
    }
    *fd = socket(p.family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    int e = *fd < 0 ? errno : 0;
    if (!e && connect(*fd, (struct sockaddr *)&p.at, p.size) != 0)
        e = errno;
    while (e == EINPROGRESS) {
        struct pollfd w = {.fd = *fd, .events = POLLOUT};
        socklen_t size = sizeof e;
        int n = poll(&w, 1, slice(deadline));
        if (n > 0)
            (void)getsockopt(*fd, SOL_SOCKET, SO_ERROR, &e, &size);
        else if (dnri_clock() >= deadline)
            e = ETIMEDOUT;
    }
    if (!e) {
        tune(*fd);
        return DNR_OK;
    }
    if (*fd >= 0)
        close(*fd);
    *fd = -1;
    return DNR_FAIL(DNR_EPEER, "see that rank 0 runs and that its host and port can be reached",
                    "%s: %s", address, strerror(e));
}

int dnri_accept(int fd, double deadline)
{
    for (;;) {
        int got = accept4(fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
        if (got >= 0) {
            tune(got);
            return got;
        }
        if (dnri_clock() >= deadline)
            return -1;
        struct pollfd w = {.fd = fd, .events = POLLIN};
        (void)poll(&w, 1, slice(deadline));
    }
}

/* ---- transfers */

static dnr_status ended(const char *why)
{
    return DNR_FAIL(DNR_EPEER, "look at the output of the other ranks",
                    "a connection between ranks failed: %s", why);
}

typedef struct transfer {
    const char *out;
    char *in;
    size_t to_send, to_take; /* bytes left */
} transfer;

/* What can be moved now; -1 where the connection failed (errno; 0: it was closed). */
static int move_some(int fd, transfer *t)
{
    ssize_t n = t->to_send ? send(fd, t->out, t->to_send, MSG_NOSIGNAL) : 0;
    if (n < 0 && errno != EAGAIN && errno != EINTR)
        return -1;
    size_t sent = n > 0 ? (size_t)n : 0;
    t->out += sent;
    t->to_send -= sent;
    n = t->to_take ? recv(fd, t->in, t->to_take, 0) : 0;
    if (n < 0 && errno != EAGAIN && errno != EINTR)
        return -1;
    if (n == 0 && t->to_take) {
        errno = 0;
        return -1;
    }
    size_t taken = n > 0 ? (size_t)n : 0;
    t->in += taken;
    t->to_take -= taken;
    return sent || taken;
}

/* Until a `deadline`; or, where there is a `go_on`, as long as that says. */
static dnr_status run(int fd, transfer t, double deadline, dnri_go_on go_on, void *user)
{
    double idle_since = dnri_clock();
    bool busy = false;
    while (t.to_send || t.to_take) {
        int moved = move_some(fd, &t);
        if (moved < 0)
            return ended(errno ? strerror(errno) : "the other side closed it");
        if (moved) {
            busy = true;
            continue;
        }
        if (busy)
            idle_since = dnri_clock();
        busy = false;
        short events = (short)((t.to_send ? POLLOUT : 0) | (t.to_take ? POLLIN : 0));
        struct pollfd w = {.fd = fd, .events = events};
        int n = poll(&w, 1, go_on ? SLICE_MS : slice(deadline));
        if (n < 0 && errno != EINTR)
            return ended(strerror(errno));
        if (n > 0)
            continue;
        if (go_on)
            DNR_TRY(go_on(user, dnri_clock() - idle_since));
        else if (dnri_clock() >= deadline)
            return ended("nothing came in time");
    }
    return DNR_OK;
}

dnr_status dnri_send(int fd, const void *data, size_t bytes, double deadline)
{
    return run(fd, (transfer){.out = data, .to_send = bytes}, deadline, NULL, NULL);
}

dnr_status dnri_recv(int fd, void *data, size_t bytes, double deadline)
{
    return run(fd, (transfer){.in = data, .to_take = bytes}, deadline, NULL, NULL);
}

dnr_status dnri_transfer(int fd, const void *out, void *in, size_t bytes, dnri_go_on go_on,
                         void *user)
{
    transfer t = {.out = out, .in = in, .to_send = out ? bytes : 0, .to_take = in ? bytes : 0};
    return run(fd, t, 0, go_on, user);
}

const char *dnri_socket_name(int fd, char *buf, size_t size)
{
    struct sockaddr_storage at = {0};
    socklen_t n = sizeof at;
    char number[INET6_ADDRSTRLEN] = "?";
    const char *interface = "";
    snprintf(buf, size, "local");
    if (getsockname(fd, (struct sockaddr *)&at, &n) != 0 || at.ss_family == AF_UNIX)
        return buf;
    struct sockaddr_in6 *six = (struct sockaddr_in6 *)&at;
    if (at.ss_family == AF_INET6 &&
        IN6_IS_ADDR_V4MAPPED(&six->sin6_addr)) { /* IPv4 on a socket for both */
        struct sockaddr_in four = {.sin_family = AF_INET};
        memcpy(&four.sin_addr, &six->sin6_addr.s6_addr[12], 4);
        memcpy(&at, &four, sizeof four);
    }
    bool v6 = at.ss_family == AF_INET6;
    const void *mine = v6 ? (const void *)&((struct sockaddr_in6 *)&at)->sin6_addr
                          : (const void *)&((struct sockaddr_in *)&at)->sin_addr;
    (void)inet_ntop(at.ss_family, mine, number, sizeof number);
    struct ifaddrs *list = NULL;
    if (getifaddrs(&list) == 0)
        for (struct ifaddrs *i = list; i; i = i->ifa_next) {
            if (!i->ifa_addr || i->ifa_addr->sa_family != at.ss_family)
                continue;
            const void *its = v6 ? (const void *)&((struct sockaddr_in6 *)i->ifa_addr)->sin6_addr
                                 : (const void *)&((struct sockaddr_in *)i->ifa_addr)->sin_addr;
            if (memcmp(its, mine, v6 ? 16 : 4) == 0)
                interface = i->ifa_name;
        }
    snprintf(buf, size, "%s%s%s", interface, *interface ? " " : "", number);
    if (list)
        freeifaddrs(list);
    return buf;
}
