/* lanes.c: see plan_internal.h. */
#include "plan_internal.h"
#include "reduce.h"

/* In evaluation: an op of more operations fills a device by itself, and others beside it gain nothing. */
#define FILLS_FLOPS 1e9
/* So many ops of a lane beside COMPUTE may be under way: what they read has to be kept meanwhile. */
#define DEPTH 4

static bool is_beside(const dnri_plan *p, int i)
{
    return p->steps[i].lane >= DNRI_BESIDE;
}

/* Where the part of the program that op i is in ends. */
static int end_of_part(const dnri_plan *p, int i)
{
    int part = 0;
    while (p->end[part] <= i)
        part++;
    return p->end[part];
}

static bool reads(const dnri_plan *p, int i, dnr_tid t)
{
    const dnri_op *op = dnri_graph_op_c(p->g, i);
    for (int k = 0; k < op->n_in; k++)
        if (op->in[k] == t)
            return true;
    return false;
}

/* ---- which */

/* Are gradients of parameters all that the op makes? */
static bool ends_in_gradients(const dnri_plan *p, int i)
{
    const dnri_op *op = dnri_graph_op_c(p->g, i);
    int made = 0;
    for (int k = 0; k < op->n_out; k++) {
        const dnri_tensor *t = op->out[k] < 0 ? NULL : dnri_graph_tensor(p->g, op->out[k]);
        if (t && (t->home != DNRI_STORE || t->role != DNRI_GRAD || t->param < 0))
            return false;
        made += t != NULL;
    }
    return made > 0 && op->phase == DNRI_BACKWARD && !dnri_comm_owns(op);
}

/* Or is it read by nothing but ops that make those, such as a cast? */
static bool leads_to_gradients(const dnri_plan *p, int i)
{
    const dnri_op *op = dnri_graph_op_c(p->g, i);
    int readers = 0;
    for (int k = 0; k < op->n_out; k++) {
        const dnri_tensor *t = op->out[k] < 0 ? NULL : dnri_graph_tensor(p->g, op->out[k]);
        if (t && (t->home != DNRI_ARENA || t->keep))
            return false;
        for (int r = i + 1; t && r < p->n; r++)
            if (reads(p, r, op->out[k])) {
                if (!ends_in_gradients(p, r))
                    return false;
                readers++;
            }
    }
    return readers > 0 && op->phase == DNRI_BACKWARD && !dnri_comm_owns(op);
}

/* The last op before i beside COMPUTE whose results it reads; −1: none. */
static int feeder(const dnri_plan *p, int i, const dnr_lane *lane)
{
    for (int k = i - 1; k >= 0; k--) {
        const dnri_op *op = dnri_graph_op_c(p->g, k);
        for (int m = 0; lane[k] != DNRI_COMPUTE && m < op->n_out; m++)
            if (op->out[m] >= 0 && reads(p, i, op->out[m]))
                return k;
    }
    return -1;
}

/* Weight gradients, and what casts them, run beside the chain of gradients that the layers before wait for. */
static void choose_backward(const dnri_plan *p, int lanes, dnr_lane *lane)
{
    for (int i = 0, turn = 0; i < p->n; i++) {
        if (!ends_in_gradients(p, i) && !leads_to_gradients(p, i))
            continue;
        const int k = feeder(p, i, lane);
        lane[i] = k >= 0 ? lane[k] : (dnr_lane)(DNRI_BESIDE + turn++ % (lanes - 1));
    }
}

/* In the forward pass of a few pictures no op fills the device. The op whose result is first read by other than the
 * next, such as the projection of a residual block, runs beside those in between. */
static void choose_forward(const dnri_plan *p, dnr_lane *lane)
{
    for (int i = 0; i < p->n; i++) {
        const dnri_op *op = dnri_graph_op_c(p->g, i);
        const double flops = op->def->flops ? op->def->flops(p->g, op) : 0;
        const int end = end_of_part(p, i);
        int reader = end;
        if (op->phase != DNRI_FORWARD || flops <= 0 || flops > FILLS_FLOPS)
            continue;
        for (int r = end - 1; r > i; r--)
            for (int k = 0; k < op->n_out; k++)
                if (op->out[k] >= 0 && reads(p, r, op->out[k]))
                    reader = r;
        if (reader > i + 1 && reader < end)
            lane[i] = DNRI_BESIDE;
    }
}

