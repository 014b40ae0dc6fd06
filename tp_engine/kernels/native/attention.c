/* Paged attention on a CPU: store this step's keys and values, then attend to the cache in place.

   q    (tokens, heads, head_dim)      rows of a token are contiguous, tokens may be apart (a slice of a merged row)
   k, v (tokens, KV heads, head_dim)   likewise
   cache                               (slots, KV heads, head_dim), keys and values each, slot = block * size + offset
   out  (tokens, heads, head_dim)      contiguous, written for the tokens of requests with a query

   A request of n queries and `group` heads per KV head has n * group rows per KV head, all of which read the same keys:

       row r = query r / group, head r % group        its last key is its own position, its first one the window's

   One task is: some KV heads of one request, up to MAX_ROWS rows in all, one range of SPLIT keys.  It goes through its
   keys in tiles, with the running maximum, sum and output of each row (online softmax).  Rows with several ranges are
   merged at the end.  The ranges and tiles of a row depend on its position alone, and so does its result: not on the
   rest of the batch, nor on the number of threads. */

#include <stdlib.h>

#include "simd.h"

enum { TILE = 32, SPLIT = 256, MAX_ROWS = 64, MAX_HEAD_DIM = 256, ROW_BLOCK = 4, KEY_BLOCK = 4, DIM_BLOCK = 4, CACHE_LINE = 64 };

/* Multiply-adds below which a second thread would cost more than it saves. */
enum { MIN_PARALLEL_WORK = 1 << 16 };

#define LOG2_E 1.4426950408889634f

/* What all layers of a step share.  Mirrored in layout.py. */
typedef struct {
    int64_t num_requests, num_tokens;
    const int32_t *query_lens;   /* (requests,); 0: not ours */
    const int32_t *query_starts; /* (requests,), a request's first token */
    const int32_t *seq_lens;     /* (requests,) */
    const int32_t *block_table;  /* (requests, table_stride) */
    int64_t table_stride;
    const int64_t *slots;        /* (tokens,); negative: nothing is stored */
    int64_t num_threads;
} Step;

/* What is constant for a layer.  Mirrored in layout.py. */
typedef struct {
    char *key_cache, *value_cache;
    int64_t block_size, num_heads, num_kv_heads, head_dim;
    int64_t window; /* visible keys, the own one included; 0: all */
    int64_t cache_dtype, dtype;
    float scale;
} Layer;

typedef struct {
    const Step *step;
    const Layer *layer;
    const char *query, *key, *value;
    char *out;
    int64_t query_stride, key_stride, value_stride; /* elements from one token to the next */
    int64_t group, padded_dim, row_width, block_shift;
} Call;

/* Rows first_row to end_row of KV heads first_head to end_head, keys first_key to end_key.  Results of a row that has
   several ranges go to `part`, the index of the range's first row in the list of partial results; -1: it has one. */
typedef struct {
    int32_t request, first_head, end_head, first_row, end_row, first_key, end_key;
    int64_t part;
} Task;

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

INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

/* The key of a row's own token. */
static int64_t position_of(const Call *call, const Task *task, int64_t row)
{
    const Step *step = call->step;
    return step->seq_lens[task->request] - step->query_lens[task->request] + row / call->group;
}

static int64_t first_visible(const Call *call, int64_t position)
{
    return call->layer->window ? larger(0, position - call->layer->window + 1) : 0;
}

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

static void store_token(const Call *call, int64_t token)
{
    const Layer *layer = call->layer;
    const int64_t slot = call->step->slots[token], width = call->row_width;
    if (slot < 0)
        return;
    const int64_t from = item_bytes(layer->dtype), to = slot * width * item_bytes(layer->cache_dtype);
    const char *key = call->key + token * call->key_stride * from;
    const char *value = call->value + token * call->value_stride * from;
    convert_row(layer->key_cache + to, layer->cache_dtype, key, layer->dtype, width);
    convert_row(layer->value_cache + to, layer->cache_dtype, value, layer->dtype, width);
}

