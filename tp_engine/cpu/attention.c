/* Paged attention of one layer: attention_types.h has the picture. */

#include "attention_partition.h"
#include "attention_task.h"
#include "tape.h"

int omp_get_thread_num(void); /* of OpenMP: clang often has no omp.h */

/* Stores a token's key of one head in its lane of the group at `to`. */
INLINE void store_key(const Call *call, const char *key, char *to, int64_t lane, char *scale)
{
    const Layer *layer = call->layer;
    float items[MAX_HEAD_DIM];
    store_row(items, (int)layer->cache_dtype, scale, key, (int)layer->dtype, layer->head_dim);
    for (int64_t u = 0; u < call->head_bytes / 4; u++)
        memcpy(to + (u * call->lanes + lane) * 4, items + u, 4);
}

/* Stores the keys of VW tokens, of one head, which fill the group at `to`. */
INLINE void store_keys(const Call *call, const char *key, int64_t stride, float *to)
{
    const int64_t items = call->head_bytes / 4;
    for (int64_t u = 0; u < items; u += VW) {
        vf rows[VW];
        for (int i = 0; i < VW; i++)
            rows[i] = load_some(key + i * stride, u, items, FLOAT32);
        transpose(rows);
        for (int i = 0; i < smaller(VW, items - u); i++)
            store_vector(to + (u + i) * VW, rows[i]);
    }
}

/* Whether the tokens from `first` on fill a group of VW keys, as in a prompt. */
INLINE int fills_group(const Call *call, int64_t first)
{
    const Step *step = call->step;
    if (call->lanes < VW || call->layer->dtype != call->layer->cache_dtype || first < 0 ||
        first + VW > step->num_tokens)
        return 0;
    for (int i = 1; i < VW; i++)
        if (step->slots[first + i] != step->slots[first] + i)
            return 0;
    return step->slots[first] % VW == 0;
}

/* Stores a token's keys and values; the first token of a full group stores the keys of the whole group. */
static void store_token(const Call *call, int64_t token)
{
    const Layer *layer = call->layer;
    const int64_t slot = call->step->slots[token], bytes = item_bytes((int)layer->dtype),
                  stride = call->key_stride * bytes;
    if (slot < 0)
        return;
    const int64_t offset = slot & (layer->block_size - 1), lane = offset % call->lanes;
    const int together = fills_group(call, token - lane);
    for (int64_t head = 0; head < layer->num_kv_heads; head++) {
        const int64_t block = slot >> call->block_shift, from = head * layer->head_dim * bytes;
        const int64_t place = block * layer->block_bytes + (head * call->head_bytes << call->block_shift);
        const int64_t scale_place =
            block * layer->scale_bytes + ((head << call->block_shift) + offset) * (int64_t)sizeof(float);
        const char *key = call->key + token * stride + from;
        const char *value = call->value + (token * call->value_stride + head * layer->value_dim) * bytes;
        char *group = layer->key_cache + place + (offset - lane) * call->head_bytes;
        char *row = layer->value_cache + place + offset * call->head_bytes;
        if (layer->values_in_keys) {
            store_row(row, (int)layer->cache_dtype, layer->key_scales + scale_place, key, (int)layer->dtype,
                      layer->head_dim);
            continue;
        }
        if (!together)
            store_key(call, key, group, lane, layer->key_scales + scale_place);
        else if (lane == 0)
            store_keys(call, key, stride, (float *)group);
        store_row(row, (int)layer->cache_dtype, layer->value_scales + scale_place, value, (int)layer->dtype,
                  layer->value_dim);
    }
}

/* Adds up the ranges of each row, in their order, each scaled to the largest maximum. */
static void run_merge(const Call *call, const Merge *merge, float *partial)
{
    const Task *task = &merge->rows;
    const int64_t width = call->padded_dim, stride = merge->stride * (width + 2);
    for (int64_t head = task->first_head; head < task->end_head; head++)
        for (int64_t row = task->first_row; row < task->end_row; row++) {
            float *first = partial + part_of(call, task, task->part, head, row) * (width + 2);
            float out[MAX_HEAD_DIM] = {0}, max = -INFINITY, sum = 0;
            for (int64_t range = 0; range < merge->num_ranges; range++)
                max = max > first[range * stride + width] ? max : first[range * stride + width];
            for (int64_t range = 0; range < merge->num_ranges; range++) {
                const float *from = first + range * stride, factor = exp2_vector(splat(from[width] - max))[0];
                sum += from[width + 1] * factor;
                for (int64_t i = 0; i < width; i += VW)
                    store_vector(out + i, load_vector(out + i) + load_vector(from + i) * factor);
            }
            write_row(call, task, head, row, out, max, sum);
        }
}

