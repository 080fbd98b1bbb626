/* backend.c: finds, loads and opens back ends. */
#include "backend.h"
#include "choices.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

/* The one table that names the back ends, in the order in which "auto" tries them. `ref` is built
 * with the tests and found only next to them; "auto" never takes it. */
static const struct {
    const char *name;
    bool automatic;
    const char *remedy;
} backends[] = {
    {"cuda", true,
     "build with -DDNR_CUDA=ON (needs the CUDA toolkit and cuDNN), or use device = cpu"},
    {"cpu", true, "build with -DDNR_CPU=ON (needs oneDNN: libdnnl-dev)"},
    {"ref", false, "build with -DDNR_TESTS=ON, or use device = cpu"},
};
#define N_BACKENDS (int)(sizeof backends / sizeof backends[0])

/* The folder of libdnnrun itself, "" where it cannot be told. */
static void own_folder(char *buf, size_t size)
{
    Dl_info info;
    buf[0] = 0;
    if (dladdr(&backends, &info) && info.dli_fname) {
        snprintf(buf, size, "%s", info.dli_fname);
        char *slash = strrchr(buf, '/');
        if (slash)
            slash[0] = 0;
        else
            buf[0] = 0;
    }
}

static cpu_set_t process_cpus;

static void note_process_cpus(void)
{
    if (sched_getaffinity(0, sizeof process_cpus, &process_cpus) != 0)
        CPU_ZERO(&process_cpus);
}

const cpu_set_t *dnri_process_cpus(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, note_process_cpus);
    return &process_cpus;
}

/* Of what dlopen says: it has no codes. */
static bool no_room(const char *why)
{
    return strstr(why, "failed to map") || strstr(why, "annot allocate memory");
}

/* Modules stay loaded: GPU libraries do not survive being unloaded. */
dnr_status dnri_module_symbol(const char *name, const char *symbol, const char *remedy,
                              const void **out)
{
    char folder[1024], path[1200];
    own_folder(folder, sizeof folder);
    const char *forms[] = {"%s/dnnrun-%s.so", "%s/dnnrun/dnnrun-%s.so"};
    for (int f = 0; f < 2; f++) {
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wformat-nonliteral"
        snprintf(path, sizeof path, forms[f], folder, name);
#pragma GCC diagnostic pop
        if (access(path, R_OK) == 0)
            break;
        path[0] = 0;
    }
    if (!path[0])
        return dnri_fail(DNR_EDEVICE, DNRI_HERE, remedy,
                         "this build has no %s module (no dnnrun-%s.so beside the library in %s)",
                         name, name, folder);
    dnri_process_cpus();
    void *so = dlopen(path, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
    if (!so) {
        const char *why = dlerror();
        return no_room(why)
                   ? DNR_FAIL(DNR_EMEM, "free some memory, or raise the limit (ulimit -v)",
                              "the %s module does not load: %s", name, why)
                   : DNR_FAIL(DNR_EDEVICE, "install the library named, or use another device",
                              "the %s module does not load: %s", name, why);
    }
    *out = dlsym(so, symbol);
    if (!*out)
        return DNR_FAIL(DNR_EDEVICE, "install library and modules of one version",
                        "%s is of another version of dnnrun", path);
    return DNR_OK;
}

static dnr_status load(int i, const dnri_backend **out)
{
    char symbol[64];
    const void *found;
    snprintf(symbol, sizeof symbol, "dnri_backend_%s", backends[i].name);
    DNR_TRY(dnri_module_symbol(backends[i].name, symbol, backends[i].remedy, &found));
    *out = found;
    if ((*out)->abi != DNRI_BACKEND_ABI)
        return DNR_FAIL(DNR_EDEVICE, "install library and modules of one version",
                        "dnnrun-%s.so is of another version of dnnrun", backends[i].name);
    return DNR_OK;
}

static dnr_status open_one(int i, const char *arg, dnr_device **out)
{
    const dnri_backend *be = NULL;
    DNR_TRY(load(i, &be));
    DNR_TRY(be->open(arg, out));
    (*out)->be = be;
    return DNR_OK;
}

dnr_status dnr_device_open(const char *spec, dnr_device **out)
{
    *out = NULL;
    if (strcmp(spec, "auto") == 0) {
        for (int i = 0; i < N_BACKENDS; i++) {
            if (!backends[i].automatic)
                continue;
            if (open_one(i, NULL, out) == DNR_OK)
                return DNR_OK;
            dnri_log(DNR_LOG_INFO, "no %s: %s", backends[i].name, dnr_last_error()->what);
        }
        return dnr_last_error()->status;
    }
    size_t len = strcspn(spec, ":");
    const char *arg = spec[len] ? spec + len + 1 : NULL;
    for (int i = 0; i < N_BACKENDS; i++)
        if (strlen(backends[i].name) == len && strncmp(spec, backends[i].name, len) == 0)
            return open_one(i, arg, out);
    return DNR_FAIL(DNR_EUSAGE, "use auto, cpu, cuda or cuda:N", "there is no device \"%s\"", spec);
}

void dnr_device_close(dnr_device *dev)
{
    dnri_choices *choices = dev ? dev->choices : NULL;
    if (dev)
        dev->be->close(dev);
    dnri_choices_free(choices);
}

const char *dnr_device_name(const dnr_device *dev)
{
    return dev->name;
}

const char *dnr_device_description(const dnr_device *dev)
{
    return dev->description;
}

dnr_status dnr_device_memory(dnr_device *dev, size_t *free, size_t *total)
{
    return dev->be->memory(dev, free, total);
}

void dnr_device_list(FILE *out)
{
    for (int i = 0; i < N_BACKENDS; i++) {
        dnr_device *dev;
        if (open_one(i, NULL, &dev) == DNR_OK) {
            fprintf(out, "%-5s %s\n", backends[i].name, dev->description);
            dnr_device_close(dev);
        } else if (backends[i].automatic) {
            fprintf(out, "%-5s not usable: %s\n", backends[i].name, dnr_last_error()->what);
        }
    }
}

const char *dnr_precision_name(dnr_precision p)
{
    static const char *const names[] = {"auto", "fp64", "fp32", "tf32", "fp16", "bf16"};
    return names[p];
}

const dnri_lowering *dnri_lower_find(const dnri_lowering *const tables[], const dnri_op_def *def)
{
    for (; *tables; tables++)
        for (const dnri_lowering *row = *tables; row->def; row++)
            if (row->def == def)
                return row;
    return NULL;
}

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

dnr_status dnri_wait(dnr_device *dev, int mark, double timeout_s, const char *what)
{
    double start = now();
    for (;;) {
        bool done = false;
        DNR_TRY(dev->be->reached(dev, mark, &done));
        if (done)
            return DNR_OK;
        double waited = now() - start;
        if (waited > timeout_s)
            return DNR_FAIL(DNR_EPEER, "look at the device's state (nvidia-smi), then run again",
                            "%s: %s did not finish within %.0f s", dev->name, what, timeout_s);
        /* none at first: a small step, or the forward pass of a picture, takes no longer than a sleep */
        if (waited > 1e-3)
            nanosleep(&(struct timespec){.tv_nsec = 20000}, NULL);
    }
}

dnr_status dnri_copy_now(dnr_device *dev, void *dst, const void *src, size_t bytes)
{
    if (bytes == 0) /* an empty slab has no address */
        return DNR_OK;
    DNR_TRY(dev->be->copy(dev, DNRI_COMPUTE, dst, src, bytes));
    return dev->be->sync(dev, DNRI_COMPUTE);
}
