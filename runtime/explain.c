/* explain.c: what `dnnrun plan` prints: each launch with its implementation, traffic and
 * arithmetic, and the memory map. */
#include "plan_internal.h"
#include "reduce.h"

#include <jansson.h>
#include <stdlib.h>
#include <string.h>

/* Bytes an op must move at least: each tensor it names, once. */
double dnri_op_bytes(const dnri_plan *p, const dnri_op *op)
{
    double sum = 0;
    for (int k = 0; k < op->n_in + op->n_out; k++) {
        dnr_tid t = k < op->n_in ? op->in[k] : op->out[k - op->n_in];
        if (t >= 0)
            sum += (double)dnri_bytes(dnri_desc(p->g, t));
    }
    return op->def->unread ? sum - op->def->unread(p->g, op) : sum;
}

double dnri_op_flops(const dnri_plan *p, const dnri_op *op)
{
    return op->def->flops ? op->def->flops(p->g, op) : 0;
}

/* Shape that tells most about an op: its first output, else its first input. */
static const char *op_shape(const dnri_plan *p, const dnri_op *op, char buf[64])
{
    for (int k = 0; k < op->n_out; k++)
        if (op->out[k] >= 0)
            return dnri_desc_text(dnri_desc(p->g, op->out[k]), buf);
    return op->n_in && op->in[0] >= 0 ? dnri_desc_text(dnri_desc(p->g, op->in[0]), buf) : "";
}

static const char *span_name(const dnri_plan *p, int i)
{
    return i < p->n_tensors ? dnri_graph_tensor(p->g, i)->name : "(workspace)";
}

/* The op at which most bytes are alive, and how many. */
static int fullest_op(const dnri_plan *p, size_t *bytes)
{
    int at = 0;
    *bytes = 0;
    for (int i = 0; i < p->n; i++) {
        size_t sum = 0;
        for (int k = 0; k < p->n_tensors + p->n; k++)
            if (p->spans[k].first <= i && i <= p->spans[k].last && !dnri_taken_over(p, k, i))
                sum += p->spans[k].size;
        if (sum > *bytes) {
            *bytes = sum;
            at = i;
        }
    }
    return at;
}

static const char *const lane_names[DNRI_LANES] = {"compute", "copy", "comm"};
static const char *const phase_names[] = {"forward", "backward", "update", "prepare"};

double dnri_plan_recomputed(const dnri_plan *p)
{
    double sum = 0;
    for (int i = 0; i < p->n; i++) {
        const dnri_op *op = dnri_graph_op_c(p->g, i);
        if (op->clone)
            sum += dnri_op_bytes(p, op) + dnri_op_flops(p, op) / 150;
    }
    return sum;
}

typedef struct {
    double flops, bytes;
    int launches;
} totals;

static totals sum_up(const dnri_plan *p)
{
    totals t = {0};
    for (int i = p->end[DNRI_PART_PREPARE]; i < p->n; i++) { /* of each pass */
        const dnri_op *op = dnri_graph_op_c(p->g, i);
        t.flops += dnri_op_flops(p, op);
        t.bytes += dnri_op_bytes(p, op);
        t.launches += p->steps[i].launches;
    }
    return t;
}

static const dnri_plan *sort_plan; /* qsort has no context argument in C11 */

static int by_offset(const void *a, const void *b)
{
    const dnri_span *x = &sort_plan->spans[*(const int *)a],
                    *y = &sort_plan->spans[*(const int *)b];
    return x->offset < y->offset ? -1 : x->offset > y->offset;
}

