/* Queries and keys made ready for attention, in place: each head is normalised and rotated.

   Of a head, as halves (a, b), each item is divided by the root mean square and multiplied by its weight, then

       (a, b) -> (a cos - b sin, b cos + a sin) */

#include "simd.h"
#include "tape.h"

enum { MAX_HEAD_DIM = 256 };

/* Items below which a second thread would cost more than it saves. */
enum { MIN_PARALLEL_ITEMS = 1 << 14 };

/* The query and key heads of one token, in place; float32 inside, rounded once.  Vectors that go beyond a half or the end of a head
   bring nothing: what they write is overwritten, or never read. */
INLINE void turn_heads(char *heads, int64_t num_heads, int64_t dim, const float *cosines_sines, const char *weights, float eps,
                       const int dtype)
{
    const int64_t half = dim / 2, bytes = dim * item_bytes(dtype);
    const float *cosines = cosines_sines, *sines = cosines_sines + half;
    float item[MAX_HEAD_DIM + 2 * VW], weight[MAX_HEAD_DIM + VW], turned[MAX_HEAD_DIM + VW];
    for (int64_t head = 0; head < num_heads; head++, heads += bytes) {
        widen_row(item, heads, dim, dtype);
        store_vector(item + dim, splat(0));
        if (weights) {
            widen_row(weight, weights + head * bytes, dim, dtype);
            vf squares = splat(0);
            for (int64_t i = 0; i < dim; i += VW)
                squares += load_vector(item + i) * load_vector(item + i);
            const vf factor = splat(1.0f / sqrtf(sum_of(squares)[0] / (float)dim + eps));
            for (int64_t i = 0; i < dim; i += VW)
                store_vector(item + i, load_vector(item + i) * factor * load_vector(weight + i));
        }
        for (int64_t i = 0; i < half; i += VW)
            store_vector(turned + i, load_vector(item + i) * load_vector(cosines + i) -
                                         load_vector(item + half + i) * load_vector(sines + i));
        for (int64_t i = 0; i < half; i += VW)
            store_vector(turned + half + i, load_vector(item + half + i) * load_vector(cosines + i) +
                                                load_vector(item + i) * load_vector(sines + i));
        narrow_row(heads, turned, dim, dtype);
    }
}

INLINE void turn_token(char *heads, int64_t num_heads, int64_t dim, const char *table_row, const char *weights, float eps,
                       const int dtype)
{
    float cosines_sines[MAX_HEAD_DIM + 2 * VW];
    widen_row(cosines_sines, table_row, dim, dtype);
    store_vector(cosines_sines + dim, splat(0));
    turn_heads(heads, num_heads, dim, cosines_sines, weights, eps, dtype);
}

/* The first `num_heads` of each token's heads, `stride` elements from token to token; `table` (positions, head_dim): the cosines of each pair, then the sines; `weights` (num_heads, head_dim) or NULL: no normalisation. */
int prepare_heads(char *heads, int64_t stride, const int64_t *positions, const char *table, const char *weights, float eps,
                  int64_t num_tokens, int64_t num_heads, int64_t head_dim, int64_t dtype, int64_t num_threads)
{
    const int64_t bytes = stride * item_bytes((int)dtype), num_items = num_tokens * num_heads * head_dim;
#pragma omp parallel for num_threads((int)num_threads) if (num_threads > 1 && num_tokens > 1 && num_items >= MIN_PARALLEL_ITEMS)
    for (int64_t token = 0; token < num_tokens; token++) {
        const char *row = table + positions[token] * head_dim * item_bytes((int)dtype);
        char *own = heads + token * bytes;
        FOR_DTYPE(turn_token(own, num_heads, head_dim, row, weights, eps, TYPE))
    }
    return 0;
}

int play_prepare_heads(const Word *a)
{
    return prepare_heads(a[0].pointer, a[1].integer, a[2].pointer, a[3].pointer, a[4].pointer, a[5].number, a[6].integer,
                         a[7].integer, a[8].integer, a[9].integer, a[10].integer);
}
