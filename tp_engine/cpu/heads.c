/* Heads made ready for attention, in place: they are normalised, one by one or all together, and queries and keys
   rotated.

   Each item of a head is divided by the root mean square and multiplied by its weight.  Then the first rotary_dim items
   turn, as halves (a, b),

       (a, b) -> (a cos - b sin, b cos + a sin) */

#include "simd.h"
#include "tape.h"

enum { MAX_HEAD_DIM = 512 };

/* Items below which a second thread would cost more than it saves. */
enum { MIN_PARALLEL_ITEMS = 1 << 14 };

/* What all heads of a token have in common; `weights` NULL: they are not normalised. */
typedef struct {
    const float *cosines_sines;
    const char *weights;
    int64_t dim, rotary_dim;
    float eps, offset;
} Turn;

/* item = item / rms * (weight + offset) of one head. */
INLINE void norm_head(float *item, const char *weights, const Turn *turn, const int dtype)
{
    const int64_t dim = turn->dim;
    float weight[MAX_HEAD_DIM + VW];
    widen_row(weight, weights, dim, dtype);
    if (turn->offset != 0)
        for (int64_t i = 0; i < dim; i += VW)
            store_vector(weight + i, load_vector(weight + i) + turn->offset);
    vf squares = splat(0);
    for (int64_t i = 0; i < dim; i += VW)
        squares += load_vector(item + i) * load_vector(item + i);
    const vf factor = splat(1.0f / sqrtf(sum_of(squares)[0] / (float)dim + turn->eps));
    for (int64_t i = 0; i < dim; i += VW)
        store_vector(item + i, load_vector(item + i) * factor * load_vector(weight + i));
}

/* Turns heads `first` to `end` of one token, in place; float32 inside, rounded once, times `scale`.  Vectors may go
   beyond a half or the end of a head: what they write there is overwritten, or never read. */
INLINE void turn_heads(char *heads, int64_t first, int64_t end, const Turn *turn, float scale, const int dtype)
{
    const int64_t dim = turn->dim, half = turn->rotary_dim / 2, bytes = dim * item_bytes(dtype);
    const float *cosines = turn->cosines_sines, *sines = cosines + half;
    float item[MAX_HEAD_DIM + 2 * VW], turned[MAX_HEAD_DIM + VW];
    for (int64_t head = first; head < end; head++) {
        widen_row(item, heads + head * bytes, dim, dtype);
        store_vector(item + dim, splat(0));
        if (turn->weights)
            norm_head(item, turn->weights + head * bytes, turn, dtype);
        for (int64_t i = 0; i < half; i += VW)
            store_vector(turned + i, load_vector(item + i) * load_vector(cosines + i) -
                                         load_vector(item + half + i) * load_vector(sines + i));
        for (int64_t i = 0; i < half; i += VW)
            store_vector(turned + half + i, load_vector(item + half + i) * load_vector(cosines + i) +
                                                load_vector(item + i) * load_vector(sines + i));
        for (int64_t i = 2 * half; i < dim; i += VW)
            store_vector(turned + i, load_vector(item + i));
        if (scale != 1)
            for (int64_t i = 0; i < dim; i += VW)
                store_vector(turned + i, load_vector(turned + i) * scale);
        narrow_row(heads + head * bytes, turned, dim, dtype);
    }
}

/* `table_row` has rotary_dim items; `scale` is the queries'; `num_values` value heads do not turn. */
INLINE void turn_token(char *heads, int64_t num_heads, int64_t num_kv_heads, int64_t num_values, const char *table_row,
                       Turn turn, float scale, const int dtype)
{
    float cosines_sines[MAX_HEAD_DIM + 2 * VW];
    widen_row(cosines_sines, table_row, turn.rotary_dim, dtype);
    store_vector(cosines_sines + turn.rotary_dim, splat(0));
    turn.cosines_sines = cosines_sines;
    const int64_t num_scaled = scale != 1 ? num_heads : 0;
    if (num_scaled)
        turn_heads(heads, 0, num_scaled, &turn, scale, dtype);
    const int64_t first_value = num_heads + num_kv_heads;
    turn_heads(heads, num_scaled, first_value, &turn, 1, dtype);
    turn.rotary_dim = 0;
    turn_heads(heads, first_value, first_value + num_values, &turn, 1, dtype);
}

/* Prepares the `num_heads` queries, `num_kv_heads` keys and `num_values` values of each token; tokens are `stride`
   elements apart.  Values are only normalised: `num_values` is 0 if they are not. `table` (positions, rotary_dim): the
   cosines of each pair, then the sines; NULL with a rotary_dim of 0: nothing turns. `query_scale` (positions,) or NULL;
   `weights` (heads, head_dim) or NULL: no normalisation. */