static void explain_memory(const dnri_plan *p, FILE *out)
{
    size_t bytes;
    int at = fullest_op(p, &bytes);
    const dnri_op *op = dnri_graph_op_c(p->g, at);
    fprintf(out,
            "\narena %.1f MiB (%.1f without workspaces); fullest at #%d %s %s: %.1f MiB alive\n",
            (double)p->arena / 0x1p20, (double)p->activations / 0x1p20, at, op->def->name, op->name,
            (double)bytes / 0x1p20);
    int *order = malloc((size_t)(p->n_tensors + p->n + 1) * sizeof *order), n = 0;
    if (!order)
        return;
    for (int k = 0; k < p->n_tensors + p->n; k++)
        if (p->spans[k].size && p->spans[k].first <= at && at <= p->spans[k].last &&
            !dnri_taken_over(p, k, at))
            order[n++] = k;
    sort_plan = p;
    qsort(order, (size_t)n, sizeof *order, by_offset);
    fprintf(out, "%12s %12s  %-11s tensor\n", "from KiB", "size KiB", "alive");
    for (int k = 0; k < n; k++) {
        const dnri_span *s = &p->spans[order[k]];
        fprintf(out, "%12.1f %12.1f  #%-4d…%-4d %s\n", (double)s->offset / 1024,
                (double)s->size / 1024, s->first, s->last, span_name(p, order[k]));
    }
    free(order);
}

/* ---- buckets: what `last` sums over ranks, and from which op on it may travel */

typedef struct buckets {
    dnri_bucket *at;
    int *after; /* the op behind which it is complete */
    int n;
} buckets;

static bool find_buckets(const dnri_plan *p, buckets *b)
{
    *b = (buckets){0};
    if (strcmp(p->name, "last") != 0 ||
        dnri_graph_buckets(p->g, p->bucket_bytes, &b->at, &b->n) != DNR_OK)
        return false;
    b->after = malloc((size_t)(b->n + 1) * sizeof *b->after);
    if (b->after)
        dnri_bucket_places(p->g, b->at, b->n, b->after);
    return b->after != NULL;
}

static void free_buckets(buckets *b)
{
    free(b->at);
    free(b->after);
}

static double bucket_bytes(const dnri_plan *p, const dnri_bucket *b)
{
    return (double)b->count * (double)dnri_dtype_size(dnri_graph_numerics(p->g)->master);
}

/* Share of backward's work that is left behind op i: of its time where measured, else of its arithmetic. */
static double backward_left(const dnri_plan *p, int i)
{
    double all = 0, left = 0;
    for (int k = 0; k < p->n; k++) {
        const dnri_op *op = dnri_graph_op_c(p->g, k);
        if (op->phase != DNRI_BACKWARD || dnri_comm_owns(op))
            continue;
        double work = p->us ? p->us[k] : dnri_op_flops(p, op);
        all += work;
        left += k > i ? work : 0;
    }
    return all > 0 ? left / all : 0;
}

static void explain_buckets(const dnri_plan *p, FILE *out)
{
    buckets b;
    if (find_buckets(p, &b)) {
        fprintf(out,
                "\ngradient buckets, which several ranks sum while backward goes on "
                "(dist.bucket_mb)\n%6s %9s  %-44s %s\n",
                "bucket", "MiB", "complete after", "backward left");
        for (int i = 0; i < b.n; i++) {
            const dnri_op *op = b.after[i] < 0 ? NULL : dnri_graph_op_c(p->g, b.after[i]);
            char name[DNRI_NAME + 64] = "nothing";
            if (op)
                snprintf(name, sizeof name, "#%d %s %s", b.after[i], op->def->name, op->name);
            fprintf(out, "%6d %9.2f  %-44s %5.1f %%\n", i, bucket_bytes(p, &b.at[i]) / 0x1p20, name,
                    100 * backward_left(p, b.after[i]));
        }
    }
    free_buckets(&b);
}

static json_t *json_buckets(const dnri_plan *p)
{
    buckets b;
    json_t *list = json_array();
    const dnri_params *params = dnri_graph_params(p->g);
    if (find_buckets(p, &b))
        for (int i = 0; i < b.n; i++)
            json_array_append_new(
                list,
                json_pack(
                    "{s:i, s:I, s:s, s:s, s:i, s:f}", "bucket", i, "bytes",
                    (json_int_t)bucket_bytes(p, &b.at[i]), "first",
                    dnri_params_at(params, dnri_params_slab_order(params, b.at[i].first))->name,
                    "last",
                    dnri_params_at(params, dnri_params_slab_order(params, b.at[i].last))->name,
                    "after", b.after[i], "backward_left", backward_left(p, b.after[i])));
    free_buckets(&b);
    return list;
}

