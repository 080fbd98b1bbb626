/* schedule.c: the learning rate as a pure function of the samples seen.
 *
 * Warm-up is a ramp w(s) from warmup_factor to 1 that multiplies the schedule. Schedules in epochs (step,
 * multistep) count from the start of the run; the others (linear, cosine, poly) run from the end of the
 * warm-up (t = 0) to the end of the run (t = 1), as torch's SequentialLR arranges them. */
#include <math.h>

#include "dnnrun.h"

static const double PI = 3.14159265358979323846;

/* Torch's OneCycleLR(anneal_strategy="cos"). It counts steps, not samples: the peak lies at step
 * pct_start · total − 1 and the end at step total − 1. */
static double onecycle(const dnr_optim_opts *o, double step, double steps)
{
    double pct_start = o->pct_start > 0 ? o->pct_start : 0.3;
    double low = o->lr / (o->div_factor > 0 ? o->div_factor : 25);
    double end = low / (o->final_div_factor > 0 ? o->final_div_factor : 1e4);
    double peak_at = pct_start * steps - 1, end_at = steps - 1;
    bool rising = peak_at > 0 && step <= peak_at;
    double from = rising ? low : o->lr, to = rising ? o->lr : end;
    double begin = rising ? 0 : peak_at, span = (rising ? peak_at : end_at) - begin;
    double t = span > 0 ? fmin(1, (step - begin) / span) : 1;
    return to + (from - to) / 2 * (1 + cos(PI * t));
}

static int milestones_passed(const dnr_optim_opts *o, double epochs)
{
    int n = 0;
    for (int i = 0; i < o->n_milestones; i++)
        n += epochs >= o->milestones[i];
    return n;
}

double dnr_learning_rate(const dnr_optim_opts *o, int64_t samples, int64_t total, int64_t epoch,
                         int64_t global_batch)
{
    double s = (double)samples, batch = (double)global_batch;
    /* The small excess keeps s = k·epoch·x, a rounded product, on the right side of the edge. */
    double epochs = s / (double)epoch + 1e-9;
    double warm = o->warmup_epochs * (double)epoch;
    double ramp = 1, t = 0;

    if (o->schedule == DNR_SCHEDULE_ONECYCLE)
        return onecycle(o, s / batch, ceil((double)total / batch));
    if (s < warm) {
        double factor = o->warmup_factor > 0 ? o->warmup_factor : fmin(1, batch / warm);
        ramp = factor + (1 - factor) * s / warm;
    } else if ((double)total > warm) {
        t = fmin(1, (s - warm) / ((double)total - warm));
    }
    switch (o->schedule) {
    case DNR_SCHEDULE_STEP:
        return ramp * o->lr * pow(o->gamma, floor(epochs / o->step_epochs));
    case DNR_SCHEDULE_MULTISTEP:
        return ramp * o->lr * pow(o->gamma, milestones_passed(o, epochs));
    case DNR_SCHEDULE_LINEAR:
        return ramp * (o->lr + (o->lr_min - o->lr) * t);
    case DNR_SCHEDULE_COSINE:
        return ramp * (o->lr_min + (o->lr - o->lr_min) * (1 + cos(PI * t)) / 2);
    case DNR_SCHEDULE_POLY:
        return ramp * (o->lr_min + (o->lr - o->lr_min) * pow(1 - t, o->power));
    case DNR_SCHEDULE_CONSTANT:
    case DNR_SCHEDULE_ONECYCLE:
        break;
    }
    return ramp * o->lr;
}
