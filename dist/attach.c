/* attach.c: a communicator and the device whose memory it shall reduce. */
#include "../runtime/comm.h"
#include "star.h"

#include <stdlib.h>
#include <string.h>

/* What a rank works on; two ranks on one GPU would hang in NCCL. */
typedef struct place {
    char host[64], unit[64], kind[32];
} place;

static dnr_status judge(const dnr_comm *c, const place *all)
{
    for (int r = 0; r < c->world; r++) {
        if (strcmp(all[r].kind, all[0].kind))
            return DNR_FAIL(DNR_EPEER, "set device to the same kind in all ranks",
                            "rank %d on %s computes on %s, rank 0 on %s on %s", r, all[r].host,
                            all[r].kind, all[0].host, all[0].kind);
        for (int k = 0; k < r && *all[r].unit; k++)
            if (!strcmp(all[k].unit, all[r].unit) && !strcmp(all[k].host, all[r].host))
                return DNR_FAIL(DNR_EPEER,
                                "start as many ranks on a host as it has GPUs, and let device be "
                                "auto or cuda",
                                "ranks %d and %d both use the GPU at %s of %s", k, r, all[r].unit,
                                all[r].host);
    }
    return DNR_OK;
}

static dnr_status compare_places(dnr_comm *c, const dnr_device *dev)
{
    place mine = {{0}, {0}, {0}}, *all = calloc((size_t)c->world, sizeof *all);
    if (!all)
        return DNR_FAIL_NOMEM();
    snprintf(mine.host, sizeof mine.host, "%s", dnri_star_host(c->star, c->rank));
    snprintf(mine.unit, sizeof mine.unit, "%s", dev->unit);
    snprintf(mine.kind, sizeof mine.kind, "%s", dev->be->name);
    dnr_status st = dnri_comm_allgather(c, "comparing devices", &mine, sizeof mine, all);
    if (st == DNR_OK)
        st = judge(c, all);
    free(all);
    return st;
}

/* A trainer made anew on the same device finds it attached. */
dnr_status dnri_comm_attach(dnr_comm *c, dnr_device *dev)
{
    const void *found;
    if (c->on)
        return DNR_OK;
    dnri_comm_stage(c, 0, "opening %s", dev->name);
    DNR_TRY(compare_places(c, dev));
    if (!dev->be->queue)
        return DNR_OK;
    bool stands_in = strcmp(c->ops->name, "standin") == 0;
    DNR_TRY(dnri_module_symbol("nccl", stands_in ? "dnri_comm_standin" : "dnri_comm_nccl",
                               "install NCCL and build with -DDNR_NCCL=ON, or use device = cpu",
                               &found));
    const dnri_comm_device *on = found;
    if (on->abi != DNRI_BACKEND_ABI)
        return DNR_FAIL(DNR_EDEVICE, "install library and modules of one version",
                        "dnnrun-nccl.so is of another version of dnnrun");
    dnri_comm_stage(c, 0, "starting %s on %s", on->name, dev->name);
    DNR_TRY(on->open(c, dev, &c->on_state));
    c->on = on;
    return DNR_OK;
}
