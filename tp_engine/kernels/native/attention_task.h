/* One task: its rows through all tiles of its keys. */
#pragma once

#include "attention_rows.h"

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

