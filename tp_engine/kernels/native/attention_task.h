/* One task: its rows through all tiles of its keys. */
#pragma once

#include "attention_rows.h"

/* Rows of a tile as float32. */
typedef struct {
    float rows[TILE * MAX_HEAD_DIM];
    int64_t places[TILE];
} Wide;

/* Running results of a task's rows, KV head by KV head. */
typedef struct {
    float query[MAX_ROWS * MAX_HEAD_DIM], out[MAX_ROWS * MAX_HEAD_DIM];
    float max[MAX_ROWS], sum[MAX_ROWS], kept[MAX_ROWS], scores[MAX_ROWS * TILE];
    float columns[MAX_HEAD_DIM * TILE];
    Wide wide;
    int64_t first_key[MAX_ROWS], end_key[MAX_ROWS]; /* what a row of any head may see */
} Rows;

/* Up to TILE keys from `start` on, and where they lie in the cache, in bytes; the last is repeated to a multiple of VW. */
typedef struct {
    int64_t start, num_keys, places[TILE];
} Tile;

static void find_tile(const Call *call, const Task *task, int64_t start, Tile *tile)
{
    const int32_t *blocks = call->step->block_table + task->request * call->step->table_stride;
    const int64_t mask = call->layer->block_size - 1, end = smaller(start / TILE * TILE + TILE, task->end_key);
    const int64_t row_bytes = call->row_width * item_bytes((int)call->layer->cache_dtype);
    tile->start = start;
    tile->num_keys = larger(end - start, 0);
    for (int64_t key = start; key < end; key++) {
        const int64_t slot = ((int64_t)blocks[key >> call->block_shift] << call->block_shift) + (key & mask);
        tile->places[key - start] = slot * row_bytes;
    }
    for (int64_t k = tile->num_keys; k % VW; k++)
        tile->places[k] = tile->places[k - 1];
}

/* The task's part of a tile's keys and values. */
static Ahead next_rows(const Call *call, const Task *task, const Tile *tile)
{
    const Layer *layer = call->layer;
    const int64_t head_bytes = layer->head_dim * item_bytes((int)layer->cache_dtype), offset = task->first_head * head_bytes;
    return (Ahead){
        .keys = layer->key_cache + offset, .values = layer->value_cache + offset,
        .places = tile->places, .num_keys = tile->num_keys,
        .row_bytes = (task->end_head - task->first_head) * head_bytes, .piece_bytes = head_bytes,
    };
}

/* One KV head's rows of a tile, in the cache or wide. */
INLINE Lines find_lines(const Call *call, const char *cache, const Tile *tile, int64_t head, const int in_place, Wide *wide)
{
    const Layer *layer = call->layer;
    const char *first = cache + head * layer->head_dim * item_bytes((int)layer->cache_dtype);
    if (in_place)
        return (Lines){first, tile->places};
    for (int64_t k = 0; k < (tile->num_keys + VW - 1) / VW * VW; k++) {
        wide->places[k] = k * call->padded_dim * (int64_t)sizeof(float);
        widen_row(wide->rows + k * call->padded_dim, first + tile->places[k], layer->head_dim, (int)layer->cache_dtype);
    }
    return (Lines){(const char *)wide->rows, wide->places};
}

/* A row's results so far, where it goes on; none, where it begins. */
static void begin_row(const float *from, int64_t width, float *out, float *max, float *sum)
{
    if (from) {
        memcpy(out, from, width * sizeof(float));
        *max = from[width], *sum = from[width + 1];
    } else {
        memset(out, 0, width * sizeof(float));
        *max = -INFINITY, *sum = 0;
    }
}

static void read_rows(const Call *call, const Task *task, const float *partial, Rows *rows)
{
    const Layer *layer = call->layer;
    const int64_t width = call->padded_dim, bytes = item_bytes((int)layer->dtype);
    int64_t r = 0;
    for (int64_t head = task->first_head; head < task->end_head; head++)
        for (int64_t row = task->first_row; row < task->end_row; row++, r++) {
            const int64_t place =
                token_of(call, task, row) * call->query_stride + (head * call->group + row % call->group) * layer->head_dim;
            const int64_t resumed = part_of(call, task, task->resumed, head, row);
            if (call->by_pairs)
                memcpy(rows->query + r * width / 2, call->query + place * bytes, layer->head_dim * bytes);
            else
                widen_row(rows->query + r * width, call->query + place * bytes, layer->head_dim, (int)layer->dtype);
            begin_row(task->resumed < 0 ? NULL : partial + resumed * (width + 2), width, rows->out + r * width, rows->max + r,
                      rows->sum + r);
        }
    for (int64_t row = task->first_row; row < task->end_row; row++) {
        const int64_t position = position_of(call, task, row);
        rows->first_key[row - task->first_row] = first_visible(call, position);
        rows->end_key[row - task->first_row] = position + 1;
    }
}

