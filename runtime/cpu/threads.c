/* threads.c: the module's one use of OpenMP, and where its threads run. */
#include "cpu.h"

#include <omp.h>
#include <sched.h>
#include <stdlib.h>
#include <unistd.h>

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
static bool placed_by_others(const cpu_set_t *mask)
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
    return CPU_COUNT(mask) != sysconf(_SC_NPROCESSORS_ONLN);
}

/* Binds each thread of the pool but the caller to a CPU of its own. Unbound, two threads now and then share a
 * CPU and every barrier waits for them. OMP_PROC_BIND cannot be set from here (OpenMP reads it while it is
 * loaded), and it binds the caller too, whose threads to come (loaders) would inherit that one CPU. The
 * caller floats, and ends on the CPU that the others leave free. */
static void bind_pool(int threads)
{
    cpu_set_t mask;
    if (sched_getaffinity(0, sizeof mask, &mask) != 0 || placed_by_others(&mask) ||
        threads != CPU_COUNT(&mask))
        return;
#pragma omp parallel num_threads(threads)
    {
        int skip = omp_get_thread_num(), cpu = 0;
        if (skip > 0) {
            for (; !CPU_ISSET(cpu, &mask) || skip-- > 0; cpu++) {
            }
            cpu_set_t one;
            CPU_ZERO(&one);
            CPU_SET(cpu, &one);
            sched_setaffinity(0, sizeof one, &one); /* a wish: without it all runs, only slower */
        }
    }
}

int dnri_threads_start(void)
{
    /* oneDNN's barriers wait for as many threads as OpenMP promises, for ever: promise what it gives */
    int threads = 1;
    omp_set_dynamic(0);
#pragma omp parallel
    {
#pragma omp master
        threads = omp_get_num_threads();
    }
    omp_set_num_threads(threads);
    pool = threads;
    bind_pool(threads);
    return threads;
}
