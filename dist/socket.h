/* socket.h: stream sockets with deadlines. All descriptors are non-blocking. Times are of dnri_clock. */
#ifndef DNR_SOCKET_H
#define DNR_SOCKET_H

#include "../runtime/status.h"

double dnri_clock(void); /* seconds, monotonic */

/* `address`: "HOST:PORT" or "[V6]:PORT" for TCP, "@NAME" for a local socket of this host (Linux's abstract names). */
dnr_status dnri_listen(const char *address, int *fd);
/* One attempt, the nth (a host may have several addresses); DNR_EPEER with the reason where nobody answers before
 * `deadline`. */
dnr_status dnri_connect(const char *address, int nth, double deadline, int *fd);
/* -1: nobody came before `deadline`. */
int dnri_accept(int fd, double deadline);

/* All `bytes` or a failure: DNR_EPEER where the connection ends, or `deadline` has passed. */
dnr_status dnri_send(int fd, const void *data, size_t bytes, double deadline);
dnr_status dnri_recv(int fd, void *data, size_t bytes, double deadline);

/* For transfers of any size: asked every tenth of a second while nothing moves, for `idle_s` by now; anything but DNR_OK
 * ends the transfer. */
typedef dnr_status (*dnri_go_on)(void *user, double idle_s);
/* Sends `out` and takes `in` at once, of `bytes` each; either may be NULL. They may be one array, where what comes back
 * has been sent before. */
dnr_status dnri_transfer(int fd, const void *out, void *in, size_t bytes, dnri_go_on go_on,
                         void *user);

/* "eth0 10.0.0.1", or "local" for a local socket: this end of a connection. Returns buf. */
const char *dnri_socket_name(int fd, char *buf, size_t size);

#endif
