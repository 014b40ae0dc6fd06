/* DeepSeek sparse attention: index queries and keys, and the choice of keys; kernels/attention/index_keys.py has the
   formulas. */

#include "rope_pairs.h"
#include "tape.h"
#include <stdlib.h>

enum { MAX_INDEX_DIM = 256, MAX_INDEX_ITEMS = 1 << 14, HEAD_BLOCK = 8, BITS = 8 };

/* Items of index queries times keys below which a second thread would cost more than it saves. */
enum { MIN_PARALLEL_PRODUCTS = 1 << 15 };

/* The cache of index keys: rows of `dim` items in blocks of `block_size`, which are `block_bytes` apart, and the scales
   of codes, whose blocks are `scale_bytes` apart. */
typedef struct {
    char *rows, *scales;
    int64_t block_bytes, scale_bytes, block_size, dim, dtype;
} IndexCache;

INLINE char *index_row(const IndexCache *cache, int64_t slot)
{
    const int64_t bytes = cache->dim * item_bytes((int)cache->dtype);
    return cache->rows + slot / cache->block_size * cache->block_bytes + slot % cache->block_size * bytes;
}

INLINE char *index_scale(const IndexCache *cache, int64_t slot)
{
    const int64_t offset = slot % cache->block_size * (int64_t)sizeof(float);
    return cache->scales + slot / cache->block_size * cache->scale_bytes + offset;
}

/* The `dim` items at `key`, in place: less their mean, divided by their deviation, times `weight`, plus `bias`. */
INLINE void norm_key(char *key, const char *weight, const char *bias, int64_t dim, float eps, const int dtype)
{
    vf sum = splat(0), squares = splat(0);
    for (int64_t i = 0; i < dim; i += VW)
        sum += load_some(key, i, dim, dtype);
    const float mean = sum_of(sum)[0] / (float)dim;
    float apart[MAX_INDEX_DIM + VW];
    widen_row(apart, key, dim, dtype);
    for (int64_t i = 0; i < dim; i++)
        apart[i] -= mean;
    for (int64_t i = 0; i < dim; i += VW) {
        const vf item = load_some(apart, i, dim, FLOAT32);
        squares += item * item;
    }
    const float factor = 1.0f / sqrtf(sum_of(squares)[0] / (float)dim + eps);
    for (int64_t i = 0; i < dim; i += VW)
        store_some(key, i, dim,
                   load_vector(apart + i) * factor * load_some(weight, i, dim, dtype) + load_some(bias, i, dim, dtype),
                   dtype);
}

/* queries (tokens, heads, dim) and keys (tokens, dim), contiguous, in place; keys also go to `slots` (tokens,) of the
   cache, unless `rows` is NULL.  `table` (positions, rope): cosines, then sines; the first `rope` items of a head
   turn. */
TAPED int prepare_index(char *queries, char *keys, const int64_t *positions, const char *table, const char *weight,
                        const char *bias, float eps, int64_t is_interleaved, int64_t num_tokens, int64_t num_heads,
                        int64_t dim, int64_t rope, char *rows, char *scales, int64_t block_bytes, int64_t scale_bytes,
                        int64_t block_size, int64_t cache_dtype, const int64_t *slots, int64_t dtype,
                        int64_t num_threads)
{
    const IndexCache cache = {rows, scales, block_bytes, scale_bytes, block_size, dim, cache_dtype};
    const int64_t size = item_bytes((int)dtype), work = num_tokens * (num_heads + 1) * dim;
#pragma omp parallel for num_threads((int)num_threads) if (num_threads > 1 && num_tokens > 1 &&                        \
                                                               work >= MIN_PARALLEL_PRODUCTS)
    for (int64_t token = 0; token < num_tokens; token++) {
        char *key = keys + token * dim * size;
        float cosines_sines[MAX_ROPE + VW];
        widen_row(cosines_sines, table + positions[token] * rope * size, rope, (int)dtype);
        for (int64_t head = 0; head < num_heads; head++)
            FOR_DTYPE(turn_items(queries + (token * num_heads + head) * dim * size, cosines_sines, rope, is_interleaved,
                                 1, TYPE))
        FOR_DTYPE(norm_key(key, weight, bias, dim, eps, TYPE))
        FOR_DTYPE(turn_items(key, cosines_sines, rope, is_interleaved, 1, TYPE))
        if (rows && slots[token] >= 0)
            store_row(index_row(&cache, slots[token]), (int)cache_dtype, index_scale(&cache, slots[token]), key,
                      (int)dtype, dim);
    }
    return 0;
}

