/* One task: its rows over all tiles of its keys. */
#pragma once

#include "attention_rows.h"

/* Running results of a task's rows, KV head by KV head. */
typedef struct {
    float query[MAX_ROWS * QUERY_STRIDE], out[MAX_ROWS * MAX_HEAD_DIM];
    float max[MAX_ROWS], sum[MAX_ROWS], kept[MAX_ROWS], scores[MAX_ROWS * TILE];
    float columns[MAX_HEAD_DIM * TILE], values[TILE * MAX_HEAD_DIM];
    int64_t places[TILE]; /* of `values` */
    int64_t first_key[MAX_ROWS], end_key[MAX_ROWS]; /* what a row of any head may see */
} Rows;

/* Keys `start` to `start + num_keys`; the first `num_hidden` are not the task's.  `places` are the bytes at which their
   values lie in a head's part of the cache; a group of keys lies at the place of its first key.  `scale_places`: those
   of scales, if there are any. */
typedef struct {
    int64_t start, num_keys, num_hidden, places[TILE], scale_places[TILE];
} Tile;

/* Finds the tile with key `first`; the tile is empty if that key is not the task's. */
static void find_tile(const Call *call, const Task *task, int64_t first, Tile *tile)
{
    const int32_t *blocks = call->step->block_table + task->request * call->step->table_stride;
    const Layer *layer = call->layer;
    const int64_t mask = layer->block_size - 1;
    const int64_t start = first / TILE * TILE;
    const int64_t end = smaller(start + TILE, task->end_key);
    tile->start = start;
    tile->num_hidden = first - start;
    tile->num_keys = first < end ? end - start : 0;
    const int32_t *chosen = call->chosen ? call->chosen + task->request * call->chosen_stride : NULL;
    for (int64_t key = start; key < start + tile->num_keys; key++) {
        const int64_t place = chosen ? chosen[key] : key, block = blocks[place >> call->block_shift];
        tile->places[key - start] = block * layer->block_bytes + (place & mask) * call->head_bytes;
        if (layer->key_scales)
            tile->scale_places[key - start] = block * layer->scale_bytes + (place & mask) * (int64_t)sizeof(float);
    }
    for (int64_t k = tile->num_keys; k < TILE && tile->num_keys; k++)
        tile->places[k] = tile->places[0];
}

/* The task's part of a tile's keys and values. */
static Ahead next_rows(const Call *call, const Task *task, const Tile *tile)
{
    const int64_t stride = call->head_bytes << call->block_shift, offset = task->first_head * stride;
    return (Ahead){
        .keys = call->layer->key_cache + offset, .values = call->layer->value_cache + offset,
        .places = tile->places, .num_keys = tile->num_keys, .num_heads = task->end_head - task->first_head,
        .head_stride = stride, .piece_bytes = call->head_bytes,
    };
}

/* The columns of a tile whose keys are rows: `joined` (items, TILE). */
INLINE void turn_rows(const char *first, const Tile *tile, int64_t items, float *joined)
{
    for (int64_t u = 0; u < items; u += VW)
        for (int64_t k = 0; k < TILE; k += VW) {
            vf columns[VW];
            for (int i = 0; i < VW; i++)
                columns[i] = load_some(first + tile->places[k + i], u, items, FLOAT32);
            transpose(columns);
            for (int i = 0; i < smaller(VW, items - u); i++)
                store_vector(joined + (u + i) * TILE + k, columns[i]);
        }
}

/* One KV head's keys of a tile: in the cache, or put together from rows, or from groups that are smaller than a
   vector. */
INLINE Keys find_keys(const Call *call, const Tile *tile, int64_t head, float *joined)
{
    const char *first = call->layer->key_cache + (head * call->head_bytes << call->block_shift);
    const int64_t lanes = call->lanes, items = call->head_bytes / 4;
    const int in_place = lanes == VW && !call->layer->values_in_keys;
    Keys keys = {.stride = in_place ? VW : TILE};
    for (int64_t i = 0; i < TILE / VW; i++)
        keys.columns[i] = in_place ? (const float *)(first + tile->places[i * VW]) : joined + i * VW;
    if (call->layer->values_in_keys)
        turn_rows(first, tile, items, joined);
    else if (!in_place)
        for (int64_t k = 0; k < TILE; k += lanes)
            for (int64_t u = 0; u < items; u++)
                memcpy(joined + u * TILE + k, first + tile->places[k] + u * lanes * 4, lanes * 4);
    return keys;
}