/* One KV head's rows over one tile, while the next tile's keys and values are fetched. */
INLINE void attend_tile(const Call *call, const Task *task, const int dtype, const int in_place, const int by_pairs,
                        Rows *rows, int64_t head, const Tile *tile, Ahead *ahead)
{
    const Layer *layer = call->layer;
    const int64_t num_rows = task->end_row - task->first_row, base = (head - task->first_head) * num_rows;
    const int64_t start = tile->start, end = start + tile->num_keys;
    const int64_t width = call->padded_dim, vectors = width / VW, items = by_pairs ? width / 2 : width;
    const float factor = layer->scale * LOG2_E;
    int64_t first = 0, last = num_rows;
    while (first < last && rows->end_key[first] <= start)
        first++;
    while (first < last && rows->first_key[last - 1] >= end)
        last--;
    if (first == last)
        return;
    float *scores = rows->scores, *kept = rows->kept, *out = rows->out + (base + first) * width;
    const Lines keys = find_lines(call, layer->key_cache, tile, head, in_place, &rows->wide);
    turn_keys(by_pairs ? FLOAT32 : dtype, items, keys, tile->num_keys, rows->columns);
    score_rows(by_pairs, last - first, items, rows->query + (base + first) * items, rows->columns, tile->num_keys, scores);
    for (int64_t r = first; r < last; r++) {
        const int64_t from = larger(rows->first_key[r] - start, 0), to = smaller(rows->end_key[r] - start, tile->num_keys);
        float *const max = rows->max + base + r, *const sum = rows->sum + base + r;
        kept[r - first] = weigh_row(scores + (r - first) * TILE, factor, from, to, max, sum);
    }
    const int is_wide = dtype == FLOAT32 || last - first > ROW_BLOCK;
    const int stays = in_place && (dtype == FLOAT32 || !is_wide);
    const Lines values = find_lines(call, layer->value_cache, tile, head, stays, &rows->wide);
    if (is_wide)
        add_values(FLOAT32, last - first, vectors, scores, kept, values, tile->num_keys, out, ahead);
    else
        add_values(dtype, last - first, vectors, scores, kept, values, tile->num_keys, out, ahead);
}

INLINE void write_row(const Call *call, const Task *task, int64_t head, int64_t row, float *out, float sum)
{
    const Layer *layer = call->layer;
    const int64_t head_row = token_of(call, task, row) * layer->num_heads + head * call->group + row % call->group;
    const int64_t place = head_row * layer->head_dim;
    const float factor = 1.0f / sum;
    for (int64_t i = 0; i < call->padded_dim; i += VW)
        store_vector(out + i, load_vector(out + i) * factor);
    narrow_row(call->out + place * item_bytes(layer->dtype), out, layer->head_dim, (int)layer->dtype);
}

/* `dtype` is that of the rows that are multiplied: the cache's, or of their copies.  While the last tile is computed,
   `following`'s first one is fetched, if it is not NULL. */
INLINE void attend(const Call *call, const Task *task, const Task *following, float *partial, const int dtype,
                   const int in_place, const int by_pairs)
{
    Rows rows;
    Tile tiles[2], *tile = &tiles[0], *next = &tiles[1];
    const int64_t width = call->padded_dim;
    read_rows(call, task, partial, &rows);
    find_tile(call, task, task->first_key, tile);
    for (int is_last = 0; !is_last;) {
        const Task *next_task = task;
        find_tile(call, task, tile->start + tile->num_keys, next);
        is_last = next->num_keys == 0;
        if (is_last && following)
            find_tile(call, next_task = following, following->first_key, next);
        Ahead ahead = next_rows(call, next_task, next);
        for (int64_t head = task->first_head; head < task->end_head; head++)
            attend_tile(call, task, dtype, in_place, by_pairs, &rows, head, tile, &ahead);
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
            float *to = partial + part_of(call, task, task->part, head, row) * (width + 2);
            memcpy(to, rows.out + r * width, width * sizeof(float));
            to[width] = rows.max[r];
            to[width + 1] = rows.sum[r];
        }
}

/* Each type of rows gets code of its own. */
#define ATTEND(name, dtype, in_place, by_pairs)                                                            \
    static void name(const Call *call, const Task *task, const Task *following, float *partial)             \
    {                                                                                                       \
        attend(call, task, following, partial, dtype, in_place, by_pairs);                                  \
    }
ATTEND(attend_float32, FLOAT32, 1, 0)
ATTEND(attend_bfloat16, BFLOAT16, 1, 0)
ATTEND(attend_float16, FLOAT16, 1, 0)
ATTEND(attend_pairs, BFLOAT16, 1, 1)
ATTEND(attend_copies, FLOAT32, 0, 0)

static void run_task(const Call *call, const Task *task, const Task *following, float *partial)
{
    if (call->padded_dim != call->layer->head_dim)
        attend_copies(call, task, following, partial);
    else if (call->layer->cache_dtype == FLOAT32)
        attend_float32(call, task, following, partial);
    else if (call->by_pairs)
        attend_pairs(call, task, following, partial);
    else if (call->layer->cache_dtype == BFLOAT16)
        attend_bfloat16(call, task, following, partial);
    else
        attend_float16(call, task, following, partial);
}
