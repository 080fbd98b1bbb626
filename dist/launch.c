/* launch.c: see launch.h. */
#include "launch.h"

#include <stdlib.h>
#include <string.h>

enum { MOST = 65536 }; /* ranks */

/* The launchers, in the order in which they are asked: DNR_… wins, and mpirun within a Slurm job before Slurm. srun sets
 * SLURM_STEP_NUM_TASKS; a batch script, which is one process whatever the job's size, does not have it. */
static const struct {
    const char *name, *rank, *world, *local_rank, *local_world;
    const char *job[3];
} launchers[] = {
    {"DNR_RANK",
     "DNR_RANK",
     "DNR_WORLD_SIZE",
     "DNR_LOCAL_RANK",
     "DNR_LOCAL_SIZE",
     {"DNR_JOB", NULL, NULL}},
    {"Open MPI",
     "OMPI_COMM_WORLD_RANK",
     "OMPI_COMM_WORLD_SIZE",
     "OMPI_COMM_WORLD_LOCAL_RANK",
     "OMPI_COMM_WORLD_LOCAL_SIZE",
     {"DNR_JOB", "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"}},
    {"Slurm",
     "SLURM_PROCID",
     "SLURM_STEP_NUM_TASKS",
     "SLURM_LOCALID",
     "DNR_LOCAL_SIZE",
     {"DNR_JOB", "SLURM_JOB_ID", NULL}},
    {"MPICH",
     "PMI_RANK",
     "PMI_SIZE",
     "MPI_LOCALRANKID",
     "MPI_LOCALNRANKS",
     {"DNR_JOB", "PMI_JOBID", NULL}},
};

static dnr_status number(const char *name, int least, int most, int *out)
{
    const char *text = getenv(name);
    char *end;
    long v = text ? strtol(text, &end, 10) : -1;
    if (!text)
        return DNR_FAIL(DNR_EUSAGE, "start all ranks through one launcher, or set it",
                        "%s is not set", name);
    if (end == text || *end || v < least || v > most)
        return DNR_FAIL(DNR_EUSAGE, "start all ranks through one launcher, or set it right",
                        "%s is \"%.40s\", not a number of %d … %d", name, text, least, most);
    *out = (int)v;
    return DNR_OK;
}

bool dnri_first_host(const char *list, char *buf, size_t size)
{
    size_t head = strcspn(list, "[,"), n = head;
    const char *digits = "", *tail = "";
    size_t n_digits = 0, n_tail = 0;
    if (list[head] == '[') { /* the first of "03-05,7]" */
        digits = list + head + 1;
        n_digits = strcspn(digits, "-,]");
        const char *close = strchr(digits, ']');
        if (!close)
            return false;
        tail = close + 1;
        n_tail = strcspn(tail, ",[");
    }
    n = head + n_digits + n_tail;
    if (n == 0 || n >= size)
        return false;
    snprintf(buf, size, "%.*s%.*s%.*s", (int)head, list, (int)n_digits, digits, (int)n_tail, tail);
    return true;
}

/* Slurm says which hosts a step has: rank 0 is on the first. The port follows from job and step, so that two jobs on
 * a host meet at different ones. */
static void slurm_master(dnri_launch *l)
{
    const char *hosts = getenv("SLURM_STEP_NODELIST"), *nodes = getenv("SLURM_STEP_NUM_NODES");
    const char *job = getenv("SLURM_JOB_ID"), *step = getenv("SLURM_STEP_ID");
    char host[200];
    if (!hosts || !job || !dnri_first_host(hosts, host, sizeof host))
        return;
    snprintf(l->job, sizeof l->job, "%.60s.%.40s", job, step ? step : "0");
    if (nodes && !strcmp(nodes, "1")) {
        l->local_world = l->world;
        return;
    }
    unsigned long port = strtoul(job, NULL, 10) * 31 + strtoul(step ? step : "0", NULL, 10);
    snprintf(l->master, sizeof l->master, "%s:%lu", host, 20000 + port % 10000);
}

/* Of two variables, the second may be unset. */
static bool agree(const char *name, const char *other)
{
    return !getenv(other) || !strcmp(getenv(name), getenv(other));
}

/* Did it start this process? srun sets MPICH's variables as well (--mpi=pmi2), to its own numbers; where they differ, they
 * are those of an mpiexec that srun started. */
static bool started_by(int i)
{
    return getenv(launchers[i].rank) && getenv(launchers[i].world) &&
           (strcmp(launchers[i].name, "Slurm") != 0 ||
            (agree("SLURM_PROCID", "PMI_RANK") && agree("SLURM_STEP_NUM_TASKS", "PMI_SIZE")));
}

static dnr_status read_launcher(int i, dnri_launch *l)
{
    l->launcher = launchers[i].name;
    DNR_TRY(number(launchers[i].world, 1, MOST, &l->world));
    DNR_TRY(number(launchers[i].rank, 0, l->world - 1, &l->rank));
    if (getenv(launchers[i].local_rank))
        DNR_TRY(number(launchers[i].local_rank, 0, MOST, &l->local_rank));
    else
        l->local_rank = -1;
    if (getenv(launchers[i].local_world))
        DNR_TRY(number(launchers[i].local_world, 1, MOST, &l->local_world));
    for (int k = 0; k < 3 && !*l->job; k++)
        if (launchers[i].job[k] && getenv(launchers[i].job[k]))
            snprintf(l->job, sizeof l->job, "%s", getenv(launchers[i].job[k]));
    if (!strcmp(l->launcher, "Slurm"))
        slurm_master(l);
    const char *master = getenv("DNR_MASTER");
    if (master && strlen(master) < sizeof l->master)
        strcpy(l->master, master);
    if (l->world == 1)
        l->local_world = 1;
    return DNR_OK;
}

dnr_status dnri_launch_read(dnri_launch *out)
{
    *out = (dnri_launch){.world = 1, .local_world = 1};
    for (int i = 0; i < (int)(sizeof launchers / sizeof launchers[0]); i++)
        if (started_by(i)) {
            *out = (dnri_launch){0};
            return read_launcher(i, out);
        }
    if (getenv("DNR_RANK") || getenv("DNR_WORLD_SIZE"))
        return DNR_FAIL(DNR_EUSAGE, "set both, and DNR_MASTER=HOST:PORT; or neither",
                        "only one of DNR_RANK and DNR_WORLD_SIZE is set");
    return DNR_OK;
}