/* Keys of codes as float32, at `to` (head_dim, TILE): for many rows that is less work than in registers. */
INLINE Keys widen_keys(const Keys *keys, int64_t items, const int dtype, float *to)
{
    Keys wide = {.stride = TILE};
    for (int64_t i = 0; i < TILE / VW; i++) {
        wide.columns[i] = to + i * VW;
        for (int64_t u = 0; u < items; u++) {
            const vu codes = (vu)load_vector(keys->columns[i] + u * keys->stride);
#pragma GCC unroll 4
            for (int n = 0; n < 4; n++)
                store_vector(to + (4 * u + n) * TILE + i * VW, code_values(codes << (24 - 8 * n), dtype));
        }
    }
    return wide;
}

/* Functions that all types share. */
static __attribute__((noinline)) void score_wide(int64_t rows, int64_t items, const float *query, const Keys *keys,
                                                 int64_t num_keys, float *scores, Ahead *ahead)
{
    score_rows(FLOAT32, 0, rows, items, query, keys, num_keys, scores, ahead);
}

static __attribute__((noinline)) void add_wide(int64_t rows, int64_t vectors, const float *weights, const float *kept,
                                               const Values *values, float *out, Ahead *ahead)
{
    add_values(FLOAT32, rows, vectors, weights, kept, values, out, ahead);
}

/* One KV head's values of a tile, without their scales: in the cache, or copied as float32 with padding. */
INLINE Values find_values(const Call *call, const Tile *tile, int64_t head, const int dtype, const int in_place,
                          Rows *rows)
{
    const Layer *layer = call->layer;
    const char *first = layer->value_cache + (head * call->head_bytes << call->block_shift);
    if (in_place)
        return (Values){first, tile->places, tile->num_hidden, tile->num_keys};
    for (int64_t k = tile->num_hidden; k < tile->num_keys; k++) {
        rows->places[k] = k * call->padded_dim * (int64_t)sizeof(float);
        widen_row(rows->values + k * call->padded_dim, first + tile->places[k], layer->value_dim, dtype);
    }
    return (Values){(const char *)rows->values, rows->places, tile->num_hidden, tile->num_keys};
}

/* Multiplies the scores or the weights of some rows by one KV head's `scales` of a tile's keys or values. */
INLINE void multiply_by_scales(const Call *call, const Tile *tile, const char *scales, int64_t head, int64_t num_rows,
                               float *scores)
{
    const int64_t together = call->chosen ? 1 : call->lanes; /* so many lie side by side */
    float factors[TILE] = {0};
    scales += (head << call->block_shift) * (int64_t)sizeof(float);
    for (int64_t k = 0; k < tile->num_keys; k += together)
        if (together == VW)
            store_vector(factors + k, load_vector((const float *)(scales + tile->scale_places[k])));
        else
            memcpy(factors + k, scales + tile->scale_places[k], together * sizeof(float));
    for (int64_t i = 0; i < num_rows * TILE; i += VW)
        store_vector(scores + i, load_vector(scores + i) * load_vector(factors + i % TILE));
}

/* Sets a row's results so far to those at `from`; to none if it is NULL. */
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

/* Begins with the results so far of a task's rows. */
static void begin_rows(const Call *call, const Task *task, const float *partial, Rows *rows)
{
    const int64_t width = call->padded_dim;
    int64_t r = 0;
    for (int64_t head = task->first_head; head < task->end_head; head++)
        for (int64_t row = task->first_row; row < task->end_row; row++, r++) {
            const int64_t resumed = part_of(call, task, task->resumed, head, row);
            const float *from = task->resumed < 0 ? NULL : partial + resumed * (width + 2);
            begin_row(from, width, rows->out + r * width, rows->max + r, rows->sum + r);
        }
}