/* The task that this thread is likely to take next. */
static const Task *following(const Step *step, const Task *tasks, int64_t i, int64_t num_tasks)
{
    return i + step->num_threads < num_tasks ? &tasks[i + step->num_threads] : NULL;
}

/* Runs the chain of tasks that begins at task `i`, whose partial results are from `chained` on. */
static void run_chain(const Call *call, const Task *tasks, int64_t i, int64_t num_tasks, float *partial, float *chained)
{
    const int64_t size = tasks[i].num_chained;
    if (size == 1) {
        run_tasks(call, &tasks[i], 1, following(call->step, tasks, i, num_tasks), partial);
        return;
    }
    run_tasks(call, &tasks[i], size, NULL, chained);
    const int64_t num_rows =
        (int64_t)(tasks[i].end_head - tasks[i].first_head) * (tasks[i].end_row - tasks[i].first_row);
    const Merge merge = {tasks[i], size, num_rows};
    run_merge(call, &merge, chained);
}

static int64_t log2_of(int64_t power)
{
    int64_t shift = 0;
    while ((int64_t)1 << shift < power)
        shift++;
    return shift;
}

/* The number of keys that lie side by side as columns, in blocks of at least that size. */
int attention_lanes(void) { return VW; }

/* `key` and `value` may be NULL: they are stored already.  `chosen` (requests, chosen_stride) and `counts` (requests,)
   may be NULL; with them the cache has rows, and each request one query, which attends to the keys at these positions
   alone. Returns 0, or 1 where memory ran out. */
TAPED int paged_attention(const Step *step, const Layer *layer, const void *query, const void *key, const void *value,
                          void *out, int64_t query_stride, int64_t key_stride, int64_t value_stride,
                          const int32_t *chosen, int64_t chosen_stride, const int32_t *counts)
{
    Step of_chosen = *step;
    of_chosen.seq_lens = chosen ? counts : step->seq_lens;
    step = &of_chosen;
    Call call = {
        .step = step, .layer = layer, .query = query, .key = key, .value = value, .out = out,
        .query_stride = query_stride, .key_stride = key_stride, .value_stride = value_stride,
        .group = layer->num_heads / layer->num_kv_heads,
        .padded_dim = (layer->value_dim + VW - 1) / VW * VW,
        .block_shift = log2_of(layer->block_size),
        .lanes = smaller(layer->block_size, VW),
        .head_bytes = layer->head_dim * item_bytes((int)layer->cache_dtype),
        .chosen = chosen, .chosen_stride = chosen_stride,
        .by_pairs = MULTIPLIES_BFLOAT16 && layer->dtype == BFLOAT16 && layer->cache_dtype == BFLOAT16,
    };
    Partition *partition = &kept_partition;
    if (!make_partition(&call, partition))
        return 1;
    call.first_part = partition->first_part;
    const Task *tasks = partition->tasks;
    const Merge *merges = partition->merges;
    float *partial = partition->partial;
    const int64_t num_shared = partition->num_shared, num_tasks = partition->num_tasks,
                  num_merges = partition->num_merges;
    const int64_t num_tokens = key ? step->num_tokens : 0;
    const int64_t width = call.padded_dim + 2, chain_floats = partition->chain_size * width;
    const int is_small = partition->work + num_tokens * layer->num_kv_heads * layer->head_dim < MIN_PARALLEL_WORK;
#pragma omp parallel num_threads((int)step->num_threads) if (!is_small && step->num_threads > 1)
    {
        if (num_tokens) {
#pragma omp for schedule(static)
            for (int64_t token = 0; token < num_tokens; token++)
                store_token(&call, token);
        }
        if (num_shared) {
#pragma omp for schedule(dynamic, 1)
            for (int64_t i = 0; i < num_shared; i++)
                run_tasks(&call, &tasks[i], 1, following(step, tasks, i, num_shared), partial);
        }
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = num_shared; i < num_tasks; i++)
            if (tasks[i].num_chained) {
                float *chained = partial + partition->num_partial * width + omp_get_thread_num() * chain_floats;
                run_chain(&call, tasks, i, num_tasks, partial, chained);
            }
        if (num_merges) {
#pragma omp for schedule(static)
            for (int64_t i = 0; i < num_merges; i++)
                run_merge(&call, &merges[i], partial);
        }
    }
    return 0;
}
