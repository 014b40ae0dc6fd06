/* A layer's experts: sort pairs (token, expert) by expert, then make the two products of each expert that has pairs,
   with weights in panels (linear_rows.h, quantised.h), then add up each token's pairs.

       pair      token * top_k + j: token's j-th expert.  Pairs of experts on other ranks are left out
       place     of a pair: its row in x_rows, inner and outputs.  An expert's pairs have neighbouring places

   A place's result depends on its token alone, and a token's sum goes in the order of j, so a row's result is the same,
   bit by bit, in each batch and with any number of threads. */

#include "quantised_rows.h"
#include "tape.h"

/* Mirrored in layout.py. */
typedef struct {
    const float *gate_up, *down;                  /* panels, expert after expert */
    const char *gate_up_bias, *down_bias;         /* (num_experts, parts * inner), (num_experts, hidden), or NULL */
    int64_t first, num_experts, hidden, inner, top_k;
    int64_t kind, dtype; /* of the activation (gated.h); of everything but the weights of the sum */
    float alpha, limit;
    const Quantised *quantised_gate_up, *quantised_down; /* NULL: panels of `dtype` */
    const float *gate_up_factors, *down_factors;         /* (num_experts, panels, PANEL), or NULL */
    int64_t
        num_shards; /* of `inner`: the sums of each are kept apart, in float32, and added as a tree in the end; or 0 */
    int64_t keeps_sums; /* out is float32, whatever the type */
} Experts;

/* Memory for one call; `inner` as the first product stores it, `inner_rows` as the second one reads it. */
typedef struct {
    int32_t *starts;  /* (num_experts + 1): the first place of each expert */
    int32_t *places;  /* (pairs): -1 if the expert is on another rank */
    int32_t *tokens;  /* (pairs), by place */
    int64_t *tasks;   /* (num_experts + 1): the tasks of the experts before */
    char *x_rows, *inner, *inner_rows, *outputs;
    int64_t x_stride, inner_stride; /* bytes of x_rows, inner_rows */
} Work;

/* Whether a product reads rows in another form than `dtype`'s. */
static int converts(const Quantised *q, int dtype) { return q || is_widened(dtype); }

static int64_t row_bytes(const Quantised *q, int64_t size, int dtype)
{
    if (q)
        return prepared_bytes(q, dtype);
    return is_widened(dtype) ? (size + VW - 1) / VW * VW * (int64_t)sizeof(float) : size * item_bytes(dtype);
}

static char *take(char **next, int64_t bytes)
{
    char *taken = *next;
    *next += (bytes + CACHE_LINE - 1) / CACHE_LINE * CACHE_LINE;
    return taken;
}

/* Divides `memory`; returns the bytes that it needs. */
static int64_t lay_out(Work *w, const Experts *e, int64_t pairs, char *memory)
{
    const int dtype = (int)e->dtype;
    char *next = memory;
    w->starts = (int32_t *)take(&next, (e->num_experts + 1) * 4);
    w->places = (int32_t *)take(&next, pairs * 4);
    w->tokens = (int32_t *)take(&next, pairs * 4);
    w->tasks = (int64_t *)take(&next, (e->num_experts + 1) * 8);
    w->x_stride = row_bytes(e->quantised_gate_up, e->hidden, dtype);
    w->inner_stride = row_bytes(e->quantised_down, e->inner, dtype);
    w->x_rows = take(&next, pairs * w->x_stride);
    w->inner = take(&next, pairs * e->inner * item_bytes(dtype));
    w->inner_rows = converts(e->quantised_down, dtype) ? take(&next, pairs * w->inner_stride) : w->inner;
    w->outputs = take(&next, pairs * e->hidden * (e->num_shards ? 4 * e->num_shards : item_bytes(dtype)));
    return next - memory;
}

int64_t experts_work_bytes(const Experts *e, int64_t rows)
{
    Work w;
    return lay_out(&w, e, rows * e->top_k, (char *)0);
}

/* Places by a counting sort, which keeps the order of pairs. */
static void sort_pairs(const Work *w, const Experts *e, const int32_t *ids, int64_t pairs)
{
    memset(w->starts, 0, (e->num_experts + 1) * sizeof(int32_t));
    for (int64_t pair = 0; pair < pairs; pair++) {
        const int64_t expert = ids[pair] - e->first;
        if (expert >= 0 && expert < e->num_experts)
            w->starts[expert + 1]++;
    }
    for (int64_t expert = 0; expert < e->num_experts; expert++)
        w->starts[expert + 1] += w->starts[expert];
    for (int64_t pair = 0; pair < pairs; pair++) {
        const int64_t expert = ids[pair] - e->first;
        const int is_here = expert >= 0 && expert < e->num_experts;
        w->places[pair] = is_here ? w->starts[expert]++ : -1;
        if (is_here)
            w->tokens[w->places[pair]] = (int32_t)(pair / e->top_k);
    }
    for (int64_t expert = e->num_experts; expert > 0; expert--)
        w->starts[expert] = w->starts[expert - 1];
    w->starts[0] = 0;
}

