/* The products of attention, for blocks of rows: scores, softmax weights, weighted values. */
#pragma once

#include "attention_types.h"

/* The values of keys `begin` to `end` of a tile; `places` are in bytes from `first`. */
typedef struct {
    const char *first;
    const int64_t *places;
    int64_t begin, end;
} Values;

/* Keys and values that will be needed soon, fetched piece by piece between other work, in the order of memory: all keys
   of a block that lie side by side, then those of the next head.  Fetched all at once, they would wait for each other.
   They go to the second-level cache, because the first has no room for two tiles. */
typedef struct {
    const char *keys, *values;
    const int64_t *places;
    int64_t num_keys, num_heads, head_stride, piece_bytes;
    int64_t run, key, head; /* its position: the first of the keys side by side, one of them, a head */
} Ahead;

INLINE void fetch_piece(Ahead *ahead)
{
    if (ahead->key >= ahead->num_keys)
        return;
    const int64_t place = ahead->places[ahead->key], first = place + ahead->head * ahead->head_stride;
    for (int64_t byte = first; byte < first + ahead->piece_bytes; byte += CACHE_LINE) {
        __builtin_prefetch(ahead->keys + byte, 0, 2);
        if (ahead->values != ahead->keys)
            __builtin_prefetch(ahead->values + byte, 0, 2);
    }
    ahead->key++;
    if (ahead->key < ahead->num_keys && ahead->places[ahead->key] == place + ahead->piece_bytes)
        return;
    if (++ahead->head < ahead->num_heads) {
        ahead->key = ahead->run;
        return;
    }
    ahead->head = 0;
    ahead->run = ahead->key;
}

/* A tile's keys: `columns[i]`, VW of them, `stride` floats from one item to the next. */
typedef struct {
    const float *columns[TILE / VW];
    int64_t stride;
} Keys;

/* Adds the product of an item of VW keys and the query's item; an item has one number, two, or four codes. */
INLINE vf add_item(vf sum, vf key, const float *query, const int dtype, const int by_pairs)
{
    if (by_pairs)
        return add_pair_products(sum, splat(query[0]), key);
    if (dtype == FLOAT32)
        return sum + key * query[0];
    const vu both = (vu)key;
    if (are_codes(dtype)) {
#pragma GCC unroll 4
        for (int n = 0; n < 4; n++)
            sum += code_values(both << (24 - 8 * n), dtype) * query[n];
        return sum;
    }
    if (dtype == BFLOAT16)
        return sum + (vf)(both << 16) * query[0] + (vf)(both & 0xffff0000) * query[1];
    const vh halves[2] = {__builtin_convertvector(both & 0xffff, vh), __builtin_convertvector(both >> 16, vh)};
    sum += load_float16((const uint16_t *)&halves[0]) * query[0];
    return sum + load_float16((const uint16_t *)&halves[1]) * query[1];
}

