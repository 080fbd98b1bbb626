/* checkpoint_dir.c: folders of checkpoints: how they appear, are listed and disappear. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "checkpoint.h"
#include "wholefile.h"

static dnr_status disk_error(const char *doing, const char *path)
{
    int err = errno;
    return dnri_fail(err == ENOMEM ? DNR_EMEM : DNR_EDISK, DNRI_HERE, dnri_disk_remedy(err),
                     "cannot %s '%s': %s", doing, path, strerror(err));
}

/* "FOLDER/PREFIXnameSUFFIX-pid", from malloc, where `path` is FOLDER/name. */
static char *beside(const char *path, const char *prefix, const char *suffix)
{
    const char *slash = strrchr(path, '/');
    int folder = slash ? (int)(slash - path) + 1 : 0;
    char *name = NULL;
    if (asprintf(&name, "%.*s%s%s%s-%ld", folder, path, prefix, path + folder, suffix,
                 (long)getpid()) < 0)
        return NULL;
    return name;
}

/* Removes a folder of files. 0, or errno. */
static int remove_folder(const char *path)
{
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC), err = 0;
    if (fd < 0)
        return errno;
    DIR *d = fdopendir(fd);
    if (!d) {
        err = errno;
        close(fd);
        return err;
    }
    for (struct dirent *e; (e = readdir(d));)
        if (strcmp(e->d_name, ".") && strcmp(e->d_name, "..") && unlinkat(fd, e->d_name, 0) != 0)
            err = errno;
    closedir(d);
    return rmdir(path) == 0 ? 0 : err ? err : errno;
}

/* ---- appearing */

dnr_status dnri_checkpoint_begin(const char *folder, char **temp)
{
    *temp = beside(folder, ".", ".partial");
    if (!*temp)
        return DNR_FAIL_NOMEM();
    if (mkdir(*temp, 0777) == 0)
        return DNR_OK;
    if (errno == EEXIST && remove_folder(*temp) == 0 && mkdir(*temp, 0777) == 0)
        return DNR_OK; /* it was of a killed process of the same number */
    dnr_status s = disk_error("make", *temp);
    free(*temp);
    *temp = NULL;
    return s;
}

/* Exchanges the two at once where the file system can; elsewhere what is in the way moves aside first, and
 * a crash between the two renames leaves both under dotted names. */
static int exchange(const char *temp, const char *folder)
{
    if (renameat2(AT_FDCWD, temp, AT_FDCWD, folder, RENAME_EXCHANGE) == 0)
        return 0;
    if (errno != EINVAL && errno != ENOSYS)
        return errno;
    char *old = beside(folder, ".", ".old");
    int err = old ? 0 : ENOMEM;
    if (old)
        remove_folder(old);
    if (!err && rename(folder, old) != 0)
        err = errno;
    else if (!err && rename(temp, folder) != 0) {
        err = errno;
        rename(old, folder);
    }
    if (!err)
        rename(old, temp);
    free(old);
    return err;
}

dnr_status dnri_checkpoint_commit(const char *temp, const char *folder)
{
    struct stat st;
    bool replaces = lstat(folder, &st) == 0;
    if (replaces && !S_ISDIR(st.st_mode))
        return DNR_FAIL(DNR_EDISK, "remove it, or write elsewhere",
                        "cannot replace '%s': it is not a folder", folder);
    errno = replaces ? exchange(temp, folder) : rename(temp, folder) == 0 ? 0 : errno;
    if (errno)
        return disk_error("make", folder);
    errno = dnri_sync_folder_of(folder);
    if (errno)
        return disk_error("sync the folder of", folder);
    if (replaces)
        remove_folder(temp);
    return DNR_OK;
}

void dnri_checkpoint_abandon(const char *temp)
{
    remove_folder(temp);
}

/* ---- listing */

static bool is_step(const char *name, int64_t *steps)
{
    char *end;
    if (strncmp(name, "step-", 5) || name[5] < '0' || name[5] > '9' ||
        strlen(name) >= DNRI_CHECKPOINT_NAME)
        return false;
    errno = 0;
    *steps = strtoll(name + 5, &end, 10);
    return *end == 0 && errno == 0;
}

static int most_first(const void *a, const void *b)
{
    const dnri_step_name *x = a, *y = b;
    return (x->steps < y->steps) - (x->steps > y->steps);
}

