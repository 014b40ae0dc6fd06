/* Latent attention's small operations: kernels/attention/latents.py has the formulas and the names. */

#include "rope_pairs.h"
#include "tape.h"

enum { MAX_NOPE = 512, MAX_VALUE = 512 };

/* Tokens whose products share what is read of `up`, and vectors, or rows of `up`, that are in registers with them. */
enum { TOKENS = 4, BLOCK = 4 };

/* Products below which a second thread would cost more than it saves. */
enum { MIN_PARALLEL_PRODUCTS = 1 << 14 };

/* The `rank` items at `row` divided by their root mean square, times `weight`, in place. */
INLINE void norm_latent(char *row, const char *weight, int64_t rank, float eps, const int dtype)
{
    vf squares = splat(0);
    for (int64_t i = 0; i < rank; i += VW) {
        const vf item = load_some(row, i, rank, dtype);
        squares += item * item;
    }
    const vf factor = splat(1.0f / sqrtf(sum_of(squares)[0] / (float)rank + eps));
    for (int64_t i = 0; i < rank; i += VW)
        store_some(row, i, rank, load_some(row, i, rank, dtype) * factor * load_some(weight, i, rank, dtype), dtype);
}

/* query (tokens, heads, nope + rope) and rows (tokens, rank + rope), in place; tokens are `query_stride` and
   `row_stride` elements apart.  `table` (positions, rope): cosines, then sines; `query_scale` (positions,) or NULL.
   Without `positions` nothing turns. */
TAPED int prepare_latents(char *query, int64_t query_stride, char *rows, int64_t row_stride, const int64_t *positions,
                          const char *table, const float *query_scale, const char *weight, float eps,
                          int64_t is_interleaved, int64_t num_tokens, int64_t num_heads, int64_t nope, int64_t rope,
                          int64_t rank, int64_t dtype, int64_t num_threads)
{
    const int64_t size = item_bytes((int)dtype), dim = nope + rope, work = num_tokens * (num_heads * dim + rank);
#pragma omp parallel for num_threads((int)num_threads) if (num_threads > 1 && num_tokens > 1 &&                        \
                                                               work >= MIN_PARALLEL_PRODUCTS)
    for (int64_t token = 0; token < num_tokens; token++) {
        if (!positions) {
            FOR_DTYPE(norm_latent(rows + token * row_stride * size, weight, rank, eps, TYPE))
            continue;
        }
        const int64_t position = positions[token];
        const float scale = query_scale ? query_scale[position] : 1;
        char *heads = query + token * query_stride * size, *row = rows + token * row_stride * size;
        float cosines_sines[MAX_ROPE + VW];
        widen_row(cosines_sines, table + position * rope * size, rope, (int)dtype);
        for (int64_t head = 0; head < num_heads; head++) {
            char *own = heads + head * dim * size;
            FOR_DTYPE(turn_items(own + nope * size, cosines_sines, rope, is_interleaved, scale, TYPE))
            if (query_scale)
                FOR_DTYPE(multiply_row(own, nope, scale, TYPE))
        }
        FOR_DTYPE(norm_latent(row, weight, rank, eps, TYPE))
        FOR_DTYPE(turn_items(row + rank * size, cosines_sines, rope, is_interleaved, 1, TYPE))
    }
    return 0;
}

/* Items `first` to `first + count * VW` of `out` (rank), of some tokens: the sum over d of q[d] times row d of `up`. */
INLINE void absorb_items(const int tokens, const int count, const float (*q)[MAX_NOPE + VW], const char *up,
                         char *const *out, int64_t first, int64_t nope, int64_t rank, const int dtype)
{
    vf sums[TOKENS][BLOCK] = {0};
    for (int64_t d = 0; d < nope; d++) {
        vf row[BLOCK];
#pragma GCC unroll 4
        for (int i = 0; i < count; i++)
            row[i] = load_some(up + d * rank * item_bytes(dtype), first + i * VW, rank, dtype);
#pragma GCC unroll 4
        for (int t = 0; t < tokens; t++)
#pragma GCC unroll 4
            for (int i = 0; i < count; i++)
                sums[t][i] = multiply_add(sums[t][i], row[i], splat(q[t][d]));
    }
#pragma GCC unroll 4
    for (int t = 0; t < tokens; t++)
#pragma GCC unroll 4
        for (int i = 0; i < count; i++)
            store_some(out[t], first + i * VW, rank, sums[t][i], dtype);
}

INLINE void absorb_tokens(const int tokens, const char *const *query, const char *up, char *const *out, int64_t nope,
                          int64_t rope, int64_t rank, const int dtype)
{
    float q[TOKENS][MAX_NOPE + VW];
    const int64_t size = item_bytes(dtype);
    int64_t first = 0;
    for (int t = 0; t < tokens; t++)
        widen_row(q[t], query[t], nope, dtype);
    for (; first + BLOCK * VW <= rank; first += BLOCK * VW)
        absorb_items(tokens, BLOCK, q, up, out, first, nope, rank, dtype);
    for (; first < rank; first += VW)
        absorb_items(tokens, 1, q, up, out, first, nope, rank, dtype);
    for (int t = 0; t < tokens; t++)
        memcpy(out[t] + rank * size, query[t] + nope * size, rope * size);
}

