/* paper.c: the back end without a GPU: lowering is the real one, memory is an address that nobody reads. */
#include "convplan.h"
#include "product.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static dnri_backend backend; /* dnri_backend_cuda's but for what touches a device */

static dnr_status no_device(dnr_device *dev)
{
    return DNR_FAIL(DNR_EDEVICE, "use a device that is there", "%s exists on paper only",
                    dev->name);
}

static void close_paper(dnr_device *dev)
{
    dnri_cuda *d = dnri_cuda_of(dev);
    dnri_cudnn_drop_plans(d);
    dnri_product_drop_all(d);
    (void)cudnnBackendDestroyDescriptor(d->paper);
    free(d);
}

static dnr_status memory(dnr_device *dev, size_t *free_bytes, size_t *total)
{
    *free_bytes = *total = dnri_cuda_of(dev)->paper_memory;
    return DNR_OK;
}

static dnr_status alloc(dnr_device *dev, size_t bytes, void **out)
{
    *out = (void *)(uintptr_t)4096;
    return DNR_OK;
}

static void release(dnr_device *dev, void *p)
{
}

static dnr_status alloc_host(dnr_device *dev, size_t bytes, void **out)
{
    *out = calloc(1, bytes ? bytes : 1);
    return *out ? DNR_OK : DNR_FAIL_NOMEM();
}

static void free_host(dnr_device *dev, void *p)
{
    free(p);
}

static dnr_status copy(dnr_device *dev, dnr_lane lane, void *dst, const void *src, size_t bytes)
{
    return DNR_OK;
}

static dnr_status sync_lane(dnr_device *dev, dnr_lane lane)
{
    return DNR_OK;
}

static dnr_status fence(dnr_device *dev, dnr_lane from, dnr_lane to)
{
    return no_device(dev);
}

static dnr_status mark(dnr_device *dev, dnr_lane lane, int id)
{
    return no_device(dev);
}

static dnr_status describe(dnri_cuda *d, const char *properties)
{
    DNRI_CUDNN(cudnnBackendCreateDescriptor(CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR, &d->paper),
               "describing a device");
    DNRI_CUDNN(cudnnBackendSetAttribute(d->paper, CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION,
                                        CUDNN_TYPE_CHAR, (int64_t)strlen(properties), properties),
               "describing a device");
    DNRI_CUDNN(cudnnBackendFinalize(d->paper), "describing a device");
    return DNR_OK;
}

dnr_status dnri_cuda_paper(const char *properties, int sms, int cc, size_t bytes, dnr_device **out)
{
    *out = NULL;
    dnri_cuda *d = calloc(1, sizeof *d);
    if (!d)
        return DNR_FAIL_NOMEM();
    backend = dnri_backend_cuda;
    backend.close = close_paper;
    backend.memory = memory;
    backend.alloc = alloc;
    backend.free = release;
    backend.alloc_host = alloc_host;
    backend.free_host = free_host;
    backend.copy = copy;
    backend.fence = fence;
    backend.mark = mark;
    backend.sync = sync_lane;
    backend.capture_begin = NULL;
    d->base.be = &backend;
    d->sms = sms;
    d->cc = cc;
    d->k = (k_device){.sms = sms, .shared = (size_t)(cc >= 90 ? 227 : cc == 80 ? 163 : 99) << 10};
    d->paper_memory = bytes;
    snprintf(d->base.name, sizeof d->base.name, "cuda on paper");
    snprintf(d->base.description, sizeof d->base.description, "a GPU that is not there");
    dnr_status st = describe(d, properties);
    if (st != DNR_OK) {
        dnr_error why = *dnr_last_error();
        close_paper(&d->base);
        return dnri_fail_as(&why);
    }
    *out = &d->base;
    return DNR_OK;
}