/* Numbers in the order of the scores: the largest is the best. */
INLINE uint32_t ordered(float score)
{
    uint32_t bits;
    score += 0.0f; /* -0 is 0 */
    memcpy(&bits, &score, 4);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

/* The scores of VW keys, `columns` (dim, VW) of which are one next to the other: heads in their order, so that a score
   does not depend on the other keys. */
INLINE vf score_keys(const float *queries, const float *weights, int64_t num_heads, int64_t dim, const float *columns)
{
    vf total = splat(0);
    for (int64_t head = 0; head < num_heads; head += HEAD_BLOCK) {
        const int64_t count = smaller(HEAD_BLOCK, num_heads - head);
        vf sums[HEAD_BLOCK] = {0};
        const float *own[HEAD_BLOCK];
        for (int64_t h = 0; h < HEAD_BLOCK; h++)
            own[h] = queries + (head + smaller(h, count - 1)) * dim;
        for (int64_t d = 0; d < dim; d++) {
            const vf items = load_vector(columns + d * VW);
#pragma GCC unroll 8
            for (int h = 0; h < HEAD_BLOCK; h++)
                sums[h] = multiply_add(sums[h], items, splat(own[h][d]));
        }
        for (int64_t h = 0; h < count; h++)
            total = multiply_add(total, max_vector(splat(0), sums[h]), splat(weights[head + h]));
    }
    return total;
}

/* Scores of keys `first` to `first + VW`, those that exist, in order of `blocks`. */
INLINE void score_tile(const IndexCache *cache, const int32_t *blocks, int64_t first, int64_t num_keys,
                       const float *queries, const float *weights, int64_t num_heads, uint32_t *scores, const int dtype)
{
    const int64_t dim = cache->dim, count = smaller(VW, num_keys - first);
    float columns[MAX_INDEX_DIM * VW];
    const char *row[VW];
    float scale[VW];
    for (int64_t i = 0; i < VW; i++) {
        const int64_t key = first + smaller(i, count - 1);
        const int64_t slot = blocks[key / cache->block_size] * cache->block_size + key % cache->block_size;
        row[i] = index_row(cache, slot);
        if (are_codes(dtype))
            memcpy(scale + i, index_scale(cache, slot), sizeof(float));
    }
    for (int64_t u = 0; u < dim; u += VW) {
        vf items[VW];
        for (int i = 0; i < VW; i++)
            items[i] = load_some(row[i], u, dim, dtype) * (are_codes(dtype) ? scale[i] : 1);
        transpose(items);
        for (int i = 0; i < smaller(VW, dim - u); i++)
            store_vector(columns + (u + i) * VW, items[i]);
    }
    const vf found = score_keys(queries, weights, num_heads, dim, columns);
    for (int64_t i = 0; i < count; i++)
        scores[first + i] = ordered(found[i]);
}

/* The positions of the `count` best of `scores` (num_keys), rising; of equal scores the earlier ones. */
static void choose_best(const uint32_t *scores, int64_t num_keys, int64_t count, int32_t *chosen)
{
    uint32_t least = 0, known = 0;
    int64_t num_equal = count; /* of those that begin with the bits `known` of `least`, so many are chosen */
    for (int shift = 32 - BITS; shift >= 0; shift -= BITS) {
        int64_t counts[1 << BITS] = {0};
        for (int64_t key = 0; key < num_keys; key++)
            if ((scores[key] & known) == least)
                counts[scores[key] >> shift & ((1 << BITS) - 1)]++;
        uint32_t digit = (1 << BITS) - 1;
        while (counts[digit] < num_equal)
            num_equal -= counts[digit--];
        least |= digit << shift;
        known |= (uint32_t)((1 << BITS) - 1) << shift;
    }
    for (int64_t key = 0; key < num_keys; key++)
        if (scores[key] > least || (scores[key] == least && num_equal-- > 0))
            *chosen++ = (int32_t)key;
}

/* Scores of one row at a time.  Kept for each thread that calls: as many as its longest request has had keys. */
static _Thread_local uint32_t *kept_scores;
static _Thread_local int64_t score_room;

/* For each row the positions of the keys that it attends to, `chosen` (rows, top_k), and how many, `counts` (rows,):
   all of its `seq_lens` keys, or the best top_k.  queries (rows, heads, dim) and weights (rows, heads) float32, which
   are multiplied by `scale`, are contiguous.  Returns 1 where memory ran out. */
TAPED int choose_keys(const char *queries, const float *weights, float scale, char *rows, char *scales,
                      int64_t block_bytes, int64_t scale_bytes, int64_t block_size, const int32_t *block_table,
                      int64_t table_stride, const int32_t *seq_lens, int32_t *chosen, int32_t *counts, int64_t num_rows,
                      int64_t num_heads, int64_t dim, int64_t top_k, int64_t cache_dtype, int64_t dtype,
                      int64_t num_threads)
{
    const IndexCache cache = {rows, scales, block_bytes, scale_bytes, block_size, dim, cache_dtype};
    float query[MAX_INDEX_ITEMS + VW], weight[MAX_INDEX_ITEMS];
    for (int64_t row = 0; row < num_rows; row++, chosen += top_k) {
        const int64_t num_keys = seq_lens[row], count = smaller(num_keys, top_k);
        const int32_t *blocks = block_table + row * table_stride;
        counts[row] = (int32_t)count;
        if (num_keys <= top_k) {
            for (int64_t key = 0; key < count; key++)
                chosen[key] = (int32_t)key;
            continue;
        }
        if (num_keys > score_room) {
            const int64_t room = num_keys + num_keys / 2;
            uint32_t *const moved = realloc(kept_scores, room * sizeof(uint32_t));
            if (!moved)
                return 1;
            kept_scores = moved, score_room = room;
        }
        widen_row(query, queries + row * num_heads * dim * item_bytes((int)dtype), num_heads * dim, (int)dtype);
        for (int64_t head = 0; head < num_heads; head++)
            weight[head] = weights[row * num_heads + head] * scale;
        const int64_t work = num_keys * num_heads * dim;
        uint32_t *const scores = kept_scores; /* of this thread, which OpenMP's threads fill */
#pragma omp parallel for schedule(static)                                                                              \
    num_threads((int)num_threads) if (num_threads > 1 && work >= MIN_PARALLEL_PRODUCTS)
        for (int64_t first = 0; first < num_keys; first += VW) {
            const int64_t dtype = cache_dtype;
            FOR_CACHE_DTYPE(score_tile(&cache, blocks, first, num_keys, query, weight, num_heads, scores, TYPE))
        }
        choose_best(scores, num_keys, count, chosen);
    }
    return 0;
}
