/* A layer's attention cut into tasks. */
#pragma once

#include "attention_sharing.h"

/* For each thread, at least: fewer would leave threads idle at the end. */
enum { CHAINS = 8 };

/* The number of ranges of SPLIT keys from key `first` to `end`. */
INLINE int64_t count_ranges(int64_t first, int64_t end) { return (end - 1) / SPLIT - first / SPLIT + 1; }

/* Whether a request has CHAINS sets of rows for each thread, so that a thread may run all ranges of its rows, and merge
   them while they lie in its caches. */
static int has_chains(const Call *call, int64_t request)
{
    const int64_t num_sets = call->step->query_lens[request] * call->group / MAX_ROWS * call->layer->num_kv_heads;
    return num_sets >= CHAINS * call->step->num_threads;
}

/* Plans the tasks of `rows`, one per range that has keys that are not shared, and the merge of the ranges. */
static int plan_ranges(const Call *call, Partition *partition, Task rows)
{
    const int64_t first = first_visible(call, position_of(call, &rows, rows.first_row));
    const int64_t end = position_of(call, &rows, rows.end_row - 1) + 1, shared = partition->shared_keys[rows.request];
    const int64_t num_rows = (int64_t)(rows.end_head - rows.first_head) * (rows.end_row - rows.first_row);
    const int64_t num_ranges = count_ranges(first, end);
    const int64_t stride = shared ? call->layer->num_kv_heads * call->group : num_rows;
    const int is_chained = !shared && has_chains(call, rows.request);
    int64_t part =
        shared ? partition->first_part[rows.request] + rows.first_head * call->group : partition->num_partial;
    if (is_chained) {
        part = 0;
        partition->chain_size = larger(partition->chain_size, num_ranges * num_rows);
    }
    rows.num_chained = is_chained ? (int32_t)num_ranges : 1;
    if (!grow((void **)&partition->tasks, &partition->task_room, partition->num_tasks + num_ranges, sizeof(Task)))
        return 0;
    if (num_ranges > 1 && !is_chained) {
        if (!grow((void **)&partition->merges, &partition->merge_room, partition->num_merges + 1, sizeof(Merge)))
            return 0;
        rows.part = part;
        partition->merges[partition->num_merges++] = (Merge){rows, num_ranges, stride};
        partition->num_partial += shared ? 0 : num_ranges * num_rows;
    }
    for (int64_t range = first / SPLIT; range < first / SPLIT + num_ranges; range++, part += stride) {
        const int64_t begin = larger(first, range * SPLIT);
        rows.first_key = (int32_t)larger(begin, shared);
        rows.end_key = (int32_t)smaller(end, (range + 1) * SPLIT);
        if (rows.end_key <= shared)
            continue;
        rows.part = num_ranges > 1 ? part : -1;
        rows.resumed = begin < shared ? part : -1;
        partition->tasks[partition->num_tasks++] = rows;
        rows.num_chained = !is_chained;
        partition->work += num_rows * (rows.end_key - rows.first_key) * call->padded_dim;
    }
    return 1;
}

/* The number of KV heads of a task.  A task of all heads reads the cache in one stream.  Few requests are faster split
   by heads; the heads of a single decode are split among the threads. */
static int64_t heads_per_task(const Call *call)
{
    const Step *step = call->step;
    const int64_t num_kv_heads = call->layer->num_kv_heads;
    if (step->num_requests >= 4 * step->num_threads)
        return num_kv_heads;
    if (step->num_requests == 1 && step->num_tokens == 1)
        return (num_kv_heads + step->num_threads - 1) / step->num_threads;
    return 1;
}

/* The most rows of a task.  A single decode of latent attention, whose heads are all rows, is split among the threads
   that its ranges leave idle. */
static int64_t rows_per_task(const Call *call, int64_t num_rows)
{
    const Step *step = call->step;
    if (!call->layer->values_in_keys || step->num_requests != 1 || step->num_tokens != 1)
        return smaller(num_rows, MAX_ROWS);
    const int64_t num_parts = larger(1, step->num_threads / count_ranges(0, step->seq_lens[0]));
    return smaller(larger(SCORE_ROWS, (num_rows + num_parts - 1) / num_parts), MAX_ROWS);
}

/* Plans the tasks of a request. */
static int plan_request(const Call *call, Partition *partition, int64_t request, int64_t heads_wanted)
{
    const int64_t num_kv_heads = call->layer->num_kv_heads, num_rows = call->step->query_lens[request] * call->group;
    if (!num_rows || !call->step->seq_lens[request])
        return 1;
    const int64_t tile_rows = rows_per_task(call, num_rows), num_heads = smaller(heads_wanted, MAX_ROWS / tile_rows);
    for (int64_t row = 0; row < num_rows; row += tile_rows)
        for (int64_t head = 0; head < num_kv_heads; head += num_heads) {
            const Task rows = {
                .request = (int32_t)request,
                .first_head = (int32_t)head,
                .end_head = (int32_t)smaller(head + num_heads, num_kv_heads),
                .first_row = (int32_t)row,
                .end_row = (int32_t)smaller(row + tile_rows, num_rows),
            };
            if (!plan_ranges(call, partition, rows))
                return 0;
        }
    return 1;
}

static int make_partition(const Call *call, Partition *partition)
{
    const Step *step = call->step;
    const int64_t heads_wanted = heads_per_task(call);
    partition->num_tasks = partition->num_merges = partition->num_partial = partition->work = partition->chain_size = 0;
    if (!plan_sharing(call, partition))
        return 0;
    partition->num_shared = partition->num_tasks;
    for (int64_t request = 0; request < step->num_requests; request++)
        if (!plan_request(call, partition, request, heads_wanted))
            return 0;
    const int64_t num_results = partition->num_partial + step->num_threads * partition->chain_size;
    const int64_t num_floats = num_results * (call->padded_dim + 2);
    return grow((void **)&partition->partial, &partition->partial_room, num_floats, sizeof(float));
}