/* Reads the queries of a task's rows, and what they see. */
static void read_rows(const Call *call, const Task *task, Rows *rows)
{
    const Layer *layer = call->layer;
    const int64_t bytes = item_bytes((int)layer->dtype);
    int64_t r = 0;
    for (int64_t head = task->first_head; head < task->end_head; head++)
        for (int64_t row = task->first_row; row < task->end_row; row++, r++) {
            const int64_t place = token_of(call, task, row) * call->query_stride +
                                  (head * call->group + within_group(call, row)) * layer->head_dim;
            if (call->by_pairs)
                memcpy(rows->query + r * QUERY_STRIDE, call->query + place * bytes, layer->head_dim * bytes);
            else
                widen_row(rows->query + r * QUERY_STRIDE, call->query + place * bytes, layer->head_dim,
                          (int)layer->dtype);
        }
    for (int64_t row = task->first_row; row < task->end_row; row++) {
        const int64_t position = position_of(call, task, row);
        rows->first_key[row - task->first_row] = first_visible(call, position);
        rows->end_key[row - task->first_row] = position + 1;
    }
}

/* One KV head's rows over one tile, while the next tile's keys and values are fetched. */
INLINE void attend_tile(const Call *call, const Task *task, const int dtype, const int by_pairs, Rows *rows,
                        int64_t head, const Tile *tile, Ahead *ahead)
{
    const int64_t num_rows = task->end_row - task->first_row, base = (head - task->first_head) * num_rows;
    const int64_t start = tile->start, end = start + tile->num_keys;
    const int64_t width = call->padded_dim, vectors = width / VW;
    const float factor = (call->layer->softcap > 0 ? call->layer->softcap : call->layer->scale) * LOG2_E;
    int64_t first = 0, last = num_rows;
    while (first < last && rows->end_key[first] <= start)
        first++;
    while (first < last && rows->first_key[last - 1] >= end)
        last--;
    if (first == last)
        return;
    float *scores = rows->scores, *kept = rows->kept, *out = rows->out + (base + first) * width;
    Keys keys = find_keys(call, tile, head, rows->columns);
    const float *query = rows->query + (base + first) * QUERY_STRIDE;
    const int64_t items = call->head_bytes / 4;
    if (are_codes(dtype) && last - first > SCORE_ROWS) {
        keys = widen_keys(&keys, items, dtype, rows->values);
        score_wide(last - first, 4 * items, query, &keys, tile->num_keys, scores, ahead);
    } else
        score_rows(dtype, by_pairs, last - first, items, query, &keys, tile->num_keys, scores, ahead);
    const Running running = {
        .max = rows->max + base + first, .sum = rows->sum + base + first, .kept = kept,
        .first = rows->first_key + first, .end = rows->end_key + first, .start = start,
    };
    if (are_codes(dtype))
        multiply_by_scales(call, tile, call->layer->key_scales, head, last - first, scores);
    if (call->layer->softcap > 0)
        cap_scores(last - first, scores, call->layer->scale / call->layer->softcap);
    weigh_rows(last - first, scores, factor, &running);
    if (are_codes(dtype))
        multiply_by_scales(call, tile, call->layer->value_scales, head, last - first, scores);
    const int in_place = width == call->layer->value_dim && (dtype == FLOAT32 || last - first <= ROW_BLOCK);
    const Values values = find_values(call, tile, head, dtype, in_place, rows);
    if (in_place)
        add_values(dtype, last - first, vectors, scores, kept, &values, out, ahead);
    else
        add_wide(last - first, vectors, scores, kept, &values, out, ahead);
}

/* The factor of a row's weighted values at its end.  A sink joins the row there as one more score; `max` and the sink
   are in units of log 2. */
INLINE float last_factor(const Layer *layer, int64_t head, float max, float sum)
{
    if (!layer->sinks)
        return 1.0f / sum;
    const float sink = layer->sinks[head] * LOG2_E, top = max > sink ? max : sink;
    const float kept = exp2_vector(splat(max - top))[0];
    return kept / (sum * kept + exp2_vector(splat(sink - top))[0]);
}