TAPED int qk_norm_rope_store(char *heads, int64_t stride, const int64_t *positions, const char *table,
                             int64_t rotary_dim, const float *query_scale, const char *weights, float eps, float offset,
                             int64_t num_tokens, int64_t num_heads, int64_t num_kv_heads, int64_t num_values,
                             int64_t head_dim, int64_t dtype, int64_t num_threads)
{
    const Turn turn = {.weights = weights, .dim = head_dim, .rotary_dim = rotary_dim, .eps = eps, .offset = offset};
    const int64_t bytes = stride * item_bytes((int)dtype), row_bytes = rotary_dim * item_bytes((int)dtype);
    const int64_t num_items = num_tokens * (num_heads + num_kv_heads) * head_dim;
#pragma omp parallel for num_threads((int)num_threads) if (num_threads > 1 && num_tokens > 1 &&                        \
                                                               num_items >= MIN_PARALLEL_ITEMS)
    for (int64_t token = 0; token < num_tokens; token++) {
        const char *row = table ? table + positions[token] * row_bytes : table;
        const float scale = query_scale ? query_scale[positions[token]] : 1;
        char *own = heads + token * bytes;
        FOR_DTYPE(turn_token(own, num_heads, num_kv_heads, num_values, row, turn, scale, TYPE))
    }
    return 0;
}

/* The sum of the squares of some heads: head by head, so that no lane adds up many. */
INLINE float squares_of(const char *heads, int64_t num_heads, int64_t dim, const int dtype)
{
    vf total = splat(0);
    for (int64_t head = 0; head < num_heads; head++, heads += dim * item_bytes(dtype)) {
        vf squares = splat(0);
        for (int64_t i = 0; i < dim; i += VW) {
            const vf item = load_some(heads, i, dim, dtype);
            squares += item * item;
        }
        total += squares;
    }
    return sum_of(total)[0];
}

/* squares (num_tokens, 2): of a token's first `num_heads` heads, and of the `num_kv_heads` after them. */
TAPED int head_squares(const char *heads, int64_t stride, float *squares, int64_t num_tokens, int64_t num_heads,
                       int64_t num_kv_heads, int64_t head_dim, int64_t dtype, int64_t num_threads)
{
    const int64_t size = item_bytes((int)dtype), num_items = num_tokens * (num_heads + num_kv_heads) * head_dim;
#pragma omp parallel for num_threads((int)num_threads) if (num_threads > 1 && num_tokens > 1 &&                        \
                                                               num_items >= MIN_PARALLEL_ITEMS)
    for (int64_t token = 0; token < num_tokens; token++) {
        const char *own = heads + token * stride * size, *keys = own + num_heads * head_dim * size;
        FOR_DTYPE(squares[2 * token] = squares_of(own, num_heads, head_dim, TYPE))
        FOR_DTYPE(squares[2 * token + 1] = squares_of(keys, num_kv_heads, head_dim, TYPE))
    }
    return 0;
}

/* items = items * factor * weight. */
INLINE void weigh_items(char *items, const char *weight, float factor, int64_t count, const int dtype)
{
    for (int64_t i = 0; i < count; i += VW)
        store_some(items, i, count, load_some(items, i, count, dtype) * factor * load_some(weight, i, count, dtype),
                   dtype);
}

/* Divides queries and keys by the root of the mean of `squares` (num_tokens, 2) over `query_width` and `key_width`
   items, and multiplies them by `weights` (num_heads + num_kv_heads, head_dim). */
TAPED int norm_width(char *heads, int64_t stride, const float *squares, const char *weights, int64_t num_tokens,
                     int64_t num_heads, int64_t num_kv_heads, int64_t head_dim, int64_t query_width, int64_t key_width,
                     float eps, int64_t dtype, int64_t num_threads)
{
    const int64_t size = item_bytes((int)dtype), queries = num_heads * head_dim, keys = num_kv_heads * head_dim;
    const int64_t num_items = num_tokens * (queries + keys);
#pragma omp parallel for num_threads((int)num_threads) if (num_threads > 1 && num_tokens > 1 &&                        \
                                                               num_items >= MIN_PARALLEL_ITEMS)
    for (int64_t token = 0; token < num_tokens; token++) {
        char *own = heads + token * stride * size;
        const float by_query = 1.0f / sqrtf(squares[2 * token] / (float)query_width + eps);
        const float by_key = 1.0f / sqrtf(squares[2 * token + 1] / (float)key_width + eps);
        FOR_DTYPE(weigh_items(own, weights, by_query, queries, TYPE))
        FOR_DTYPE(weigh_items(own + queries * size, weights + queries * size, by_key, keys, TYPE))
    }
    return 0;
}