static int64_t groups_of(const Work *w, int64_t expert)
{
    return (w->starts[expert + 1] - w->starts[expert] + GROUP - 1) / GROUP;
}

/* Counts the tasks of all experts: `panels` for each group of rows. */
static int64_t count_tasks(const Work *w, const Experts *e, int64_t panels)
{
    w->tasks[0] = 0;
    for (int64_t expert = 0; expert < e->num_experts; expert++)
        w->tasks[expert + 1] = w->tasks[expert] + groups_of(w, expert) * panels;
    return w->tasks[e->num_experts];
}

/* The expert whose tasks include `task`. */
static int64_t expert_of(const Work *w, const Experts *e, int64_t task)
{
    int64_t low = 0, high = e->num_experts;
    while (high - low > 1) {
        const int64_t middle = (low + high) / 2;
        if (w->tasks[middle] <= task)
            low = middle;
        else
            high = middle;
    }
    return low;
}

/* Runs a task of one of the two products: `all` describes the product, with the first expert's row, weight, bias and
   output; `q` its quantised weight, or NULL. */
static void run_expert_task(const Linear *all, const Quantised *q, const Work *w, const Experts *e, int64_t task,
                            int64_t panels, int64_t kind)
{
    const int64_t expert = expert_of(w, e, task), first = w->starts[expert], parts = parts_of((int)kind);
    const int64_t bytes = item_bytes((int)e->dtype);
    Linear p = *all;
    p.rows = w->starts[expert + 1] - first;
    p.x += first * p.x_stride;
    p.out += first * p.part_size * (p.stores_float32 ? 4 : bytes);
    p.bias = p.bias ? p.bias + expert * parts * p.part_size * bytes : NULL;
    p.factors = p.factors ? p.factors + expert * panels * PANEL : NULL;
    p.weight += expert * panels * (q ? panel_bytes(q) / (int64_t)sizeof(float) : p.items * PANEL);
    if (q)
        run_quantised_task(&p, q, task - w->tasks[expert], groups_of(w, expert), e->dtype, kind);
    else
        run_task(&p, task - w->tasks[expert], groups_of(w, expert), e->dtype, kind);
}

/* A row in the form that a product reads. */
static void convert(const Quantised *q, char *to, const char *from, int64_t size, int dtype)
{
    if (q)
        prepare_row(q, to, from, dtype);
    else if (is_widened(dtype))
        widen_row((float *)to, from, size, dtype);
    else
        memcpy(to, from, size * item_bytes(dtype));
}

/* A token's sum over its pairs, in their order. */
INLINE void sum_row(const Work *w, const Experts *e, const float *weights, char *out, int64_t token, const int dtype)
{
    for (int64_t i = 0; i < e->hidden; i += VW) {
        vf sum = splat(0);
        for (int64_t j = 0; j < e->top_k; j++) {
            const int64_t pair = token * e->top_k + j, place = w->places[pair];
            if (place >= 0)
                sum +=
                    load_some(w->outputs + place * e->hidden * item_bytes(dtype), i, e->hidden, dtype) * weights[pair];
        }
        store_some(out + token * e->hidden * item_bytes(dtype), i, e->hidden, sum, dtype);
    }
}

/* The same for each shard, then the tree over the shards: the sums of other ranks' shards are its upper part. */
INLINE void sum_shards(const Work *w, const Experts *e, const float *weights, char *out, int64_t token,
                       int64_t shard_bytes, const int dtype)
{
    for (int64_t i = 0; i < e->hidden; i += VW) {
        vf sums[PLACES];
        for (int64_t shard = 0; shard < e->num_shards; shard++) {
            vf sum = splat(0);
            for (int64_t j = 0; j < e->top_k; j++) {
                const int64_t pair = token * e->top_k + j, place = w->places[pair];
                const char *from = w->outputs + shard * shard_bytes + place * e->hidden * 4;
                if (place >= 0)
                    sum += load_some(from, i, e->hidden, FLOAT32) * weights[pair];
            }
            int64_t own = __builtin_popcountll(shard);
            for (int64_t left = shard; left & 1; left >>= 1)
                sum = sums[--own] + sum;
            sums[own] = sum;
        }
        store_some(out + token * e->hidden * item_bytes(dtype), i, e->hidden, sums[0], dtype);
    }
}

