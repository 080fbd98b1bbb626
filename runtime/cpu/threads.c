/* threads.c: the module's one use of OpenMP, and where its threads run. */
#include "cpu.h"

#include <omp.h>
#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>

static int pool = 1; /* threads of every parallel region */

void dnri_slices(int slices, int64_t n, dnri_slice_fn fn, void *ctx)
{
    if (slices <= 1) {
        fn(ctx, 0, 0, n);
        return;
    }
    /* Always the whole pool: OpenMP ends the threads that a smaller region leaves over, and makes them anew for
     * the next. It may give fewer than asked for: the slices stay the same. */
#pragma omp parallel num_threads(pool)
    for (int s = omp_get_thread_num(); s < slices; s += omp_get_num_threads())
        fn(ctx, s, n * s / slices, n * (s + 1) / slices);
}

int dnri_slices_for(dnr_device *dev, int64_t elements)
{
    /* Some 10 us of work for each thread: waking it takes as long, and much longer where another process has its
     * CPU. */
    int64_t most = elements / 65536;
    int threads = dnri_cpu_of(dev)->threads;
    return most < 1 ? 1 : most < threads ? (int)most : threads;
}

int dnri_threads_for(dnr_device *dev, double flops)
{
    return flops < 32e6 ? 1 : dnri_cpu_of(dev)->threads; /* some 100 us of one thread, likewise */
}

int dnri_threads_use(int n)
{
    int before = omp_get_max_threads();
    if (n != before)
        omp_set_num_threads(n);
    return before;
}

/* Does the user, or a launcher that shares the machine between ranks, place threads already? */
static bool placed_by_others(void)
{
    static const char *const vars[] = {"OMP_PROC_BIND",
                                       "OMP_PLACES",
                                       "GOMP_CPU_AFFINITY",
                                       "KMP_AFFINITY",
                                       "OMPI_COMM_WORLD_LOCAL_SIZE",
                                       "MPI_LOCALNRANKS",
                                       "PMI_SIZE",
                                       "SLURM_NTASKS"};
    for (size_t i = 0; i < sizeof vars / sizeof vars[0]; i++)
        if (getenv(vars[i]))
            return true;
    return false;
}

/* Binds each thread of the pool but the caller to a CPU of its own. Unbound, two threads now and then share a
 * CPU and every barrier waits for them. OMP_PROC_BIND cannot be set from here (OpenMP reads it while it is
 * loaded), and it binds the caller too, whose threads to come would inherit that one CPU. The caller floats, and
 * ends on the CPU that the others leave free. A pool of fewer threads than CPUs is left to the kernel: it may not be
 * the only one, and two that choose by the same rule would choose the same CPUs. */
static void bind_pool(int threads, const cpu_set_t *all)
{
    if (placed_by_others() || threads != CPU_COUNT(all))
        return;
#pragma omp parallel num_threads(threads)
    {
        int skip = omp_get_thread_num(), cpu = 0;
        if (skip > 0) {
            for (; !CPU_ISSET(cpu, all) || skip-- > 0; cpu++) {
            }
            cpu_set_t one;
            CPU_ZERO(&one);
            CPU_SET(cpu, &one);
            sched_setaffinity(0, sizeof one, &one); /* a wish: without it all runs, only slower */
        }
    }
}

/* The CPUs of the process. OpenMP may have bound this thread to one of them when it was loaded. */
static void all_cpus(cpu_set_t *all)
{
    cpu_set_t own;
    int ids[CPU_SETSIZE];
    *all = *dnri_process_cpus();
    if (sched_getaffinity(0, sizeof own, &own) == 0)
        CPU_OR(all, all, &own);
    for (int p = 0; p < omp_get_num_places(); p++) {
        int n = omp_get_place_num_procs(p);
        omp_get_place_proc_ids(p, n <= CPU_SETSIZE ? ids : NULL);
        for (int i = 0; i < n; i++)
            CPU_SET(ids[i], all);
    }
}

/* Threads that OpenMP has bound leave CPUs, or they do not; threads that it has not bound may run on any. */
static void find_spare(int threads, const cpu_set_t *all, dnri_spare *out)
{
    cpu_set_t taken, rest;
    CPU_ZERO(&taken);
    *out = (dnri_spare){0};
#pragma omp parallel num_threads(threads)
    {
        cpu_set_t own;
        CPU_ZERO(&own);
        sched_getaffinity(0, sizeof own, &own);
#pragma omp critical
        CPU_OR(&taken, &taken, &own);
    }
    CPU_XOR(&rest, all, &taken); /* `taken` is part of `all` */
    int quarter = (threads + 3) / 4, left = CPU_COUNT(all) - threads;
    if (omp_get_proc_bind() != omp_proc_bind_false)
        out->cpus = CPU_COUNT(&rest) >= quarter ? rest : *all;
    out->threads = left > quarter ? left : quarter;
}

static void *wait_for_release(void *gate)
{
    pthread_mutex_lock(gate);
    pthread_mutex_unlock(gate);
    return NULL;
}

/* OpenMP ends the process where it cannot start its threads. Finds that out first, once: it keeps them. */
static dnr_status try_threads(int n)
{
    static bool tried;
    pthread_mutex_t gate = PTHREAD_MUTEX_INITIALIZER;
    pthread_t *made = tried ? NULL : malloc((size_t)n * sizeof *made);
    int started = 0, error = 0;
    if (tried)
        return DNR_OK;
    if (!made)
        return DNR_FAIL_NOMEM();
    pthread_mutex_lock(&gate);
    while (!error && started < n)
        if (!(error = pthread_create(&made[started], NULL, wait_for_release, &gate)))
            started++;
    pthread_mutex_unlock(&gate);
    for (int i = 0; i < started; i++)
        pthread_join(made[i], NULL);
    free(made);
    tried = !error;
    return error ? DNR_FAIL(
                       DNR_EFAIL,
                       "set OMP_NUM_THREADS to fewer, or raise the limit on processes (ulimit -u) "
                       "or addresses (ulimit -v)",
                       "cannot start %d threads to compute: %s", n, strerror(error))
                 : DNR_OK;
}

dnr_status dnri_threads_start(dnri_spare *spare, int *out)
{
    /* oneDNN's barriers wait for as many threads as OpenMP promises, for ever: promise what it gives */
    int threads = 1, quota = getenv("OMP_NUM_THREADS") ? 0 : dnri_host_cpu_quota();
    cpu_set_t all;
    all_cpus(&all);
    omp_set_dynamic(0);
    if (quota && quota < omp_get_max_threads())
        omp_set_num_threads(quota);
    DNR_TRY(try_threads(omp_get_max_threads()));
#pragma omp parallel
    {
#pragma omp master
        threads = omp_get_num_threads();
    }
    omp_set_num_threads(threads);
    if (threads > CPU_COUNT(&all))
        dnri_log(DNR_LOG_WARN,
                 "%d threads compute on %d CPUs and wait for each other: OMP_NUM_THREADS = %d is "
                 "faster",
                 threads, CPU_COUNT(&all), CPU_COUNT(&all));
    pool = threads;
    bind_pool(threads, &all);
    find_spare(threads, &all, spare);
    *out = threads;
    return DNR_OK;
}