/* scores[r] = row r of `query` times 2 * VW keys, while `num_pieces` are fetched. */
INLINE void score_block(const int rows, const int dtype, const int by_pairs, int64_t items, const float *query,
                        const float *const *columns, int64_t stride, float *scores, int64_t num_pieces, Ahead *ahead)
{
    vf sums[SCORE_ROWS][2] = {0};
    const int64_t step = by_pairs ? 1 : 4 / item_bytes(dtype), parts = larger(1, num_pieces);
    const float *first = columns[0], *second = columns[1];
    for (int64_t part = 0; part < parts; part++) {
        if (num_pieces)
            fetch_piece(ahead);
        int64_t count = (part + 1) * items / parts - part * items / parts;
        for (; count > 0; count--, first += stride, second += stride, query += step) {
            const vf key[2] = {load_vector(first), load_vector(second)};
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
                for (int k = 0; k < 2; k++)
                    sums[r][k] = add_item(sums[r][k], key[k], query + r * QUERY_STRIDE, dtype, by_pairs);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
        for (int k = 0; k < 2; k++)
            store_vector(scores + r * TILE + k * VW, sums[r][k]);
}

#define SCORE_BLOCK(n)                                                                                               \
    case n:                                                                                                          \
        score_block(n, dtype, by_pairs, items, query + r * QUERY_STRIDE, keys->columns + k / VW, keys->stride,       \
                    scores + r * TILE + k, r == 0 ? VW : 0, ahead);                                                  \
        break

/* Half of the next tile is fetched here, the other half while values are added. */
INLINE void score_rows(const int dtype, const int by_pairs, int64_t rows, int64_t items, const float *query,
                       const Keys *keys, int64_t num_keys, float *scores, Ahead *ahead)
{
    for (int64_t k = 0; k < num_keys; k += 2 * VW)
        for (int64_t r = 0; r < rows; r += SCORE_ROWS)
            switch (smaller(rows - r, SCORE_ROWS)) {
                SCORE_BLOCK(1);
                SCORE_BLOCK(2);
                SCORE_BLOCK(3);
                SCORE_BLOCK(4);
#if VW == 16
                SCORE_BLOCK(5);
                SCORE_BLOCK(6);
                SCORE_BLOCK(7);
                SCORE_BLOCK(8);
#endif
            }
}

/* The state of a head's rows: the largest score, the sum of the weights, and `kept`, the factor by which one more tile
   scales their results so far.  Of that tile a row sees the keys from `first` to `end`, which are positions, as `start`
   is. */
typedef struct {
    float *max, *sum, *kept;
    const int64_t *first, *end;
    int64_t start;
} Running;

/* Replaces the scores of some rows by tanh(score * factor). */
static void cap_scores(int64_t rows, float *scores, float factor)
{
    for (int64_t i = 0; i < rows * TILE; i += VW)
        store_vector(scores + i, tanh_vector(load_vector(scores + i) * factor));
}

/* Makes `score`, one row's scores times `factor`, -inf where hidden unless it `sees_all`; returns each lane's
   largest. */
INLINE vf scale_row(vf *score, const float *scores, float factor, const Running *to, int64_t row, const int sees_all)
{
    vi key;
    for (int i = 0; i < VW; i++)
        key[i] = i;
    vf best = splat(-INFINITY);
#pragma GCC unroll 16
    for (int i = 0; i < TILE / VW; i++, key += VW) {
        score[i] = load_vector(scores + i * VW) * factor;
        if (!sees_all) {
            const vi is_visible =
                (key >= (int32_t)(to->first[row] - to->start)) & (key < (int32_t)(to->end[row] - to->start));
            score[i] = select_vector(is_visible, score[i], splat(-INFINITY));
        }
        best = max_vector(best, score[i]);
    }
    return best;
}

/* Replaces the scores of some rows by weights.  It takes several rows at once, because the operations on one row wait
   for each other. */
INLINE void weigh_some(const int rows, const int sees_all, float *scores, float factor, const Running *to, int64_t row)
{
    vf score[WEIGHT_ROWS][TILE / VW], best[WEIGHT_ROWS], total[WEIGHT_ROWS] = {0};
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
        best[r] = scale_row(score[r], scores + r * TILE, factor, to, row + r, sees_all);
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
        best[r] = max_vector(splat(to->max[row + r]), max_of(best[r]));
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 16
        for (int i = 0; i < TILE / VW; i++) {
            const vf weight = exp2_vector(score[r][i] - best[r]);
            store_vector(scores + r * TILE + i * VW, weight);
            total[r] += weight;
        }
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++) {
        const float kept = exp2_vector(splat(to->max[row + r]) - best[r])[0];
        to->sum[row + r] = to->sum[row + r] * kept + sum_of(total[r])[0];
        to->max[row + r] = best[r][0];
        to->kept[row + r] = kept;
    }
}

INLINE int see_all(const Running *to, int64_t row, int rows)
{
    int all = 1;
    for (int r = 0; r < rows; r++)
        all &= to->first[row + r] <= to->start && to->end[row + r] >= to->start + TILE;
    return all;
}

#define WEIGH(n)                                                                  \
    case n:                                                                       \
        if (see_all(to, row, n))                                                  \
            weigh_some(n, 1, scores + row * TILE, factor, to, row);               \
        else                                                                      \
            weigh_some(n, 0, scores + row * TILE, factor, to, row);               \
        break

/* Replaces the scores of all rows, times `factor`, by weights. */
static void weigh_rows(int64_t rows, float *scores, float factor, const Running *to)
{
    for (int64_t row = 0; row < rows; row += WEIGHT_ROWS)
        switch (smaller(rows - row, WEIGHT_ROWS)) {
            WEIGH(1);
            WEIGH(2);
#if VW == 16
            WEIGH(3);
            WEIGH(4);
#endif
        }
}

/* out[r] = out[r] * kept[r] + weights[r] @ values, for `width` vectors of the rows. */
INLINE void add_block(const int rows, const int width, const int dtype, int64_t vectors, const float *weights,
                      const float *kept, const Values *values, int64_t first, float *out, Ahead *ahead)
{
    vf sums[ROW_BLOCK][DIM_BLOCK];
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int i = 0; i < width; i++)
            sums[r][i] = load_vector(out + (r * vectors + first + i) * VW) * kept[r];
    for (int64_t k = values->begin; k < values->end; k++) {
        vf value[DIM_BLOCK];
        if (first == 0 && k % 2)
            fetch_piece(ahead);
#pragma GCC unroll 4
        for (int i = 0; i < width; i++)
            value[i] = load_items(values->first + values->places[k], (first + i) * VW, dtype);
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
            for (int i = 0; i < width; i++)
                sums[r][i] += value[i] * weights[r * TILE + k];
    }
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int i = 0; i < width; i++)
            store_vector(out + (r * vectors + first + i) * VW, sums[r][i]);
}

INLINE void add_rows(const int rows, const int dtype, int64_t vectors, const float *weights, const float *kept,
                     const Values *values, float *out, Ahead *ahead)
{
    int64_t first = 0;
    for (; first + DIM_BLOCK <= vectors; first += DIM_BLOCK)
        add_block(rows, DIM_BLOCK, dtype, vectors, weights, kept, values, first, out, ahead);
    for (; first + 2 <= vectors; first += 2)
        add_block(rows, 2, dtype, vectors, weights, kept, values, first, out, ahead);
    for (; first < vectors; first++)
        add_block(rows, 1, dtype, vectors, weights, kept, values, first, out, ahead);
}

#define ADD_ROWS(n) case n: add_rows(n, dtype, vectors, w, kept + r, values, to, ahead); break

INLINE void add_values(const int dtype, int64_t rows, int64_t vectors, const float *weights, const float *kept,
                       const Values *values, float *out, Ahead *ahead)
{
    for (int64_t r = 0; r < rows; r += ROW_BLOCK) {
        const float *w = weights + r * TILE;
        float *to = out + r * vectors * VW;
        switch (smaller(rows - r, ROW_BLOCK)) {
            ADD_ROWS(1);
            ADD_ROWS(2);
            ADD_ROWS(3);
            ADD_ROWS(4);
#if VW == 16
            ADD_ROWS(5);
            ADD_ROWS(6);
#endif
        }
    }
}