/* BLOCK rows of `up` times each token's mean, to `out`; rows that do not exist are those before them. */
INLINE void release_items(const int tokens, const char *const *mean, const char *const *row,
                          float (*out)[MAX_VALUE + VW], int64_t first, int64_t rank, const int dtype)
{
    vf sums[TOKENS][BLOCK] = {0};
    for (int64_t i = 0; i < rank; i += VW) {
        vf items[BLOCK];
#pragma GCC unroll 4
        for (int v = 0; v < BLOCK; v++)
            items[v] = load_some(row[v], i, rank, dtype);
#pragma GCC unroll 4
        for (int t = 0; t < tokens; t++) {
            const vf own = load_some(mean[t], i, rank, dtype);
#pragma GCC unroll 4
            for (int v = 0; v < BLOCK; v++)
                sums[t][v] = multiply_add(sums[t][v], own, items[v]);
        }
    }
    for (int t = 0; t < tokens; t++)
        for (int v = 0; v < BLOCK; v++)
            out[t][first + v] = sum_of(sums[t][v])[0];
}

INLINE void release_tokens(const int tokens, const char *const *mean, const char *up, char *const *out,
                           int64_t value_dim, int64_t rank, const int dtype)
{
    float values[TOKENS][MAX_VALUE + VW];
    for (int64_t first = 0; first < value_dim; first += BLOCK) {
        const char *row[BLOCK];
        for (int v = 0; v < BLOCK; v++)
            row[v] = up + smaller(first + v, value_dim - 1) * rank * item_bytes(dtype);
        release_items(tokens, mean, row, values, first, rank, dtype);
    }
    for (int t = 0; t < tokens; t++)
        narrow_row(out[t], values[t], value_dim, dtype);
}

#define FOR_TOKENS(count, call)          \
    switch (count) {                     \
    case 1: { enum { N = 1 }; FOR_DTYPE(call) } break; \
    case 2: { enum { N = 2 }; FOR_DTYPE(call) } break; \
    case 3: { enum { N = 3 }; FOR_DTYPE(call) } break; \
    default: { enum { N = TOKENS }; FOR_DTYPE(call) }  \
    }

/* For each head and each few tokens: from `from` (tokens, heads, from_dim), tokens `from_stride` elements apart, to
   `out` (tokens, heads, out_dim).  `up` (heads, nope + value_dim, rank). */
typedef struct {
    const char *from, *up;
    char *out;
    int64_t from_stride, from_dim, out_dim, num_tokens, num_heads, nope, value_dim, rank, dtype, num_threads;
} Maps;

static void run_maps(const Maps *m, const int releases)
{
    const int64_t size = item_bytes((int)m->dtype), groups = (m->num_tokens + TOKENS - 1) / TOKENS, dtype = m->dtype;
    const int64_t work = m->num_tokens * m->num_heads * m->rank * (releases ? m->value_dim : m->nope);
    const int64_t rope = m->from_dim - m->nope;
#pragma omp parallel for schedule(static)                                                                              \
    num_threads((int)m->num_threads) if (m->num_threads > 1 && work >= MIN_PARALLEL_PRODUCTS)
    for (int64_t task = 0; task < m->num_heads * groups; task++) {
        const int64_t head = task / groups, token = task % groups * TOKENS,
                      count = smaller(TOKENS, m->num_tokens - token);
        const char *up = m->up + head * (m->nope + m->value_dim) * m->rank * size, *from[TOKENS];
        char *out[TOKENS];
        for (int64_t t = 0; t < count; t++) {
            from[t] = m->from + ((token + t) * m->from_stride + head * m->from_dim) * size;
            out[t] = m->out + ((token + t) * m->num_heads + head) * m->out_dim * size;
        }
        if (releases)
            FOR_TOKENS(count, release_tokens(N, from, up + m->nope * m->rank * size, out, m->value_dim, m->rank, TYPE))
        else
            FOR_TOKENS(count, absorb_tokens(N, from, up, out, m->nope, rope, m->rank, TYPE))
    }
}

TAPED int absorb_w_uk(const char *query, int64_t stride, const char *up, char *out, int64_t num_tokens,
                      int64_t num_heads, int64_t nope, int64_t rope, int64_t value_dim, int64_t rank, int64_t dtype,
                      int64_t num_threads)
{
    const Maps maps = {query,     up,   out,       stride, nope + rope, rank + rope, num_tokens,
                       num_heads, nope, value_dim, rank,   dtype,       num_threads};
    run_maps(&maps, 0);
    return 0;
}

TAPED int project_w_uv(const char *attended, const char *up, char *out, int64_t num_tokens, int64_t num_heads,
                       int64_t nope, int64_t value_dim, int64_t rank, int64_t dtype, int64_t num_threads)
{
    const Maps maps = {attended,  up,   out,   num_heads * rank, rank, value_dim, num_tokens, num_heads, nope,
                       value_dim, rank, dtype, num_threads};
    run_maps(&maps, 1);
    return 0;
}
