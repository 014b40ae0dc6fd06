/* Paged attention on a CPU: store this step's keys and values, then attend to the cache in place.

   q    (tokens, heads, head_dim)      rows of a token are contiguous, tokens may be apart (a slice of a merged row)
   k, v (tokens, KV heads, head_dim)   likewise
   out  (tokens, heads, head_dim)      contiguous, written for the tokens of requests with a query

   cache, of keys and of values        (blocks, KV heads, block_size, head_dim); token at slot
                                       block * block_size + offset; blocks are `block_bytes` apart, because those of
                                       other layers lie between
     a head's values in a block        rows of head_dim
     a head's keys in a block          groups of `lanes` tokens as columns: (head_dim in items of 4 bytes, lanes)

   So a task reads whole pages, and multiplies an item of a query with those of `lanes` keys at once.

   A cache of codes has scales beside it, (blocks, KV heads, block_size) float32, of keys and of values: a token's codes
   of a head, as numbers, times its scale.  Scores are multiplied by the scales of keys, and weights by those of values,
   so that each scale is one factor, and codes become float32 in registers, exactly.

   Latent attention has one cache, of one KV head: rows of head_dim, whose first value_dim elements are the values.  A
   task makes columns of each tile of rows, for all query heads.

   A request of n queries and `group` heads per KV head has n * group rows per KV head, all of which read the same keys:

       row r = query r / group, head r % group        its last key is its own position, its first one the window's

   One task is: some KV heads of one request, up to MAX_ROWS rows in all, one range of SPLIT keys.  It goes through its
   keys in tiles, with the running maximum, sum and output of each row (online softmax).  Rows with several ranges are
   merged at the end.

   A prefix that many requests share is read once for all of them: decodes whose block tables begin with the same blocks
   are members of one task for these blocks, and then each continues alone.

   Of keys that are chosen, a request has those alone: its key k lies at position chosen[k].

   The ranges and tiles of a row depend on its position alone, so its result does not depend on the rest of the batch or
   on the number of threads. */

#pragma once

#include "simd.h"

enum { SPLIT = 256, MAX_ROWS = 64, MAX_HEAD_DIM = 576 };

/* Floats from one row's query to the next: a constant, so that no row needs a register for its address, and not a power
   of two, because the first-level cache has few places for lines that lie a power of two apart. */
enum { QUERY_STRIDE = MAX_HEAD_DIM + 16 };

/* Keys of a tile.  Rows that are in registers together: of scores, with 2 vectors of each; of weights, with all of a
   tile; of outputs, with DIM_BLOCK vectors of each. */
#if VW == 16
enum { TILE = 64, SCORE_ROWS = 8, WEIGHT_ROWS = 4, ROW_BLOCK = 6, DIM_BLOCK = 4 };
#else
enum { TILE = 32, SCORE_ROWS = 4, WEIGHT_ROWS = 2, ROW_BLOCK = 4, DIM_BLOCK = 4 };
#endif

/* Multiply-adds below which a second thread would cost more than it saves.  The number is small, because a decode
   spends its time waiting for keys and values. */
enum { MIN_PARALLEL_WORK = 1 << 13 };

/* What all layers of a step share.  Mirrored in layout.py. */
typedef struct {
    int64_t num_requests, num_tokens;
    const int32_t *query_lens;   /* (requests,); 0: left out */
    const int32_t *query_starts; /* (requests,), a request's first token */
    const int32_t *seq_lens;     /* (requests,) */
    const int32_t *block_table;  /* (requests, table_stride) */
    int64_t table_stride;
    const int64_t *slots;        /* (tokens,); negative: nothing is stored */
    int64_t num_threads;
} Step;

/* What is constant for a layer.  Mirrored in layout.py. */
typedef struct {
    char *key_cache, *value_cache, *key_scales, *value_scales; /* scales NULL: the cache has no codes */
    int64_t block_bytes, scale_bytes; /* from one block to the next, of the cache and of scales */
    int64_t block_size, num_heads, num_kv_heads, head_dim;
    int64_t value_dim, values_in_keys; /* values_in_keys: both caches are one, of rows */
    int64_t window; /* visible keys, the own one included; 0: all */
    int64_t cache_dtype, dtype;
    const float *sinks; /* (num_heads,): a score without a value; NULL: none */
    float scale, softcap; /* softcap: scores become softcap * tanh(score / softcap); 0: they do not */
} Layer;

typedef struct {
    const Step *step;
    const Layer *layer;
    const char *query, *key, *value; /* key and value NULL: they are stored already */
    char *out;
    int64_t query_stride, key_stride, value_stride; /* elements from one token to the next */
    int64_t group, padded_dim, block_shift; /* padded_dim: of values */
    int64_t lanes;      /* VW, or block_size if that is less */
    int64_t head_bytes; /* of a token in the cache */
    int by_pairs; /* queries and keys are multiplied as pairs of bfloat16 */
    const int64_t *first_part; /* of each member of a shared task: its first partial result */
    const int32_t *chosen;     /* (requests, chosen_stride): where the keys lie that a request attends to; NULL: all */
    int64_t chosen_stride;
} Call;

/* Rows first_row to end_row of KV heads first_head to end_head, keys first_key to end_key.  With `members`, the task
   has `group` rows of each of these requests, which have one query each, and `request` is one of them.

   Partial results of rows with several ranges go to `part`, the index of the range's first row in the list of partial
   results (with members: counted from each member's first_part); -1: there is one range.  A row continues from the
   partial result at `resumed`; -1: it begins here.

   One thread runs all `num_chained` tasks from the first of a chain on; 0: an earlier task's chain has this one. */
typedef struct {
    int32_t request, first_head, end_head, first_row, end_row, first_key, end_key, num_chained;
    const int32_t *members;
    int64_t part, resumed;
} Task;

/* Divides 32 bits, which is up to three times as fast as 64. */
INLINE int64_t over_group(const Call *call, int64_t row) { return (uint32_t)row / (uint32_t)call->group; }

INLINE int64_t within_group(const Call *call, int64_t row) { return (uint32_t)row % (uint32_t)call->group; }

INLINE int64_t request_of(const Call *call, const Task *task, int64_t row)
{
    return task->members ? task->members[over_group(call, row)] : task->request;
}

/* A row's query, among those of its request. */
INLINE int64_t query_of(const Call *call, const Task *task, int64_t row)
{
    return task->members ? 0 : over_group(call, row);
}

/* The key of a row's own token. */
static int64_t position_of(const Call *call, const Task *task, int64_t row)
{
    const Step *step = call->step;
    const int64_t request = request_of(call, task, row);
    return step->seq_lens[request] - step->query_lens[request] + query_of(call, task, row);
}

/* The token of a row's query, among those of the step. */
static int64_t token_of(const Call *call, const Task *task, int64_t row)
{
    return call->step->query_starts[request_of(call, task, row)] + query_of(call, task, row);
}

/* Where a row's partial result lies, if the task's first one lies at `part`. */
static int64_t part_of(const Call *call, const Task *task, int64_t part, int64_t head, int64_t row)
{
    const int64_t heads_before = head - task->first_head;
    if (task->members)
        return call->first_part[request_of(call, task, row)] + part + heads_before * call->group +
               within_group(call, row);
    return part + heads_before * (task->end_row - task->first_row) + row - task->first_row;
}

static int64_t first_visible(const Call *call, int64_t position)
{
    return call->layer->window ? larger(0, position - call->layer->window + 1) : 0;
}

