/* The products of attention, for blocks of rows: scores, softmax weights, weighted values. */
#pragma once

#include "attention_types.h"

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