#if VW == 16
#define LANES(lane) lane(0), lane(1), lane(2), lane(3)
#elif VW == 8
#define LANES(lane) lane(0), lane(1)
#else
#define LANES(lane) lane(0)
#endif
#define LOW_ITEMS(i) 4 * i, VW + 4 * i, 4 * i + 1, VW + 4 * i + 1
#define HIGH_ITEMS(i) 4 * i + 2, VW + 4 * i + 2, 4 * i + 3, VW + 4 * i + 3
#define LOW_PAIRS(i) 4 * i, 4 * i + 1, VW + 4 * i, VW + 4 * i + 1
#define HIGH_PAIRS(i) 4 * i + 2, 4 * i + 3, VW + 4 * i + 2, VW + 4 * i + 3
#define FOLD(a, b, low, high) (__builtin_shufflevector(a, b, LANES(low)) + __builtin_shufflevector(a, b, LANES(high)))

typedef float v4f __attribute__((vector_size(16)));
typedef float v4f_memory __attribute__((vector_size(16), aligned(4), may_alias));

/* The sums of four vectors, side by side. */
INLINE v4f sums_of_four(vf a, vf b, vf c, vf d)
{
    const vf ab = FOLD(a, b, LOW_ITEMS, HIGH_ITEMS), cd = FOLD(c, d, LOW_ITEMS, HIGH_ITEMS);
    const vf lanes = FOLD(ab, cd, LOW_PAIRS, HIGH_PAIRS);
#if VW == 16
    const v4f low = __builtin_shufflevector(lanes, lanes, 0, 1, 2, 3) + __builtin_shufflevector(lanes, lanes, 8, 9, 10, 11);
    return low + (__builtin_shufflevector(lanes, lanes, 4, 5, 6, 7) + __builtin_shufflevector(lanes, lanes, 12, 13, 14, 15));
#elif VW == 8
    return __builtin_shufflevector(lanes, lanes, 0, 1, 2, 3) + __builtin_shufflevector(lanes, lanes, 4, 5, 6, 7);
#else
    return (v4f)lanes;
#endif
}

/* Memory that will be needed soon: `left` lines from line `next` on of the rows at `places`, in the order of memory. */
typedef struct {
    const char *cache;
    const int64_t *places;
    int64_t row, byte, row_bytes, item, num_rows;
} Ahead;

INLINE void fetch_ahead(Ahead *ahead, int64_t num_lines)
{
    for (; num_lines > 0 && ahead->row < ahead->num_rows; num_lines--) {
        __builtin_prefetch(ahead->cache + ahead->places[ahead->row] * ahead->item + ahead->byte, 0, 2);
        ahead->byte += CACHE_LINE;
        if (ahead->byte >= ahead->row_bytes) {
            ahead->byte = 0;
            ahead->row++;
        }
    }
}