static double rate(double amount, double us)
{
    return us > 0 ? amount / (us * 1e-6) : 0;
}

/* Microseconds that the op takes at least at the rates that were measured; do bytes say so, or operations? */
static double floor_us(const dnri_plan *p, const dnri_op *op, bool *by_bytes)
{
    const double bytes = p->copy_rate > 0 ? dnri_op_bytes(p, op) / p->copy_rate * 1e6 : 0;
    const double flops = p->flop_rate > 0 ? dnri_op_flops(p, op) / p->flop_rate * 1e6 : 0;
    *by_bytes = bytes >= flops;
    return bytes >= flops ? bytes : flops;
}

static double percent(double part, double whole)
{
    return whole > 0 ? 100 * part / whole : 0;
}

/* The measured times summed over the ops of each kind. */
static void explain_times(const dnri_plan *p, FILE *out)
{
    const int first_op = p->end[DNRI_PART_PREPARE]; /* of each pass */
    double all = 0;
    for (int i = first_op; i < p->n; i++)
        all += p->us[i];
    fprintf(out,
            "\nmeasured, each launch alone and repeated: %.3f ms in all\n"
            "floor: bytes at %.0f GB/s (read and written; a copy, or the best launch of 256 MiB or "
            "more), or operations at %.2f TFLOP/s (the best launch)\n",
            all / 1e3, p->copy_rate / 1e9, p->flop_rate / 1e12);
    fprintf(out, "%-18s %6s %9s %7s %8s %8s %9s %9s\n", "kind", "ops", "ms", "share", "GB/s",
            "TFLOP/s", "floor ms", "of time");
    for (int i = first_op; i < p->n; i++) {
        const dnri_op_def *def = dnri_graph_op_c(p->g, i)->def;
        double us = 0, bytes = 0, flops = 0, least = 0;
        bool by_bytes;
        int ops = 0, first = first_op;
        while (dnri_graph_op_c(p->g, first)->def != def)
            first++;
        for (int k = i; first == i && k < p->n; k++) {
            const dnri_op *op = dnri_graph_op_c(p->g, k);
            if (op->def != def)
                continue;
            ops++;
            us += p->us[k];
            bytes += dnri_op_bytes(p, op);
            flops += dnri_op_flops(p, op);
            least += floor_us(p, op, &by_bytes);
        }
        if (ops)
            fprintf(out, "%-18s %6d %9.3f %6.1f%% %8.0f %8.2f %9.3f %8.1f%%\n", def->name, ops,
                    us / 1e3, percent(us, all), rate(bytes / 1e9, us), rate(flops / 1e12, us),
                    least / 1e3, percent(least, us));
    }
}

void dnri_plan_explain(const dnri_plan *p, FILE *out)
{
    totals t = sum_up(p);
    char shape[64];
    fprintf(
        out,
        "program %s on %s: %d ops, %d launches, %.2f GFLOP, %.2f GB through memory, hash %016llx\n",
        p->name, p->dev->name, p->n, t.launches, t.flops / 1e9, t.bytes / 1e9,
        (unsigned long long)dnri_plan_hash(p));
    if (p->end[DNRI_PART_PREPARE])
        fprintf(out, "of these, the first %d ops run once for new weights, not in each pass\n",
                p->end[DNRI_PART_PREPARE]);
    fprintf(out, "%5s %-15s %-28s %-26s %9s %9s %9s", "#", "op", "layer", "shape", "GFLOP", "MB",
            "work MB");
    if (p->us)
        fprintf(out, " %9s %7s %8s %9s %7s", "us", "GB/s", "TFLOP/s", "floor us", "of time");
    fprintf(out, "  implementation\n");
    for (int i = 0; i < p->n; i++) {
        const dnri_op *op = dnri_graph_op_c(p->g, i);
        const dnri_step *s = &p->steps[i];
        fprintf(out, "%5d %-15s %-28s %-26s %9.3f %9.2f %9.2f", i, op->def->name, op->name,
                op_shape(p, op, shape), dnri_op_flops(p, op) / 1e9, dnri_op_bytes(p, op) / 1e6,
                (double)s->workspace / 1e6);
        if (p->us)
            fprintf(out, " %9.1f %7.0f %8.2f", p->us[i], rate(dnri_op_bytes(p, op) / 1e9, p->us[i]),
                    rate(dnri_op_flops(p, op) / 1e12, p->us[i]));
        if (p->us) {
            bool by_bytes;
            const double least = floor_us(p, op, &by_bytes);
            fprintf(out, " %8.1f%c %6.1f%%", least, by_bytes ? 'b' : 'f', percent(least, p->us[i]));
        }
        fprintf(out, "  %s%s%s%s\n", s->impl, op->clone ? " (recomputed)" : "",
                s->lane == DNRI_COMPUTE ? "" : ", lane ",
                s->lane == DNRI_COMPUTE ? "" : lane_names[s->lane]);
    }
    if (p->us)
        explain_times(p, out);
    explain_memory(p, out);
    if (dnri_graph_training(p->g))
        explain_buckets(p, out);
    fprintf(out, "\n");
}

