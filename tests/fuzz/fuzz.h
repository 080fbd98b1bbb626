/* fuzz.h: what the fuzz targets share. Each takes any bytes and must neither crash, leak nor misbehave. */
#ifndef DNR_FUZZ_H
#define DNR_FUZZ_H

#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* The bytes as a file of this process, in memory where there is /dev/shm. */
static inline const char *fuzz_file(const uint8_t *data, size_t size, const char *ending)
{
    static char path[64];
    if (!path[0])
        snprintf(path, sizeof path, "%s/dnrfuzz-%d%s", access("/dev/shm", W_OK) ? "." : "/dev/shm",
                 (int)getpid(), ending);
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    if (fd < 0 || write(fd, data, size) != (ssize_t)size)
        abort(); /* no room to fuzz in */
    close(fd);
    return path;
}

#endif