/* scores[r][0..3] = rows r of `query` times four keys. */
INLINE void score_block(const int rows, const int dtype, int64_t vectors, const float *query, const char *const *keys,
                        float *scores)
{
    vf sums[ROW_BLOCK][KEY_BLOCK] = {0};
    for (int64_t i = 0; i < vectors; i++) {
        vf key[KEY_BLOCK];
#pragma GCC unroll 4
        for (int k = 0; k < KEY_BLOCK; k++)
            key[k] = load_items(keys[k], i * VW, dtype);
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) {
            const vf q = load_vector(query + (r * vectors + i) * VW);
#pragma GCC unroll 4
            for (int k = 0; k < KEY_BLOCK; k++)
                sums[r][k] += q * key[k];
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
        *(v4f_memory *)(scores + r * TILE) = sums_of_four(sums[r][0], sums[r][1], sums[r][2], sums[r][3]);
}

INLINE void score_rows(const int dtype, int64_t rows, int64_t vectors, const float *query, const char *const *keys,
                       int64_t num_keys, float *scores, Ahead *ahead, int64_t lines_per_key)
{
    for (int64_t k = 0; k < num_keys; k += KEY_BLOCK) {
        fetch_ahead(ahead, lines_per_key * KEY_BLOCK);
        for (int64_t r = 0; r < rows; r += ROW_BLOCK) {
            const float *q = query + r * vectors * VW;
            float *to = scores + r * TILE + k;
            switch (smaller(rows - r, ROW_BLOCK)) {
            case 1: score_block(1, dtype, vectors, q, keys + k, to); break;
            case 2: score_block(2, dtype, vectors, q, keys + k, to); break;
            case 3: score_block(3, dtype, vectors, q, keys + k, to); break;
            default: score_block(4, dtype, vectors, q, keys + k, to);
            }
        }
    }
}

/* Scores of one row become weights, of which those from `first` to `end` are visible; returns what its results so far
   are worth now. */
INLINE float weigh_row(float *scores, int64_t first, int64_t end, float *max, float *sum)
{
    const vf nothing = splat(-INFINITY);
    vi place;
    for (int i = 0; i < VW; i++)
        place[i] = i;
    vf best = nothing;
    vf score[TILE / VW];
#pragma GCC unroll 16
    for (int i = 0; i < TILE / VW; i++) {
        const vi is_visible = (place >= (int32_t)first) & (place < (int32_t)end);
        score[i] = select_vector(is_visible, load_vector(scores + i * VW), nothing);
        best = max_vector(best, score[i]);
        place += VW;
    }
    const vf old_max = splat(*max), new_max = max_vector(old_max, max_of(best));
    vf total = splat(0);
#pragma GCC unroll 16
    for (int i = 0; i < TILE / VW; i++) {
        const vf weight = exp2_vector(score[i] - new_max);
        store_vector(scores + i * VW, weight);
        total += weight;
    }
    const float kept = exp2_vector(old_max - new_max)[0];
    *sum = *sum * kept + sum_of(total)[0];
    *max = new_max[0];
    return kept;
}

/* out[r] = out[r] * kept[r] + weights[r] @ values, for `width` vectors of the rows. */
INLINE void add_block(const int rows, const int width, const int dtype, int64_t vectors, const float *weights,
                      const float *kept, const char *const *values, int64_t num_keys, int64_t first, float *out,
                      Ahead *ahead, int64_t lines_per_key)
{
    vf sums[ROW_BLOCK][DIM_BLOCK];
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int i = 0; i < width; i++)
            sums[r][i] = load_vector(out + (r * vectors + first + i) * VW) * kept[r];
    for (int64_t k = 0; k < num_keys; k++) {
        vf value[DIM_BLOCK];
        fetch_ahead(ahead, lines_per_key);
#pragma GCC unroll 4
        for (int i = 0; i < width; i++)
            value[i] = load_items(values[k], (first + i) * VW, dtype);
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
            for (int i = 0; i < width; i++)
                sums[r][i] += value[i] * weights[r * TILE + k];
    }
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int i = 0; i < width; i++)
            store_vector(out + (r * vectors + first + i) * VW, sums[r][i]);
}

INLINE void add_rows(const int rows, const int dtype, int64_t vectors, const float *weights, const float *kept,
                     const char *const *values, int64_t num_keys, float *out, Ahead *ahead, int64_t lines_per_key)
{
    int64_t first = 0;
    for (; first + DIM_BLOCK <= vectors; first += DIM_BLOCK)
        add_block(rows, DIM_BLOCK, dtype, vectors, weights, kept, values, num_keys, first, out, ahead, lines_per_key);
    for (; first + 2 <= vectors; first += 2)
        add_block(rows, 2, dtype, vectors, weights, kept, values, num_keys, first, out, ahead, lines_per_key);
    for (; first < vectors; first++)
        add_block(rows, 1, dtype, vectors, weights, kept, values, num_keys, first, out, ahead, lines_per_key);
}