void dnri_lanes_choose(const dnri_plan *p, int lanes, dnr_lane *lane)
{
    for (int i = 0; i < p->n; i++)
        lane[i] = DNRI_COMPUTE;
    if (!dnri_graph_training(p->g) && lanes != 1)
        choose_forward(p, lane);
    else if (dnri_graph_training(p->g) && lanes > 1)
        choose_backward(p, lanes, lane);
}

/* ---- who waits */

static bool same_place(const dnri_plan *p, dnr_tid a, dnr_tid b)
{
    if (a < 0 || b < 0)
        return false;
    const dnri_tensor *x = dnri_graph_tensor(p->g, a), *y = dnri_graph_tensor(p->g, b);
    return a == b || (x->home == DNRI_STORE && y->home == DNRI_STORE && x->role == y->role &&
                      (x->param == y->param || x->param < 0 || y->param < 0));
}

/* Must the later op r find op i done? It reads or writes what that writes, or writes what that reads. (Of places in
 * the arena that their tensors take in turn, lifetimes take care.) */
static bool needs(const dnri_plan *p, int r, int i)
{
    const dnri_op *a = dnri_graph_op_c(p->g, i), *b = dnri_graph_op_c(p->g, r);
    for (int k = 0; k < b->n_in + b->n_out; k++) {
        const bool writes = k >= b->n_in;
        const dnr_tid t = writes ? b->out[k - b->n_in] : b->in[k];
        for (int m = 0; m < a->n_out; m++)
            if (same_place(p, a->out[m], t))
                return true;
        for (int m = 0; writes && m < a->n_in; m++)
            if (same_place(p, a->in[m], t))
                return true;
    }
    return false;
}

static int join_of(const dnri_plan *p, int i)
{
    const int end = end_of_part(p, i);
    for (int r = i + 1, begun = 0; r < end; r++) {
        begun += p->steps[r].lane == p->steps[i].lane;
        if (begun == DEPTH || (!is_beside(p, r) && needs(p, r, i)))
            return r;
    }
    return end;
}

void dnri_lanes_settle(dnri_plan *p)
{
    p->forks = false;
    for (int i = 0; i < p->n; i++) {
        p->join[i] = is_beside(p, i) ? join_of(p, i) : 0;
        p->forks = p->forks || p->join[i];
    }
}

dnr_status dnri_lanes_join(dnri_plan *p, int i)
{
    bool waits[DNRI_LANES] = {false};
    for (int k = 0; p->forks && k < i; k++)
        waits[p->steps[k].lane] |= p->join[k] == i;
    for (int l = DNRI_BESIDE; l < DNRI_LANES; l++)
        if (waits[l])
            DNR_TRY(p->dev->be->fence(p->dev, (dnr_lane)l, DNRI_COMPUTE));
    return DNR_OK;
}

dnr_status dnri_lanes_fence(dnri_plan *p, int i)
{
    const dnr_lane lane = p->steps[i].lane;
    bool waits[DNRI_LANES] = {false};
    DNR_TRY(dnri_lanes_join(p, i));
    if (!is_beside(p, i))
        return DNR_OK;
    DNR_TRY(p->dev->be->fence(p->dev, DNRI_COMPUTE, lane));
    for (int k = 0; k < i; k++) /* else COMPUTE has waited for it already */
        waits[p->steps[k].lane] |= p->join[k] > i && needs(p, i, k);
    for (int l = DNRI_BESIDE; l < DNRI_LANES; l++)
        if (waits[l] && l != (int)lane)
            DNR_TRY(p->dev->be->fence(p->dev, (dnr_lane)l, lane));
    return DNR_OK;
}
