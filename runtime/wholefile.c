/* wholefile.c: see wholefile.h. */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "wholefile.h"

const char *dnri_disk_remedy(int err)
{
    switch (err) {
    case ENOSPC:
    case EDQUOT:
        return "free some space on that disk, or write elsewhere";
    case EFBIG:
        return "raise the limit on file sizes (ulimit -f), or write elsewhere";
    case EROFS:
    case EACCES:
    case EPERM:
        return "make the folder writable for this user, or write elsewhere";
    case ENOENT:
    case ENOTDIR:
        return "create the folder first";
    case EMFILE:
    case ENFILE:
        return "raise the limit on open files (ulimit -n)";
    case ENOMEM:
        return "free some host memory";
    default:
        return "check the disk, or write elsewhere";
    }
}

/* Fails for `err` and drops what was written. */
static dnr_status disk_error(dnri_wholefile *f, int err, const char *doing)
{
    dnri_wholefile_abandon(f);
    return dnri_fail(err == ENOMEM ? DNR_EMEM : DNR_EDISK, DNRI_HERE, dnri_disk_remedy(err),
                     "cannot %s '%s': %s", doing, f->path, strerror(err));
}

dnr_status dnri_wholefile_open(dnri_wholefile *f, const char *path)
{
    struct stat st;
    *f = (dnri_wholefile){.path = path, .fd = -1};
    /* rename would replace a device or a folder's name, not write to it */
    if (stat(path, &st) == 0 && !S_ISREG(st.st_mode))
        return DNR_FAIL(DNR_EDISK, "name a new file or an ordinary one",
                        "cannot write '%s': it is not an ordinary file", path);
    size_t room = strlen(path) + 48;
    f->temp = malloc(room);
    if (!f->temp)
        return DNR_FAIL_NOMEM();
    for (int i = 0; i < 1000 && f->fd < 0; i++) {
        snprintf(f->temp, room, "%s.partial-%ld-%d", path, (long)getpid(), i);
        f->fd = open(f->temp, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
        if (f->fd < 0 && errno != EEXIST)
            break;
    }
    if (f->fd >= 0)
        return DNR_OK;
    int err = errno;
    free(f->temp);
    f->temp = NULL;
    return disk_error(f, err, "create");
}

dnr_status dnri_wholefile_write(dnri_wholefile *f, const void *data, size_t bytes)
{
    const char *p = data;
    while (bytes > 0) {
        ssize_t n = write(f->fd, p, bytes < (1u << 30) ? bytes : (1u << 30));
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            return disk_error(f, n < 0 ? errno : ENOSPC, "write");
        p += n;
        bytes -= (size_t)n;
    }
    return DNR_OK;
}

int dnri_sync_folder_of(const char *path)
{
    const char *slash = strrchr(path, '/');
    char *folder = slash ? strndup(path, (size_t)(slash - path) + 1) : strdup(".");
    int fd = folder ? open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC) : -1;
    free(folder);
    if (fd < 0)
        return errno ? errno : ENOMEM;
    /* some file systems cannot sync a folder (EINVAL): the rename itself was done */
    int err = fsync(fd) != 0 && errno != EINVAL ? errno : 0;
    close(fd);
    return err;
}

dnr_status dnri_wholefile_commit(dnri_wholefile *f)
{
    int fd = f->fd;
    if (fsync(fd) != 0)
        return disk_error(f, errno, "write");
    f->fd = -1;
    if (close(fd) != 0)
        return disk_error(f, errno, "write");
    if (rename(f->temp, f->path) != 0)
        return disk_error(f, errno, "replace");
    free(f->temp);
    f->temp = NULL;
    int err = dnri_sync_folder_of(f->path);
    return err ? disk_error(f, err, "sync the folder of") : DNR_OK;
}

void dnri_wholefile_abandon(dnri_wholefile *f)
{
    if (f->fd >= 0)
        close(f->fd);
    if (f->temp)
        unlink(f->temp);
    free(f->temp);
    f->temp = NULL;
    f->fd = -1;
}
