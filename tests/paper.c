/* paper.c: see paper.h. */
#include "paper.h"

#include <dlfcn.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const char *paper_properties(void)
{
    static char text[2048];
    if (text[0])
        return text;
    FILE *f = fopen(DNRI_SOURCE_DIR "/tests/golden/cudnn_h200.json", "r");
    if (!f) {
        print_error("golden/cudnn_h200.json is missing\n");
        exit(1);
    }
    text[fread(text, 1, sizeof text - 1, f)] = 0;
    fclose(f);
    return text;
}

/* The module beside libdnnrun, and a driver or its stand-in. */
static void *open_module(void)
{
    static void *module;
    char path[1200];
    Dl_info info;
    if (module || !dladdr((void *)(uintptr_t)dnr_version, &info) || !strrchr(info.dli_fname, '/'))
        return module;
    snprintf(path, sizeof path, "%.*s/dnnrun-cuda.so",
             (int)(strrchr(info.dli_fname, '/') - info.dli_fname), info.dli_fname);
    if (!dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL) &&
        !dlopen(DNRI_CUDA_STUB, RTLD_NOW | RTLD_GLOBAL)) {
        print_message("no driver, nor its stand-in: %s\n", dlerror());
        return NULL;
    }
    module = dlopen(path, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
    if (!module)
        print_message("no CUDA back end: %s\n", dlerror());
    return module;
}

void *paper_symbol(const char *name)
{
    void *module = open_module();
    return module ? dlsym(module, name) : NULL;
}

static int property(const char *name)
{
    json_t *all = json_loads(paper_properties(), 0, NULL);
    const json_t *v = json_object_get(all, name);
    if (!json_is_integer(v))
        print_error("golden/cudnn_h200.json lacks %s\n", name);
    const int n = (int)json_integer_value(v);
    json_decref(all);
    return n;
}

bool paper_open(size_t memory, dnr_device **out)
{
    dnr_status (*open)(const char *, int, int, size_t, dnr_device **);
    *(void **)&open = paper_symbol("dnri_cuda_paper");
    if (!open)
        return false;
    OK(open(paper_properties(), property("multiProcessorCount"), property("deviceVer") / 10, memory,
            out));
    return true;
}
