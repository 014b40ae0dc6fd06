/* Decodes whose block tables begin with the same blocks, because the requests have a common prefix: how many keys they
   share, and the tasks that compute these keys for all of them. */
#pragma once

#include <stdlib.h>

#include "attention_types.h"

/* The fewest keys that requests must share to get a shared task. */
enum { MIN_SHARED = 64 };

/* A task's rows whose results lie in `num_ranges` pieces, `stride` rows apart. */
typedef struct {
    Task rows;
    int64_t num_ranges, stride;
} Merge;

typedef struct {
    int32_t first_block, request;
} Candidate;

typedef struct {
    Task *tasks; /* the shared ones first: the others continue from their results */
    Merge *merges;
    float *partial; /* per row: padded_dim of output, then maximum and sum */
    Candidate *candidates;
    int32_t *members, *shared_keys; /* the candidates' requests; per request, the keys that shared tasks compute */
    int64_t *first_part;
    int64_t num_shared, num_tasks, num_merges, num_partial;
    int64_t chain_size; /* partial results of the longest chain */
    int64_t task_room, merge_room, partial_room, candidate_room, member_room, shared_room, part_room;
    int64_t work;
} Partition;

/* Kept from call to call: fresh memory would cost page faults. */
static _Thread_local Partition kept_partition;

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

static const int32_t *blocks_of(const Call *call, int64_t request)
{
    return call->step->block_table + request * call->step->table_stride;
}

static int compare_candidates(const void *a, const void *b)
{
    const Candidate *one = a, *other = b;
    if (one->first_block != other->first_block)
        return one->first_block < other->first_block ? -1 : 1;
    return one->request < other->request ? -1 : 1;
}

/* Finds the decodes that are long enough and sorts them by their first block; returns their number. */
static int64_t find_candidates(const Call *call, Partition *partition)
{
    const Step *step = call->step;
    int64_t count = 0;
    for (int64_t request = 0; request < step->num_requests; request++)
        if (step->query_lens[request] == 1 && step->seq_lens[request] > MIN_SHARED)
            partition->candidates[count++] = (Candidate){*blocks_of(call, request), (int32_t)request};
    qsort(partition->candidates, count, sizeof(Candidate), compare_candidates);
    for (int64_t i = 0; i < count; i++)
        partition->members[i] = partition->candidates[i].request;
    return count;
}

/* The number of first keys that lie in the same blocks, in whole tiles; the last key of a request is not shared. */
static int64_t common_keys(const Call *call, int64_t a, int64_t b)
{
    const int32_t *blocks_a = blocks_of(call, a), *blocks_b = blocks_of(call, b);
    const int64_t most = smaller(call->step->seq_lens[a], call->step->seq_lens[b]) - 1;
    int64_t blocks = 0;
    while ((blocks + 1) << call->block_shift <= most && blocks_a[blocks] == blocks_b[blocks])
        blocks++;
    return (blocks << call->block_shift) / TILE * TILE;
}

/* Returns the number of members, from the first of `count` on, that share keys with it; *shared becomes the number of
   keys. A member that shares less than half of *shared ends the group. */
static int64_t find_group(const Call *call, const int32_t *members, int64_t count, int64_t *shared)
{
    int64_t size = 1;
    for (*shared = 0; size < count; size++) {
        const int64_t common = common_keys(call, members[0], members[size]);
        if (common < MIN_SHARED || 2 * common < *shared)
            break;
        *shared = size == 1 ? common : smaller(common, *shared);
    }
    return size;
}

/* Plans tasks for the keys that `count` members share, range by range; enough of them for all threads. */
static int plan_group(const Call *call, Partition *partition, const int32_t *members, int64_t count, int64_t shared)
{
    const int64_t num_kv_heads = call->layer->num_kv_heads, rows_per_range = num_kv_heads * call->group;
    const int64_t num_ranges = (shared - 1) / SPLIT + 1, num_parts = num_ranges * num_kv_heads,
                  most = MAX_ROWS / call->group;
    const int64_t for_threads = smaller(2 * call->step->num_threads / num_parts, count / 2);
    const int64_t num_tasks = larger((count + most - 1) / most, for_threads);
    const int64_t room = partition->num_tasks + num_parts * num_tasks;
    for (int64_t i = 0; i < count; i++) {
        partition->shared_keys[members[i]] = (int32_t)shared;
        partition->first_part[members[i]] = partition->num_partial;
        partition->num_partial += ((call->step->seq_lens[members[i]] - 1) / SPLIT + 1) * rows_per_range;
    }
    if (!grow((void **)&partition->tasks, &partition->task_room, room, sizeof(Task)))
        return 0;
    for (int64_t range = 0; range < num_ranges; range++)
        for (int64_t head = 0; head < num_kv_heads; head++)
            for (int64_t i = 0; i < num_tasks; i++) {
                const int64_t first = i * count / num_tasks, end = (i + 1) * count / num_tasks;
                const int64_t end_key = smaller((range + 1) * SPLIT, shared);
                partition->tasks[partition->num_tasks++] = (Task){
                    .request = members[first], .members = members + first,
                    .first_head = (int32_t)head, .end_head = (int32_t)head + 1,
                    .first_row = 0, .end_row = (int32_t)((end - first) * call->group),
                    .first_key = (int32_t)(range * SPLIT), .end_key = (int32_t)end_key, .num_chained = 1,
                    .part = range * rows_per_range + head * call->group, .resumed = -1,
                };
                partition->work += (end - first) * call->group * (end_key - range * SPLIT) * call->padded_dim;
            }
    return 1;
}

/* Finds the requests that share keys, and plans their tasks.  With a window, or with chosen keys, rows do not see the
   same. */
static int plan_sharing(const Call *call, Partition *partition)
{
    const int64_t num_requests = call->step->num_requests;
    if (!grow((void **)&partition->candidates, &partition->candidate_room, num_requests, sizeof(Candidate)) ||
        !grow((void **)&partition->members, &partition->member_room, num_requests, sizeof(int32_t)) ||
        !grow((void **)&partition->shared_keys, &partition->shared_room, num_requests, sizeof(int32_t)) ||
        !grow((void **)&partition->first_part, &partition->part_room, num_requests, sizeof(int64_t)))
        return 0;
    memset(partition->shared_keys, 0, num_requests * sizeof(int32_t));
    if (call->layer->window || call->chosen || call->group > MAX_ROWS)
        return 1;
    const int64_t count = find_candidates(call, partition);
    for (int64_t i = 0, size, shared; i < count; i += size) {
        size = find_group(call, partition->members + i, count - i, &shared);
        if (size > 1 && !plan_group(call, partition, partition->members + i, size, shared))
            return 0;
    }
    return 1;
}