/* out (rows, hidden) = the sum over j of weights (rows, top_k) times the output of expert ids (rows, top_k) for x
   (rows, hidden).  `memory` has experts_work_bytes bytes. */
TAPED int mix_experts(const Experts *e, const char *x, const int32_t *ids, const float *weights, char *out,
                      char *memory, int64_t rows, int64_t num_threads)
{
    const int dtype = (int)e->dtype;
    const int64_t pairs = rows * e->top_k, gate_panels = count_panels(e->inner, parts_of((int)e->kind)),
                  down_panels = count_panels(e->hidden, 1);
    const int64_t item_size = 4 / item_bytes(dtype), x_bytes = e->hidden * item_bytes(dtype);
    const int64_t inner_bytes = e->inner * item_bytes(dtype);
    Work w;
    lay_out(&w, e, pairs, memory);
    sort_pairs(&w, e, ids, pairs);
    const int64_t here = w.starts[e->num_experts];
    const Linear gate_up = {w.x_rows, e->gate_up_bias, w.inner, e->gate_up, w.x_stride, 0, e->hidden / item_size,
                            e->inner, e->alpha, e->limit, e->gate_up_factors};
    const Linear down = {w.inner_rows, e->down_bias, w.outputs, e->down, w.inner_stride, 0, e->inner / item_size,
                         e->hidden, 0, 0, e->down_factors, e->num_shards, e->num_shards ? here * e->hidden * 4 : 0,
                         e->num_shards > 0};
    const int is_parallel = num_threads > 1 && here * e->inner * e->hidden >= MIN_PARALLEL_PRODUCTS;
    int64_t num_tasks = count_tasks(&w, e, gate_panels);
#pragma omp parallel num_threads((int)num_threads) if (is_parallel)
    {
#pragma omp for schedule(static)
        for (int64_t place = 0; place < here; place++)
            convert(e->quantised_gate_up, w.x_rows + place * w.x_stride, x + w.tokens[place] * x_bytes, e->hidden,
                    dtype);
#pragma omp for schedule(guided)
        for (int64_t task = 0; task < num_tasks; task++)
            run_expert_task(&gate_up, e->quantised_gate_up, &w, e, task, gate_panels, e->kind);
        if (converts(e->quantised_down, dtype)) {
#pragma omp for schedule(static)
            for (int64_t place = 0; place < here; place++)
                convert(e->quantised_down, w.inner_rows + place * w.inner_stride, w.inner + place * inner_bytes,
                        e->inner, dtype);
        }
#pragma omp single
        num_tasks = count_tasks(&w, e, down_panels);
#pragma omp for schedule(guided)
        for (int64_t task = 0; task < num_tasks; task++)
            run_expert_task(&down, e->quantised_down, &w, e, task, down_panels, NO_GATE);
#pragma omp for schedule(static)
        for (int64_t token = 0; token < rows; token++) {
            if (e->keeps_sums)
                sum_shards(&w, e, weights, out, token, down.shard_bytes, FLOAT32);
            else if (e->num_shards)
                FOR_DTYPE(sum_shards(&w, e, weights, out, token, down.shard_bytes, TYPE))
            else
                FOR_DTYPE(sum_row(&w, e, weights, out, token, TYPE))
        }
    }
    return 0;
}

/* total (rows, width) += sigmoid(gates[row]) * x (rows, width); gates are `stride` elements apart. */
TAPED int add_gated(char *total, const char *x, const char *gates, int64_t stride, int64_t rows, int64_t width,
                    int64_t dtype, int64_t num_threads)
{
    const int64_t bytes = item_bytes((int)dtype);
#pragma omp parallel for schedule(static) num_threads((int)num_threads) if (rows * width >= MIN_PARALLEL_PRODUCTS)
    for (int64_t row = 0; row < rows; row++) {
        float gate[VW];
        FOR_DTYPE(store_vector(gate, load_some(gates + row * stride * bytes, 0, 1, TYPE)))
        const vf factor = splat(1.0f / (1.0f + expf(-gate[0])));
        char *to = total + row * width * bytes;
        const char *from = x + row * width * bytes;
        for (int64_t i = 0; i < width; i += VW)
            FOR_DTYPE(store_some(to, i, width, load_some(to, i, width, TYPE) + load_some(from, i, width, TYPE) * factor,
                                 TYPE))
    }
    return 0;
}