INLINE void write_row(const Call *call, const Task *task, int64_t head, int64_t row, float *out, float max, float sum)
{
    const Layer *layer = call->layer;
    const int64_t query_head = head * call->group + within_group(call, row);
    const int64_t place = (token_of(call, task, row) * layer->num_heads + query_head) * layer->value_dim;
    const float factor = last_factor(layer, query_head, max, sum);
    for (int64_t i = 0; i < call->padded_dim; i += VW)
        store_vector(out + i, load_vector(out + i) * factor);
    narrow_row(call->out + place * item_bytes(layer->dtype), out, layer->value_dim, (int)layer->dtype);
}

/* Ends a task: its rows' results, or one range's part of them. */
static void end_rows(const Call *call, const Task *task, float *partial, Rows *rows)
{
    const int64_t width = call->padded_dim;
    int64_t r = 0;
    for (int64_t head = task->first_head; head < task->end_head; head++)
        for (int64_t row = task->first_row; row < task->end_row; row++, r++) {
            if (task->part < 0) {
                write_row(call, task, head, row, rows->out + r * width, rows->max[r], rows->sum[r]);
                continue;
            }
            float *to = partial + part_of(call, task, task->part, head, row) * (width + 2);
            memcpy(to, rows->out + r * width, width * sizeof(float));
            to[width] = rows->max[r];
            to[width + 1] = rows->sum[r];
        }
}

/* Runs `count` tasks of the same rows, whose queries are read once.  `dtype` is the cache's.  While a task's last tile
   is computed, the next task's first one is fetched; `following` comes after the last task, and may be NULL. */
INLINE void attend(const Call *call, const Task *task, int64_t count, const Task *following, float *partial,
                   const int dtype, const int by_pairs)
{
    Rows rows;
    Tile tiles[2], *tile = &tiles[0], *next = &tiles[1];
    read_rows(call, task, &rows);
    find_tile(call, task, task->first_key, tile);
    for (const Task *end = task + count; task < end; task++) {
        begin_rows(call, task, partial, &rows);
        for (int is_last = 0; !is_last;) {
            const Task *next_task = task;
            find_tile(call, task, tile->start + tile->num_keys, next);
            is_last = next->num_keys == 0;
            if (is_last && (task + 1 < end || following)) {
                next_task = task + 1 < end ? task + 1 : following;
                find_tile(call, next_task, next_task->first_key, next);
            }
            Ahead ahead = next_rows(call, next_task, next);
            for (int64_t head = task->first_head; head < task->end_head; head++)
                attend_tile(call, task, dtype, by_pairs, &rows, head, tile, &ahead);
            Tile *const done = tile;
            tile = next, next = done;
        }
        end_rows(call, task, partial, &rows);
    }
}

/* Separate code for each type of cache. */
#define ATTEND(name, dtype, by_pairs)                                                                             \
    static void name(const Call *call, const Task *task, int64_t count, const Task *following, float *partial)     \
    {                                                                                                              \
        attend(call, task, count, following, partial, dtype, by_pairs);                                            \
    }
ATTEND(attend_float32, FLOAT32, 0)
ATTEND(attend_bfloat16, BFLOAT16, 0)
ATTEND(attend_float16, FLOAT16, 0)
ATTEND(attend_pairs, BFLOAT16, 1)
ATTEND(attend_int8, INT8_CODES, 0)
ATTEND(attend_e4m3, E4M3_CODES, 0)

static void run_tasks(const Call *call, const Task *task, int64_t count, const Task *following, float *partial)
{
    if (MULTIPLIES_BFLOAT16 && call->by_pairs) {
        attend_pairs(call, task, count, following, partial);
        return;
    }
    switch (call->layer->cache_dtype) {
    case FLOAT32: attend_float32(call, task, count, following, partial); break;
    case BFLOAT16: attend_bfloat16(call, task, count, following, partial); break;
    case FLOAT16: attend_float16(call, task, count, following, partial); break;
    case INT8_CODES: attend_int8(call, task, count, following, partial); break;
    default: attend_e4m3(call, task, count, following, partial);
    }
}