static json_t *json_ops(const dnri_plan *p)
{
    json_t *list = json_array();
    char shape[64];
    for (int i = 0; i < p->n; i++) {
        const dnri_op *op = dnri_graph_op_c(p->g, i);
        const dnri_step *s = &p->steps[i];
        json_t *item = json_pack("{s:s, s:s, s:s, s:s, s:s, s:s, s:i, s:b, s:f, s:f, s:I}", "op",
                                 op->def->name, "layer", op->name, "phase", phase_names[op->phase],
                                 "shape", op_shape(p, op, shape), "implementation", s->impl, "lane",
                                 lane_names[s->lane], "launches", s->launches, "recomputed",
                                 op->clone, "flops", dnri_op_flops(p, op), "bytes",
                                 dnri_op_bytes(p, op), "workspace", (json_int_t)s->workspace);
        if (item && p->us) {
            bool by_bytes;
            const double least = floor_us(p, op, &by_bytes);
            json_object_set_new(item, "us", json_real(p->us[i]));
            json_object_set_new(item, "floor_us", json_real(least));
            json_object_set_new(item, "bound", json_string(by_bytes ? "bytes" : "flops"));
        }
        json_array_append_new(list, item);
    }
    return list;
}

static json_t *json_memory(const dnri_plan *p)
{
    json_t *list = json_array();
    for (int k = 0; k < p->n_tensors + p->n; k++) {
        const dnri_span *s = &p->spans[k];
        if (s->size)
            json_array_append_new(
                list,
                json_pack("{s:s, s:I, s:I, s:i, s:i, s:s*}", "tensor", span_name(p, k), "offset",
                          (json_int_t)s->offset, "size", (json_int_t)s->size, "first", s->first,
                          "last", s->last, "in_place_of",
                          k < p->n_tensors && p->takes[k] >= 0 ? span_name(p, p->takes[k]) : NULL));
    }
    return list;
}

json_t *dnri_plan_json(const dnri_plan *p)
{
    totals t = sum_up(p);
    char hash[32];
    snprintf(hash, sizeof hash, "%016llx", (unsigned long long)dnri_plan_hash(p));
    json_t *j = json_pack("{s:s, s:s, s:s, s:i, s:f, s:f, s:I, s:I, s:o, s:o, s:o}", "program",
                          p->name, "device", p->dev->name, "hash", hash, "launches", t.launches,
                          "flops", t.flops, "bytes", t.bytes, "arena", (json_int_t)p->arena,
                          "activations", (json_int_t)p->activations, "ops", json_ops(p), "memory",
                          json_memory(p), "buckets", json_buckets(p));
    if (j && p->us) {
        json_object_set_new(j, "bytes_per_second", json_real(p->copy_rate));
        json_object_set_new(j, "flops_per_second", json_real(p->flop_rate));
    }
    return j;
}
