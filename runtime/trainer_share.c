/* trainer_share.c: what ranks have in common outside a step: equal weights to begin with, one evaluation. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#include "choices.h"
#include "trainer.h"

enum { CHUNK = 1 << 22 }; /* bytes staged at once where the device has memory of its own */

/* From rank 0 to all, and through the hash what each rank then holds. `chunk`: CHUNK bytes. */
static dnr_status share_slab(dnr_trainer *t, dnri_role role, char *chunk, XXH64_state_t *sum)
{
    size_t bytes = dnri_store_bytes(t->store, role);
    char *slab = bytes ? dnri_store_ptr(t->store, role, -1) : NULL;
    for (size_t at = 0; at < bytes; at += CHUNK) {
        size_t some = bytes - at < CHUNK ? bytes - at : CHUNK;
        if (t->comm->rank == 0)
            DNR_TRY(dnri_copy_now(t->dev, chunk, slab + at, some));
        DNR_TRY(dnri_comm_broadcast(t->comm, "sharing the weights", chunk, some));
        if (t->comm->rank > 0)
            DNR_TRY(dnri_copy_now(t->dev, slab + at, chunk, some));
        DNR_TRY(dnri_copy_now(t->dev, chunk, slab + at, some)); /* as it lies there now */
        XXH64_update(sum, chunk, some);
    }
    return DNR_OK;
}

dnr_status dnri_trainer_share_choices(dnr_trainer *t)
{
    dnr_comm *c = t->comm;
    char *text = c->rank == 0 ? dnri_choices_text(t->dev->choices) : NULL;
    int64_t bytes = text ? (int64_t)strlen(text) + 1 : 0;
    if (c->rank == 0 && !text)
        return DNR_FAIL_NOMEM();
    dnr_status st = dnri_comm_broadcast(c, "waiting for rank 0's timing", &bytes, sizeof bytes);
    if (st == DNR_OK && c->rank > 0)
        st = (text = malloc((size_t)bytes)) ? DNR_OK : DNR_FAIL_NOMEM();
    if (st == DNR_OK)
        st = dnri_comm_broadcast(c, "taking rank 0's choices", text, (size_t)bytes);
    if (st == DNR_OK && c->rank > 0 && !dnri_choices_take(t->dev->choices, text))
        dnri_log(DNR_LOG_INFO, "%s is not what rank 0 has: it times for itself", t->dev->name);
    free(text);
    return st;
}

/* Counters and position: the other ranks go on where rank 0 stands. */
static dnr_status share_position(dnr_trainer *t, XXH64_state_t *sum)
{
    struct {
        dnri_state state;
        int64_t steps, samples;
    } at = {.steps = t->steps, .samples = t->samples};
    DNR_TRY(dnri_store_read_state(t->store, &at.state));
    DNR_TRY(dnri_comm_broadcast(t->comm, "sharing the position", &at, sizeof at));
    XXH64_update(sum, &at.steps, sizeof at.steps);
    if (t->comm->rank == 0)
        return DNR_OK;
    if (at.steps > 0)
        return dnri_trainer_go_on(t, &at.state, at.samples);
    return dnri_store_write_state(t->store, &at.state);
}

static dnr_status compare(dnr_trainer *t, uint64_t mine)
{
    uint64_t *all = calloc((size_t)t->world, sizeof *all);
    if (!all)
        return DNR_FAIL_NOMEM();
    dnr_status st = dnri_comm_allgather(t->comm, "comparing weights", &mine, sizeof mine, all);
    for (int r = 1; st == DNR_OK && r < t->world; r++)
        if (all[r] != all[0])
            st = DNR_FAIL(DNR_EPEER, "look for failing memory on its host, or on the network's way",
                          "rank %d on %s does not hold rank 0's weights: hash %016" PRIx64
                          ", not %016" PRIx64,
                          r, dnri_comm_host(t->comm, r), all[r], all[0]);
    free(all);
    return st;
}

static dnr_status share_all(dnr_trainer *t, char *chunk, XXH64_state_t *sum)
{
    static const dnri_role roles[] = {DNRI_MASTER, DNRI_WEIGHT, DNRI_MOMENTUM,
                                      DNRI_BUFFER, DNRI_EMA,    DNRI_EMA_BUFFER};
    XXH64_reset(sum, 0);
    for (size_t i = 0; i < sizeof roles / sizeof roles[0]; i++)
        DNR_TRY(share_slab(t, roles[i], chunk, sum));
    if (t->o.batch > 0)
        DNR_TRY(share_position(t, sum));
    return compare(t, XXH64_digest(sum));
}

dnr_status dnr_trainer_share(dnr_trainer *t)
{
    if (!t->comm)
        return DNR_OK;
    dnri_comm_stage(t->comm, 0, "sharing the weights");
    char *chunk = malloc(CHUNK);
    XXH64_state_t *sum = XXH64_createState();
    dnr_status st = chunk && sum ? share_all(t, chunk, sum) : DNR_FAIL_NOMEM();
    t->shared = st == DNR_OK;
    t->prepared = 0;
    free(chunk);
    XXH64_freeState(sum);
    return st;
}

/* Each rank has running statistics of its own batches; rank 0's are the ones saved, so they are the ones tested. */
dnr_status dnri_trainer_begin_eval(dnr_trainer *t)
{
    if (!t->comm)
        return DNR_OK;
    if (!t->shared)
        DNR_TRY(dnr_trainer_share(t));
    dnri_comm_stage(t->comm, 0, "evaluation after step %lld", (long long)t->steps);
    char *chunk = malloc(CHUNK);
    XXH64_state_t *unused = XXH64_createState();
    dnr_status st = chunk && unused ? DNR_OK : DNR_FAIL_NOMEM();
    t->prepared = 0;
    if (st == DNR_OK) {
        XXH64_reset(unused, 0);
        st = share_slab(t, DNRI_BUFFER, chunk, unused);
    }
    free(chunk);
    XXH64_freeState(unused);
    return st;
}

dnr_status dnri_trainer_sum_eval(dnr_trainer *t, dnri_state *s)
{
    int64_t counts[] = {s->correct1, s->correct5, s->samples};
    if (!t->comm)
        return DNR_OK;
    DNR_TRY(dnri_comm_sum(t->comm, "the evaluation's counts", DNRI_SUM_I64, counts, 3));
    DNR_TRY(dnri_comm_sum(t->comm, "the evaluation's loss", DNRI_SUM_F64, &s->loss_sum, 1));
    s->correct1 = counts[0];
    s->correct5 = counts[1];
    s->samples = counts[2];
    return DNR_OK;
}
