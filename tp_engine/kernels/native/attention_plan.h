/* Which tasks a layer's attention is made of. */
#pragma once

#include <stdlib.h>

#include "attention_types.h"

/* A task's rows whose results lie in `num_ranges` pieces, `stride` rows apart. */
typedef struct {
    Task rows;
    int64_t num_ranges;
} Merge;

typedef struct {
    Task *tasks;
    Merge *merges;
    float *partial; /* per row: padded_dim of output, then maximum and sum */
    int64_t num_tasks, num_merges, num_partial, task_room, merge_room, partial_room;
    int64_t work;
} Plan;

/* Kept from call to call: fresh memory would cost page faults. */
static _Thread_local Plan kept_plan;

static int grow(void **memory, int64_t *room, int64_t needed, int64_t item_size)
{
    if (needed <= *room)
        return 1;
    const int64_t new_room = needed + needed / 2 + 64;
    void *moved = realloc(*memory, new_room * item_size);
    if (!moved)
        return 0;
    *memory = moved;
    *room = new_room;
    return 1;
}

/* The tasks of `rows`, one per range of keys, and the merge they need. */
static int plan_ranges(const Call *call, Plan *plan, Task rows)
{
    const int64_t first = first_visible(call, position_of(call, &rows, rows.first_row));
    const int64_t end = position_of(call, &rows, rows.end_row - 1) + 1;
    const int64_t num_rows = (int64_t)(rows.end_head - rows.first_head) * (rows.end_row - rows.first_row);
    const int64_t num_ranges = (end - 1) / SPLIT - first / SPLIT + 1;
    if (!grow((void **)&plan->tasks, &plan->task_room, plan->num_tasks + num_ranges, sizeof(Task)))
        return 0;
    rows.part = num_ranges > 1 ? plan->num_partial : -1;
    if (num_ranges > 1) {
        if (!grow((void **)&plan->merges, &plan->merge_room, plan->num_merges + 1, sizeof(Merge)))
            return 0;
        plan->merges[plan->num_merges++] = (Merge){rows, num_ranges};
    }
    for (int64_t range = first / SPLIT; range < first / SPLIT + num_ranges; range++) {
        rows.first_key = (int32_t)larger(first, range * SPLIT);
        rows.end_key = (int32_t)smaller(end, (range + 1) * SPLIT);
        plan->tasks[plan->num_tasks++] = rows;
        plan->work += num_rows * (rows.end_key - rows.first_key) * call->padded_dim;
        if (num_ranges > 1) {
            plan->num_partial += num_rows;
            rows.part += num_rows;
        }
    }
    return 1;
}

/* All KV heads in one task read the cache in one stream; a few requests are better split by heads. */
static int make_plan(const Call *call, Plan *plan)
{
    const Step *step = call->step;
    const int64_t num_kv_heads = call->layer->num_kv_heads;
    const int64_t heads_wanted = step->num_requests >= 4 * step->num_threads ? num_kv_heads : 1;
    plan->num_tasks = plan->num_merges = plan->num_partial = plan->work = 0;
    for (int64_t request = 0; request < step->num_requests; request++) {
        const int64_t num_rows = step->query_lens[request] * call->group;
        if (!num_rows || !step->seq_lens[request])
            continue;
        const int64_t tile_rows = smaller(num_rows, MAX_ROWS);
        const int64_t num_heads = smaller(heads_wanted, MAX_ROWS / tile_rows);
        for (int64_t row = 0; row < num_rows; row += tile_rows)
            for (int64_t head = 0; head < num_kv_heads; head += num_heads) {
                const Task rows = {
                    .request = (int32_t)request,
                    .first_head = (int32_t)head,
                    .end_head = (int32_t)smaller(head + num_heads, num_kv_heads),
                    .first_row = (int32_t)row,
                    .end_row = (int32_t)smaller(row + tile_rows, num_rows),
                };
                if (!plan_ranges(call, plan, rows))
                    return 0;
            }
    }
    const int64_t num_floats = plan->num_partial * (call->padded_dim + 2);
    return grow((void **)&plan->partial, &plan->partial_room, num_floats, sizeof(float));
}

