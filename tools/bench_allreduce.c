/* bench_allreduce.c: dnnrun bench allreduce: sums over ranks of 4 B to 1 GB. */
#include "bench.h"
#include "ranks.h"

#include <jansson.h>

/* Some 0.2 s a size, and at least 3 times. */
static int times_for(double seconds)
{
    double n = 0.2 / (seconds > 1e-7 ? seconds : 1e-7);
    return n < 3 ? 3 : n > 1000 ? 1000 : (int)n;
}

/* As nccl-tests defines them: algorithm bandwidth is bytes over time; bus bandwidth, which compares with what a link can
 * do whatever the number of ranks, is that times 2 (n − 1)/n. */
static void show(const session *s, size_t bytes, double seconds, bool as_json, json_t *list)
{
    int n = session_world(s);
    double algorithm = (double)bytes / seconds / 1e9, bus = algorithm * 2 * (n - 1) / n;
    char size[32];
    if (!session_speaks(s))
        return;
    if (as_json)
        json_array_append_new(list,
                              json_pack("{s:I, s:f, s:f, s:f}", "bytes", (json_int_t)bytes, "us",
                                        seconds * 1e6, "algbw", algorithm, "busbw", bus));
    else
        printf("%12s %12.1f %12.3f %12.3f\n", tool_bytes((double)bytes, size), seconds * 1e6,
               algorithm, bus);
    fflush(stdout);
}

static dnr_status run(session *s, const tool_args *a, dnr_error *err)
{
    dnr_status st;
    double seconds = 0;
    int64_t most = a->most < 0 ? 1 << 30 : a->most << 20;
    json_t *list = json_array();
    TOOL_TRY(st, ranks_open(s, false, err));
    TOOL_LIB(st, ranks_open_device(s));
    for (size_t bytes = 4; bytes <= (size_t)most; bytes *= 4) {
        TOOL_LIB(st, dnr_comm_measure(s->comm, s->dev, bytes, 1, &seconds));
        if (bytes == 4 && session_speaks(s) && !a->json)
            printf("%s, on %s\n%12s %12s %12s %12s\n", dnr_comm_description(s->comm),
                   dnr_device_description(s->dev), "size", "us", "algbw GB/s", "busbw GB/s");
        TOOL_LIB(st, dnr_comm_measure(s->comm, s->dev, bytes, times_for(seconds), &seconds));
        show(s, bytes, seconds, a->json, list);
    }
    if (a->json && session_speaks(s)) {
        json_t *j = json_pack("{s:i, s:s, s:s, s:O}", "ranks", session_world(s), "transport",
                              dnr_comm_description(s->comm), "device",
                              dnr_device_description(s->dev), "sizes", list);
        json_dumpf(j, stdout, JSON_REAL_PRECISION(6));
        putchar('\n');
        json_decref(j);
    }
out:
    json_decref(list);
    return st;
}

dnr_status bench_allreduce(const tool_args *a, dnr_error *err)
{
    session s = {0};
    cfg_init(&s.cfg);
    dnr_status st = DNR_OK;
    if (a->cfg) /* device=…, dist.timeout=… */
        st = cfg_set(&s.cfg, a->cfg, err);
    for (int i = 0; st == DNR_OK && i < a->n_set; i++)
        st = cfg_set(&s.cfg, a->set[i], err);
    if (st == DNR_OK)
        st = run(&s, a, err);
    ranks_close(&s, st == DNR_OK ? NULL : err);
    session_close(&s);
    return st;
}
