/* host.c: what the machine is and has. */
#include "cpu.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/utsname.h>
#include <unistd.h>

void dnri_host_cpu_name(char *buf, size_t size)
{
    struct utsname u;
    snprintf(buf, size, "%s CPU", uname(&u) == 0 ? u.machine : "unknown");
    FILE *f = fopen("/proc/cpuinfo", "re");
    char line[256];
    while (f && fgets(line, sizeof line, f))
        if (strncmp(line, "model name", 10) == 0 && strchr(line, ':')) {
            char *name = strchr(line, ':') + 1;
            name += strspn(name, " ");
            name[strcspn(name, "\n")] = 0;
            snprintf(buf, size, "%s", name);
            break;
        }
    if (f)
        fclose(f);
}

/* The number after `key` in a file of lines "KEY NUMBER"; with key "", the file's first number. */
static bool read_number(const char *path, const char *key, unsigned long long *out)
{
    FILE *f = fopen(path, "re");
    char line[256];
    bool found = false;
    while (f && !found && fgets(line, sizeof line, f))
        if (strncmp(line, key, strlen(key)) == 0)
            found = sscanf(line + strlen(key), "%llu", out) == 1;
    if (f)
        fclose(f);
    return found;
}

/* ulimit -v, as batch systems set it, counts addresses. What oneDNN writes as code and what threads have for stacks needs
 * some too, and oneDNN 2.6 crashes where it gets none. */
static void heed_address_limit(size_t *free, size_t *total)
{
    const unsigned long long reserve = 64u << 20;
    struct rlimit limit;
    unsigned long long pages;
    if (getrlimit(RLIMIT_AS, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY ||
        !read_number("/proc/self/statm", "", &pages))
        return;
    unsigned long long used = pages * (unsigned long long)sysconf(_SC_PAGESIZE) + reserve;
    unsigned long long left = limit.rlim_cur > used ? limit.rlim_cur - used : 0;
    if (limit.rlim_cur < *total)
        *total = (size_t)limit.rlim_cur;
    if (left < *free)
        *free = (size_t)left;
}

dnr_status dnri_host_memory(size_t *free, size_t *total)
{
    unsigned long long avail, all, limit, used, cache = 0;
    if (!read_number("/proc/meminfo", "MemAvailable:", &avail) ||
        !read_number("/proc/meminfo", "MemTotal:", &all))
        return errno == ENOMEM
                   ? DNR_FAIL_NOMEM()
                   : DNR_FAIL(DNR_EDEVICE, "mount /proc", "/proc/meminfo cannot be read");
    *free = (size_t)avail << 10;
    *total = (size_t)all << 10;
    /* a container's or a job's limit (cgroup v2) is less than the machine has; its page cache can go */
    if (read_number("/sys/fs/cgroup/memory.max", "", &limit) &&
        read_number("/sys/fs/cgroup/memory.current", "", &used)) {
        read_number("/sys/fs/cgroup/memory.stat", "inactive_file ", &cache);
        used -= cache < used ? cache : used;
        unsigned long long left = limit > used ? limit - used : 0;
        if (limit < *total)
            *total = (size_t)limit;
        if (left < *free)
            *free = (size_t)left;
    }
    heed_address_limit(free, total);
    return DNR_OK;
}

int dnri_host_cpu_quota(void)
{
    unsigned long long quota, period;
    FILE *f = fopen("/sys/fs/cgroup/cpu.max", "re"); /* "max 100000", or "200000 100000" */
    int n = f ? fscanf(f, "%llu %llu", &quota, &period) : 0;
    if (f)
        fclose(f);
    return n == 2 && period ? (int)((quota + period - 1) / period) : 0;
}