INLINE void add_values(const int dtype, int64_t rows, int64_t vectors, const float *weights, const float *kept,
                       const char *const *values, int64_t num_keys, float *out, Ahead *ahead, int64_t lines_per_key)
{
    for (int64_t r = 0; r < rows; r += ROW_BLOCK) {
        const float *w = weights + r * TILE;
        float *to = out + r * vectors * VW;
        switch (smaller(rows - r, ROW_BLOCK)) {
        case 1: add_rows(1, dtype, vectors, w, kept + r, values, num_keys, to, ahead, lines_per_key); break;
        case 2: add_rows(2, dtype, vectors, w, kept + r, values, num_keys, to, ahead, lines_per_key); break;
        case 3: add_rows(3, dtype, vectors, w, kept + r, values, num_keys, to, ahead, lines_per_key); break;
        default: add_rows(4, dtype, vectors, w, kept + r, values, num_keys, to, ahead, lines_per_key);
        }
    }
}

/* Running results of a task's rows, KV head by KV head. */
typedef struct {
    float query[MAX_ROWS * MAX_HEAD_DIM], out[MAX_ROWS * MAX_HEAD_DIM];
    float max[MAX_ROWS], sum[MAX_ROWS], kept[MAX_ROWS], scores[MAX_ROWS * TILE];
    float copy[TILE * MAX_HEAD_DIM];
    int64_t first_key[MAX_ROWS], end_key[MAX_ROWS]; /* what a row of any head may see */
} Rows;

/* Up to TILE keys from `start` on, and where they lie in the cache, in elements. */
typedef struct {
    int64_t start, num_keys, places[TILE];
} Tile;

static void find_tile(const Call *call, const Task *task, int64_t start, Tile *tile)
{
    const int32_t *blocks = call->step->block_table + task->request * call->step->table_stride;
    const int64_t mask = call->layer->block_size - 1, end = smaller(start / TILE * TILE + TILE, task->end_key);
    tile->start = start;
    tile->num_keys = larger(end - start, 0);
    for (int64_t key = start; key < end; key++) {
        const int64_t slot = ((int64_t)blocks[key >> call->block_shift] << call->block_shift) + (key & mask);
        tile->places[key - start] = slot * call->row_width;
    }
}

/* One KV head's rows of a tile: pointers into the cache or, where rows are no whole vectors, to wide copies. */
INLINE void read_tile(const Call *call, const char *cache, const Tile *tile, int64_t head, const int in_place, float *copy,
                      const char **rows)
{
    const Layer *layer = call->layer;
    const int64_t bytes = item_bytes(layer->cache_dtype);
    int64_t k = 0;
    for (; k < tile->num_keys; k++) {
        rows[k] = cache + (tile->places[k] + head * layer->head_dim) * bytes;
        if (!in_place) {
            widen_row(copy + k * call->padded_dim, rows[k], layer->head_dim, (int)layer->cache_dtype);
            rows[k] = (const char *)(copy + k * call->padded_dim);
        }
    }
    for (; k % KEY_BLOCK; k++)
        rows[k] = rows[tile->num_keys - 1];
}

static void read_queries(const Call *call, const Task *task, Rows *rows)
{
    const Layer *layer = call->layer;
    const int64_t width = call->padded_dim;
    const float factor = layer->scale * LOG2_E;
    int64_t r = 0;
    for (int64_t head = task->first_head; head < task->end_head; head++)
        for (int64_t row = task->first_row; row < task->end_row; row++, r++) {
            const int64_t token = call->step->query_starts[task->request] + row / call->group;
            const int64_t place = token * call->query_stride + (head * call->group + row % call->group) * layer->head_dim;
            float *query = rows->query + r * width;
            widen_row(query, call->query + place * item_bytes(layer->dtype), layer->head_dim, (int)layer->dtype);
            for (int64_t i = 0; i < width; i += VW)
                store_vector(query + i, load_vector(query + i) * factor);
            rows->max[r] = -INFINITY;
            rows->sum[r] = 0;
        }
    memset(rows->out, 0, r * width * sizeof(float));
    for (int64_t row = task->first_row; row < task->end_row; row++) {
        const int64_t position = position_of(call, task, row);
        rows->first_key[row - task->first_row] = first_visible(call, position);
        rows->end_key[row - task->first_row] = position + 1;
    }
}

