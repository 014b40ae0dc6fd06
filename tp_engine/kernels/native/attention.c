/* Paged attention of one layer: attention_types.h has the picture. */

#include "attention_plan.h"
#include "attention_task.h"
#include "tape.h"

static void store_token(const Call *call, int64_t token)
{
    const Layer *layer = call->layer;
    const int64_t slot = call->step->slots[token], width = call->row_width;
    if (slot < 0)
        return;
    const int64_t from = item_bytes((int)layer->dtype), to = slot * width * item_bytes((int)layer->cache_dtype);
    const char *key = call->key + token * call->key_stride * from, *value = call->value + token * call->value_stride * from;
    convert_row(layer->key_cache + to, (int)layer->cache_dtype, key, (int)layer->dtype, width);
    convert_row(layer->value_cache + to, (int)layer->cache_dtype, value, (int)layer->dtype, width);
}

/* Add up the ranges of each row, in their order, each scaled to the largest maximum. */
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
            write_row(call, task, head, row, out, sum);
        }
}

static int64_t log2_of(int64_t power)
{
    int64_t shift = 0;
    while ((int64_t)1 << shift < power)
        shift++;
    return shift;
}

/* The task that this thread is likely to take next. */
static const Task *following(const Step *step, const Task *tasks, int64_t i, int64_t num_tasks)
{
    return i + step->num_threads < num_tasks ? &tasks[i + step->num_threads] : NULL;
}

/* `key` and `value` may be NULL: they are stored already.  Returns 0, or 1 where memory ran out. */
int paged_attention(const Step *step, const Layer *layer, const void *query, const void *key, const void *value, void *out,
                    int64_t query_stride, int64_t key_stride, int64_t value_stride)
{
    Call call = {
        .step = step, .layer = layer, .query = query, .key = key, .value = value, .out = out,
        .query_stride = query_stride, .key_stride = key_stride, .value_stride = value_stride,
        .group = layer->num_heads / layer->num_kv_heads,
        .padded_dim = (layer->head_dim + VW - 1) / VW * VW,
        .row_width = layer->num_kv_heads * layer->head_dim,
        .block_shift = log2_of(layer->block_size),
        .by_pairs = MULTIPLIES_BFLOAT16 && layer->dtype == BFLOAT16 && layer->cache_dtype == BFLOAT16 &&
                    layer->head_dim % (2 * VW) == 0,
    };
    Plan *plan = &kept_plan;
    if (!make_plan(&call, plan))
        return 1;
    call.first_part = plan->first_part;
    const Task *tasks = plan->tasks;
    const Merge *merges = plan->merges;
    float *partial = plan->partial;
    const int64_t num_shared = plan->num_shared, num_tasks = plan->num_tasks, num_merges = plan->num_merges;
    const int64_t num_tokens = key ? step->num_tokens : 0;
    const int is_small = plan->work + num_tokens * call.row_width < MIN_PARALLEL_WORK;
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
                run_task(&call, &tasks[i], following(step, tasks, i, num_shared), partial);
        }
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = num_shared; i < num_tasks; i++)
            run_task(&call, &tasks[i], following(step, tasks, i, num_tasks), partial);
        if (num_merges) {
#pragma omp for schedule(static)
            for (int64_t i = 0; i < num_merges; i++)
                run_merge(&call, &merges[i], partial);
        }
    }
    return 0;
}

int play_paged_attention(const Word *a)
{
    return paged_attention(a[0].pointer, a[1].pointer, a[2].pointer, a[3].pointer, a[4].pointer, a[5].pointer, a[6].integer,
                           a[7].integer, a[8].integer);
}
