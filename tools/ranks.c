/* ranks.c: see ranks.h. */
#include "ranks.h"
#include "resume.h"
#include "screen.h"

#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static void on_loss(void *user, const dnr_error *why)
{
    (void)user;
    screen_last_words(why);
    _exit((int)why->status); /* what the device has been given may never end */
}

/* Ranks that share a host's cores share them evenly, unless the launcher has bound them or the user says otherwise. */
static void share_cores(int local_ranks)
{
    cpu_set_t set;
    char threads[16];
    long online = sysconf(_SC_NPROCESSORS_ONLN);
    if (local_ranks < 2 || sched_getaffinity(0, sizeof set, &set) || CPU_COUNT(&set) < online)
        return;
    snprintf(threads, sizeof threads, "%ld", online / local_ranks > 1 ? online / local_ranks : 1);
    setenv("OMP_NUM_THREADS", threads, 0);
}

dnr_status ranks_open(session *s, bool log_all, dnr_error *err)
{
    dnr_status st;
    int rank, world;
    static const char *const transports[] = {"tcp", "mpi"};
    char standin[CFG_TEXT + 16];
    snprintf(standin, sizeof standin, "standin:%s", s->cfg.dist.standin);
    dnr_comm_opts o = {.transport =
                           *s->cfg.dist.standin ? standin : transports[s->cfg.dist.transport],
                       .timeout_s = s->cfg.dist.timeout,
                       .on_loss = on_loss};
    TOOL_LIB(st, dnr_launched(&rank, &world));
    screen_rank(rank, world, log_all);
    TOOL_LIB(st, dnr_comm_open(&o, &s->comm));
    if (*s->cfg.dist.standin && !dnr_comm_launched(s->comm)) {
        st = tool_fail(err, DNR_EUSAGE, "dist.standin", "this run has no ranks");
        tool_remedy(err, "start it with DNR_RANK=0 DNR_WORLD_SIZE=1, or leave dist.standin out");
        goto out;
    }
    share_cores(dnr_comm_local_world(s->comm));
out:
    return st;
}

void ranks_close(session *s, const dnr_error *err)
{
    dnr_comm_close(s->comm, err);
    s->comm = NULL;
}

dnr_status ranks_open_device(session *s)
{
    const char *wanted = s->cfg.device;
    bool any = !strcmp(wanted, "auto");
    char mine[32];
    if (!s->comm || dnr_comm_local_world(s->comm) < 2 || (!any && strcmp(wanted, "cuda")))
        return dnr_device_open(wanted, &s->dev);
    snprintf(mine, sizeof mine, "cuda:%d", dnr_comm_local_rank(s->comm));
    if (dnr_device_open(mine, &s->dev) == DNR_OK)
        return DNR_OK;
    /* a launcher that shows each rank its own GPU alone numbers it 0; two on one are refused later */
    return dnr_device_open(wanted, &s->dev);
}

/* Lines "key = value" of all keys that decide what is computed. From malloc; NULL: out of memory. */
static char *cfg_text(const cfg *c)
{
    char *text = NULL, value[CFG_TEXT];
    size_t size;
    FILE *f = open_memstream(&text, &size);
    for (int i = 0; f && i < cfg_n_keys; i++)
        if (!resume_may_change(cfg_keys[i].name))
            fprintf(f, "%s = %s\n", cfg_keys[i].name, cfg_value(c, &cfg_keys[i], value));
    if (f)
        fclose(f);
    return text;
}

dnr_status ranks_compare(const session *s, dnr_error *err)
{
    char train[20] = "none", val[20] = "none", plan[20], steps[64];
    char *text = cfg_text(&s->cfg);
    dnr_status st = DNR_OK;
    if (s->train)
        snprintf(train, sizeof train, "%016llx", (unsigned long long)dnr_source_hash(s->train));
    if (s->val)
        snprintf(val, sizeof val, "%016llx", (unsigned long long)dnr_source_hash(s->val));
    snprintf(plan, sizeof plan, "%016llx", (unsigned long long)dnr_trainer_plan_hash(s->trainer));
    snprintf(steps, sizeof steps, "%lld from picture %lld", (long long)s->steps,
             (long long)s->start);
    dnr_fact facts[] = {
        {"dnnrun's version", dnr_version()},
        {"the cfg", text ? text : ""},
        {"the pictures of data.train (hash of names, sizes and labels)", train},
        {"the pictures of data.val (hash of names, sizes and labels)", val},
        {"train.precision", dnr_precision_name(dnr_trainer_precision(s->trainer))},
        {"its steps", steps},
        {"its plan (hash)", plan},
    };
    TOOL_LIB(st, dnr_comm_compare(s->comm, facts, sizeof facts / sizeof facts[0]));
out:
    free(text);
    return st;
}

dnr_status ranks_wait_for_0(const session *s, dnr_error *err)
{
    char done = 1;
    dnr_status st;
    TOOL_LIB(st, dnr_comm_broadcast(s->comm, &done, sizeof done));
out:
    return st;
}