dnr_status dnri_checkpoint_list(const char *folder, dnri_step_name **out, int *n)
{
    *out = NULL;
    *n = 0;
    DIR *d = opendir(folder);
    if (!d)
        return errno == ENOENT ? DNR_OK : disk_error("read", folder);
    dnr_status s = DNR_OK;
    int room = 0;
    for (struct dirent *e; s == DNR_OK && (e = readdir(d));) {
        dnri_step_name x;
        if (!is_step(e->d_name, &x.steps))
            continue;
        strcpy(x.name, e->d_name);
        if (*n == room) {
            room = room ? 2 * room : 32;
            dnri_step_name *more = realloc(*out, (size_t)room * sizeof *more);
            if (!more) {
                s = DNR_FAIL_NOMEM();
                continue;
            }
            *out = more;
        }
        (*out)[(*n)++] = x;
    }
    closedir(d);
    if (s != DNR_OK) {
        free(*out);
        *out = NULL;
        *n = 0;
    }
    if (*n)
        qsort(*out, (size_t)*n, sizeof **out, most_first);
    return s;
}

/* ---- disappearing */

/* Left by a save, replacement or removal that was interrupted. */
static bool is_rubbish(const char *name)
{
    return !strncmp(name, ".step-", 6) && (strstr(name, ".partial-") || strstr(name, ".old-"));
}

static dnr_status remove_rubbish(const char *folder)
{
    DIR *d = opendir(folder);
    dnr_status s = DNR_OK;
    if (!d)
        return errno == ENOENT ? DNR_OK : disk_error("read", folder);
    for (struct dirent *e; s == DNR_OK && (e = readdir(d));) {
        char *path = NULL;
        if (!is_rubbish(e->d_name))
            continue;
        if (asprintf(&path, "%s/%s", folder, e->d_name) < 0) {
            s = DNR_FAIL_NOMEM();
            continue;
        }
        errno = remove_folder(path);
        if (errno)
            s = disk_error("remove", path);
        free(path);
    }
    closedir(d);
    return s;
}

static dnr_status remove_one(const char *folder, const char *name)
{
    char *path = NULL, *old = NULL;
    dnr_status s = DNR_OK;
    if (asprintf(&path, "%s/%s", folder, name) < 0)
        return DNR_FAIL_NOMEM();
    old = beside(path, ".", ".old"); /* so that no half of it is ever seen under its name */
    if (!old)
        s = DNR_FAIL_NOMEM();
    else if (rename(path, old) != 0 || (errno = remove_folder(old)) != 0)
        s = disk_error("remove", path);
    free(old);
    free(path);
    return s;
}

dnr_status dnr_checkpoint_prune(const char *folder, int keep, const char *best)
{
    dnri_step_name *list;
    int n;
    DNR_TRY(remove_rubbish(folder));
    if (keep <= 0)
        return DNR_OK;
    DNR_TRY(dnri_checkpoint_list(folder, &list, &n));
    dnr_status s = DNR_OK;
    for (int i = keep; i < n && s == DNR_OK; i++)
        if (!best || strcmp(best, list[i].name) != 0)
            s = remove_one(folder, list[i].name);
    free(list);
    return s;
}

static dnr_status set_aside(const char *folder, const char *name)
{
    dnr_status s = DNR_OK;
    char *from = NULL, *to = NULL;
    if (asprintf(&from, "%s/%s", folder, name) < 0)
        return DNR_FAIL_NOMEM();
    for (int i = 1; i < 1000; i++) { /* until a name is free */
        char number[16] = "";
        if (i > 1)
            snprintf(number, sizeof number, "-%d", i);
        free(to);
        if (asprintf(&to, "%s/superseded-%s%s", folder, name, number) < 0) {
            to = NULL;
            s = DNR_FAIL_NOMEM();
            break;
        }
        if (access(to, F_OK) != 0)
            break;
    }
    if (s == DNR_OK && rename(from, to) != 0)
        s = disk_error("rename", from);
    if (s == DNR_OK)
        dnri_log(DNR_LOG_WARN, "%s is set aside as %s", from, to);
    free(from);
    free(to);
    return s;
}

dnr_status dnr_checkpoint_rewind(const char *folder, int64_t steps)
{
    dnri_step_name *list;
    int n;
    DNR_TRY(dnri_checkpoint_list(folder, &list, &n));
    dnr_status s = DNR_OK;
    for (int i = 0; i < n && s == DNR_OK && list[i].steps > steps; i++)
        s = set_aside(folder, list[i].name);
    free(list);
    return s;
}