/* One KV head's rows over one tile, while the next tile's keys and values are fetched. */
INLINE void attend_tile(const Call *call, const Task *task, const int dtype, const int in_place, Rows *rows, int64_t head,
                        const Tile *tile, Ahead *keys_ahead, Ahead *values_ahead, int64_t lines_per_key)
{
    const Layer *layer = call->layer;
    const int64_t num_rows = task->end_row - task->first_row, base = (head - task->first_head) * num_rows;
    const int64_t start = tile->start, end = start + tile->num_keys;
    const int64_t width = call->padded_dim, vectors = width / VW;
    const char *states[TILE];
    int64_t first = 0, last = num_rows;
    while (first < last && rows->end_key[first] <= start)
        first++;
    while (first < last && rows->first_key[last - 1] >= end)
        last--;
    if (first == last)
        return;
    float *scores = rows->scores, *kept = rows->kept;
    read_tile(call, layer->key_cache, tile, head, in_place, rows->copy, states);
    score_rows(dtype, last - first, vectors, rows->query + (base + first) * width, states, tile->num_keys, scores,
               keys_ahead, lines_per_key);
    for (int64_t r = first; r < last; r++) {
        const int64_t from = larger(rows->first_key[r] - start, 0), to = smaller(rows->end_key[r] - start, tile->num_keys);
        kept[r - first] = weigh_row(scores + (r - first) * TILE, from, to, rows->max + base + r, rows->sum + base + r);
    }
    read_tile(call, layer->value_cache, tile, head, in_place, rows->copy, states);
    add_values(dtype, last - first, vectors, scores, kept, states, tile->num_keys, rows->out + (base + first) * width,
               values_ahead, lines_per_key);
}

INLINE void write_row(const Call *call, const Task *task, int64_t head, int64_t row, float *out, float sum)
{
    const Layer *layer = call->layer;
    const int64_t token = call->step->query_starts[task->request] + row / call->group;
    const int64_t place = (token * layer->num_heads + head * call->group + row % call->group) * layer->head_dim;
    const float factor = 1.0f / sum;
    for (int64_t i = 0; i < call->padded_dim; i += VW)
        store_vector(out + i, load_vector(out + i) * factor);
    narrow_row(call->out + place * item_bytes(layer->dtype), out, layer->head_dim, (int)layer->dtype);
}

/* `dtype` is that of the rows that are multiplied: the cache's, or of their copies. */
INLINE void attend(const Call *call, const Task *task, float *partial, const int dtype, const int in_place)
{
    Rows rows;
    Tile tiles[2], *tile = &tiles[0], *next = &tiles[1];
    const Layer *layer = call->layer;
    const int64_t width = call->padded_dim, item = item_bytes(layer->cache_dtype);
    const int64_t num_heads = task->end_head - task->first_head, row_bytes = num_heads * layer->head_dim * item;
    const int64_t lines_per_key = (row_bytes / CACHE_LINE + num_heads) / num_heads;
    const int64_t offset = task->first_head * layer->head_dim * item;
    read_queries(call, task, &rows);
    find_tile(call, task, task->first_key, tile);
    while (tile->num_keys) {
        find_tile(call, task, tile->start + tile->num_keys, next);
        Ahead keys = {layer->key_cache + offset, next->places, 0, 0, row_bytes, item, next->num_keys}, values = keys;
        values.cache = layer->value_cache + offset;
        for (int64_t head = task->first_head; head < task->end_head; head++)
            attend_tile(call, task, dtype, in_place, &rows, head, tile, &keys, &values, lines_per_key);
        Tile *const done = tile;
        tile = next, next = done;
    }
    int64_t r = 0;
    for (int64_t head = task->first_head; head < task->end_head; head++)
        for (int64_t row = task->first_row; row < task->end_row; row++, r++) {
            if (task->part < 0) {
                write_row(call, task, head, row, rows.out + r * width, rows.sum[r]);
                continue;
            }
            float *to = partial + (task->part + r) * (width + 2);
            memcpy(to, rows.out + r * width, width * sizeof(float));
            to[width] = rows.max[r];
            to[width + 1] = rows.sum[r];
        }
}

/* Each type of rows gets code of its own. */
static void attend_float32(const Call *call, const Task *task, float *partial) { attend(call, task, partial, FLOAT32, 1); }
static void attend_bfloat16(const Call *call, const Task *task, float *partial) { attend(call, task, partial, BFLOAT16, 1); }
static void attend_float16(const Call *call, const Task *task, float *partial) { attend(call, task, partial, FLOAT16, 1); }
static void attend_copies(const Call *call, const Task *task, float *partial) { attend(call, task, partial, FLOAT32, 0); }

static void run_task(const Call *call, const Task *task, float *partial)
{
    if (call->padded_dim != call->layer->head_dim)
        attend_copies(call, task, partial);
    else if (call->layer->cache_dtype == FLOAT32)
        attend_float32(call, task, partial);
    else if (call->layer->cache_dtype == BFLOAT16)
        attend_bfloat16(call, task, partial);
    else
        attend_float16(call, task, partial);
}

/* Add up the ranges of each row, in their order, each scaled to the largest maximum. */
static void run_merge(const Call *call, const Merge *merge, float *partial)
{
    const Task *task = &merge->rows;
    const int64_t width = call->padded_dim, num_rows = task->end_row - task->first_row;
    const int64_t stride = (task->end_head - task->first_head) * num_rows * (width + 2);
    for (int64_t head = task->first_head; head < task->end_head; head++)
        for (int64_t row = task->first_row; row < task->end_row; row++) {
            const int64_t r = (head - task->first_head) * num_rows + row - task->first_row;
            float *first = partial + (task->part + r) * (width + 2), out[MAX_HEAD_DIM] = {0}, max = -INFINITY, sum = 0;
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

/* Returns 0, or 1 where memory ran out. */
int paged_attention(const Step *step, const Layer *layer, const void *query, const void *key, const void *value, void *out,
                    int64_t query_stride, int64_t key_stride, int64_t value_stride)
{
    const Call call = {
        .step = step, .layer = layer, .query = query, .key = key, .value = value, .out = out,
        .query_stride = query_stride, .key_stride = key_stride, .value_stride = value_stride,
        .group = layer->num_heads / layer->num_kv_heads,
        .padded_dim = (layer->head_dim + VW - 1) / VW * VW,
        .row_width = layer->num_kv_heads * layer->head_dim,
        .block_shift = log2_of(layer->block_size),
    };
    Plan *plan = &kept_plan;
    if (!make_plan(&call, plan))
        return 1;
    const Task *tasks = plan->tasks;
    const Merge *merges = plan->merges;
    float *partial = plan->partial;
    const int64_t num_tasks = plan->num_tasks, num_merges = plan->num_merges, num_tokens = step->num_tokens;
    const int is_small = plan->work + num_tokens * call.row_width < MIN_PARALLEL_WORK;
#pragma omp parallel num_threads((int)step->num_threads) if (!is_small && step->num_threads > 1)
    {
#pragma omp for schedule(static)
        for (int64_t token = 0; token < num_tokens; token++)
            store_token(&call, token);
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < num_tasks; i++)
            run_task(&call, &tasks[i], partial);
        if (num_merges) {
#pragma omp for schedule(static)
            for (int64_t i = 0; i < num_merges; i++)
                run_merge(&call, &merges[i], partial);
        }
    }
    return 0;
}
