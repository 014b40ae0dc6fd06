/* The gated delta rule for runs of tokens, of which a decode's is one token long, or that and its draft tokens
   (kernels/gated_delta_net.py has the formulas), and gates of attention.

   A task is a key head of a run, with the value heads that it serves.  It takes its tokens in order, a block at a time,
   and within a block each tile of a state's columns goes through all tokens while it is in the first-level cache:

       convolution, lengths   query, key, value (BLOCK, dim)      of a block
       recurrence             tile by tile: value becomes output  state read and written once a token
       norm, gate             to `out`

   In Kimi delta attention (kernels/kda.py) each row of a state decays on its own; there is a value head a key head.

   All in float32.  What is computed for a token does not depend on where runs and blocks begin or end, on other rows,
   or on the number of threads, so a run gives the same bits as its tokens one by one. */

#include "matrix_states.h"
#include "tape.h"

/* `by_row`: Kimi delta attention, in which decays have a `lower_bound`, or 0: none. */
typedef struct {
    CausalConv conv;
    Matrices matrices;
    const float *decay, *dt_bias, *norm;
    float eps, lower_bound;
    int by_row;
} Delta;

/* What a step's tokens bring, and how many elements lie from one token to the next: `mixed` is q, k and v. */
typedef struct {
    const char *mixed, *z, *beta, *decay;
    int64_t mixed_stride, z_stride, beta_stride, decay_stride;
} Tokens;

static float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

/* Divides a query or a key by its length. */
INLINE void to_length(float *x, int64_t count, float length)
{
    multiply_row(x, count, length / sqrtf(squares_of(x, count) + 1e-6f), FLOAT32);
}

/* One token goes into `n` vectors of a state's rows: `change` is what its key adds.  `seen` becomes what the next key,
   if there is one, sees in them. */
INLINE void update_tile(const Block *b, int64_t token, int64_t first, const vf *change, vf *out, vf *seen, const int n,
                        const int has_next, const int by_row)
{
    const float *const before = b->states[token] + first;
    float *const behind = b->states[token + 1] + first;
    const float *const query = b->queries + token * b->rows, *const key = b->keys + token * b->rows;
    const float *const next = (by_row ? b->sights : b->keys) + (token + 1) * b->rows;
    vf decay = splat(b->decay[token]);
    for (int64_t i = 0; i < b->rows; i++) {
        if (by_row)
            decay = splat(b->decays[token * b->rows + i]);
        const vf of_query = splat(query[i]), of_key = splat(key[i]), of_next = splat(has_next ? next[i] : 0);
#pragma GCC unroll 4
        for (int j = 0; j < n; j++) {
            const vf item = multiply_add(load_vector(before + i * b->width + j * VW) * decay, change[j], of_key);
            store_vector(behind + i * b->width + j * VW, item);
            out[j] = multiply_add(out[j], item, of_query);
            if (has_next)
                seen[j] = multiply_add(seen[j], item, of_next);
        }
    }
}

INLINE void run_tile_of(const Block *b, int64_t first, const int n, const int by_row)
{
    vf seen[TILE], change[TILE], out[TILE];
    const float *const state = b->states[0] + first, *const sights = by_row ? b->sights : b->keys;
#pragma GCC unroll 4
    for (int j = 0; j < n; j++)
        seen[j] = splat(0);
    for (int64_t i = 0; i < b->rows; i++)
#pragma GCC unroll 4
        for (int j = 0; j < n; j++)
            seen[j] = multiply_add(seen[j], load_vector(state + i * b->width + j * VW), splat(sights[i]));
    for (int64_t token = 0; token < b->tokens; token++) {
        float *const value = b->values + token * b->width + first;
#pragma GCC unroll 4
        for (int j = 0; j < n; j++) {
            change[j] = multiply_add(load_vector(value + j * VW), seen[j], splat(by_row ? -1 : -b->decay[token]))
                * b->step[token];
            out[j] = seen[j] = splat(0);
        }
        if (token + 1 < b->tokens)
            update_tile(b, token, first, change, out, seen, n, 1, by_row);
        else
            update_tile(b, token, first, change, out, seen, n, 0, by_row);
#pragma GCC unroll 4
        for (int j = 0; j < n; j++)
            store_vector(value + j * VW, out[j]);
    }
}

INLINE void run_tile(const Block *b, int64_t first, const int n)
{
    if (b->decays)
        run_tile_of(b, first, n, 1);
    else
        run_tile_of(b, first, n, 0);
}

static void run_column(const Block *b, int64_t first)
{
    for (int64_t token = 0; token < b->tokens; token++) {
        const float *const before = b->states[token] + first;
        float *const behind = b->states[token + 1] + first;
        const float *const query = b->queries + token * b->rows, *const key = b->keys + token * b->rows;
        float *const value = b->values + token * b->width + first;
        const float *const decays = b->decays ? b->decays + token * b->rows : NULL;
        float seen = 0, out = 0;
        for (int64_t i = 0; i < b->rows; i++)
            seen += before[i * b->width] * key[i] * (decays ? decays[i] : 1);
        seen = (*value - seen * (decays ? 1 : b->decay[token])) * b->step[token];
        for (int64_t i = 0; i < b->rows; i++) {
            behind[i * b->width] = before[i * b->width] * (decays ? decays[i] : b->decay[token]) + seen * key[i];
            out += behind[i * b->width] * query[i];
        }
        *value = out;
    }
}

/* out = x / rms(x) * norm * silu(z), or in Kimi delta attention sigmoid(z). */
INLINE void gated_norm(const Delta *d, const float *x, const char *z, char *out, const int dtype)
{
    const int64_t width = d->matrices.value_dim;
    const float factor = 1.0f / sqrtf(squares_of(x, width) / (float)width + d->eps);
    for (int64_t i = 0; i < width; i += VW) {
        const vf item = load_some(x, i, width, FLOAT32) * factor * load_some(d->norm, i, width, FLOAT32);
        const vf gate = load_some(z, i, width, dtype), wanted = d->by_row ? 1.0f / (1.0f + exp2_vector(gate * -LOG2_E))
                                                                          : silu(gate);
        store_some(out, i, width, item * wanted, dtype);
    }
}

/* The decays and betas of a block's tokens, those of a run from `begin` on, of value head `head`. */
INLINE void read_gates(const Delta *d, Block *b, const Run *run, int64_t begin, const Tokens *t, int64_t head,
                       const int dtype)
{
    const int64_t size = item_bytes(dtype), rows = b->rows;
    float numbers[VW];
    for (int64_t token = 0; token < b->tokens; token++) {
        const int64_t place = place_of(run, begin + token);
        const char *const decay = t->decay + place * t->decay_stride * size;
        store_vector(numbers, load_tail(t->beta + place * t->beta_stride * size, head, 1, dtype));
        b->step[token] = sigmoid(numbers[0]);
        if (!d->by_row) {
            store_vector(numbers, load_tail(decay, head, 1, dtype));
            b->decay[token] = expf(d->decay[head] * softplus(numbers[0] + d->dt_bias[head]));
            continue;
        }
        for (int64_t i = 0; i < rows; i += VW) {
            const vf own = load_some(decay + head * rows * size, i, rows, dtype)
                + load_some(d->dt_bias + head * rows, i, rows, FLOAT32);
            const vf power = d->lower_bound < 0 ? d->lower_bound / (1.0f + exp2_vector(own * (LOG2_E * d->decay[head])))
                                                : d->decay[head] * softplus_vector(own);
            const vf stays = exp2_vector(power * LOG2_E), key = load_some(b->keys + token * rows, i, rows, FLOAT32);
            store_some(b->decays + token * rows, i, rows, stays, FLOAT32);
            store_some(b->sights + token * rows, i, rows, stays * key, FLOAT32);
        }
    }
}

/* `begun` are the matrices of the key head's value heads. */
INLINE void run_key_head(const Delta *d, const Run *run, int64_t head, const Tokens *t, char *out, float *begun,
                         const int dtype)
{
    const Matrices *const of = &d->matrices;
    const int64_t size = item_bytes(dtype), rows = of->key_dim, keys = of->key_heads * rows, width = of->value_dim;
    const int64_t group = of->value_heads / of->key_heads, out_stride = of->value_heads * width;
    const char *const mixed = t->mixed;
    const int64_t stride = t->mixed_stride;
    float queries[BLOCK * MAX_DIM], own_keys[BLOCK * MAX_DIM], values[BLOCK * MAX_DIM];
    float decays[BLOCK * MAX_DIM], sights[BLOCK * MAX_DIM];
    Block b = {.queries = queries, .keys = own_keys, .values = values, .rows = rows, .width = width};
    if (d->by_row)
        b.decays = decays, b.sights = sights;
    for (int64_t begin = 0; begin < run->count; begin += BLOCK) {
        b.tokens = smaller(BLOCK, run->count - begin);
        convolve(&d->conv, run, mixed, stride, begin, b.tokens, head * rows, rows, queries, dtype);
        convolve(&d->conv, run, mixed, stride, begin, b.tokens, keys + head * rows, rows, own_keys, dtype);
        for (int64_t token = 0; token < b.tokens; token++) {
            to_length(queries + token * rows, rows, 1.0f / sqrtf((float)rows));
            to_length(own_keys + token * rows, rows, 1.0f);
        }
        for (int64_t i = 0; i < group; i++) {
            const int64_t own = head * group + i;
            convolve(&d->conv, run, mixed, stride, begin, b.tokens, 2 * keys + own * width, width, values, dtype);
            read_gates(d, &b, run, begin, t, own, dtype);
            place_states(of, &b, run, begin, own, begun + i * rows * width);
            run_block(&b);
            for (int64_t token = 0; token < b.tokens; token++) {
                const int64_t place = place_of(run, begin + token);
                const char *const z = t->z + (place * t->z_stride + own * width) * size;
                gated_norm(d, values + token * width, z, out + (place * out_stride + own * width) * size, dtype);
            }
        }
    }
    if (run->slot >= 0) {
        keep_inputs(&d->conv, run, mixed, stride, head * rows, rows, dtype);
        keep_inputs(&d->conv, run, mixed, stride, keys + head * rows, rows, dtype);
        keep_inputs(&d->conv, run, mixed, stride, 2 * keys + head * group * width, group * width, dtype);
    }
}

/* Returns 0, or 1 if there is no memory for the state of a run that has no slot. */
static int run_task(const Delta *d, const Run *run, int64_t head, const Tokens *t, char *out, int dtype)
{
    const int64_t group = d->matrices.value_heads / d->matrices.key_heads;
    float *const begun = begin_matrices(&d->matrices, run, head * group, group);
    if (!begun)
        return 1;
    FOR_DTYPE(run_key_head(d, run, head, t, out, begun, TYPE))
    end_matrices(run, begun);
    return 0;
}

/* Runs as in run_of; out (tokens, value_heads * value_dim), 0 of padding.  Returns 1 if memory ran out. */
static int run_all(const Delta *d, const Tokens *t, const int32_t *slots, const int32_t *runs, const int64_t *chunks,
                   char *out, int64_t num_runs, int dtype, int num_threads)
{
    const int64_t key_heads = d->matrices.key_heads, width = d->matrices.value_heads * d->matrices.value_dim;
    const int64_t tasks = num_runs * key_heads, own = width / key_heads * item_bytes(dtype);
    const int is_large = chunks || num_runs * width * d->matrices.key_dim >= MIN_PARALLEL;
    int failed = 0;
    /* A head is always the same thread's, so that its matrices stay in that core's cache from step to step. */
#pragma omp parallel for schedule(static, 1) reduction(| : failed)                                                     \
    num_threads(num_threads) if (num_threads > 1 && tasks > 1 && is_large)
    for (int64_t task = 0; task < tasks; task++) {
        const Run run = run_of(task / key_heads, slots, runs, chunks);
        if (!chunks && run.slot < 0)
            memset(out + task * own, 0, own);
        else if (run.count)
            failed |= run_task(d, &run, task % key_heads, t, out, dtype);
    }
    return failed;
}

/* mixed (tokens, ...), which has z behind q, k and v, gates (tokens, 2 value_heads), so many elements from row to row;
   the rest as in Delta and run_all. */
TAPED int gated_delta_net(const float *conv, const float *decay, const float *dt_bias, const float *norm, float eps,
                          float *inputs, float *matrices, int64_t inputs_stride, int64_t matrices_stride,
                          int64_t key_heads, int64_t value_heads, int64_t key_dim, int64_t value_dim, int64_t taps,
                          const char *mixed, int64_t mixed_stride, const char *gates, int64_t gates_stride,
                          const int32_t *slots, const int32_t *runs, const int64_t *chunks, char *out,
                          int64_t num_runs, int64_t dtype, int64_t num_threads)
{
    const int64_t channels = 2 * key_heads * key_dim + value_heads * value_dim, size = item_bytes((int)dtype);
    const Delta d = {{conv, NULL, inputs, inputs_stride, channels, taps},
                     {matrices, matrices_stride, key_heads, value_heads, key_dim, value_dim},
                     decay, dt_bias, norm, eps, 0, 0};
    const Tokens t = {mixed, mixed + channels * size, gates, gates + value_heads * size,
                      mixed_stride, mixed_stride, gates_stride, gates_stride};
    return run_all(&d, &t, slots, runs, chunks, out, num_runs, (int)dtype, (int)num_threads);
}

/* mixed (tokens, channels), beta (tokens, heads), decays and z (tokens, heads * dim); the rest as above.  Heads of keys
   and of values are as many, and as large. */
TAPED int kimi_delta(const float *conv, const float *decay, const float *dt_bias, const float *norm, float eps,
                     float lower_bound, float *inputs, float *matrices, int64_t inputs_stride, int64_t matrices_stride,
                     int64_t key_heads, int64_t value_heads, int64_t key_dim, int64_t value_dim, int64_t taps,
                     const char *mixed, int64_t mixed_stride, const char *beta, int64_t beta_stride,
                     const char *decays, int64_t decays_stride, const char *z, int64_t z_stride,
                     const int32_t *slots, const int32_t *runs, const int64_t *chunks, char *out, int64_t num_runs,
                     int64_t dtype, int64_t num_threads)
{
    const int64_t channels = 2 * key_heads * key_dim + value_heads * value_dim;
    const Delta d = {{conv, NULL, inputs, inputs_stride, channels, taps},
                     {matrices, matrices_stride, key_heads, value_heads, key_dim, value_dim},
                     decay, dt_bias, norm, eps, lower_bound, 1};
    const Tokens t = {mixed, z, beta, decays, mixed_stride, z_stride, beta_stride, decays_stride};
    return run_all(&d, &t, slots, runs, chunks, out, num_runs, (int)dtype, (int)num_threads);
}

/* x (rows, count * dim) times what gate (rows, count) says of each `dim` elements, in place; rows of gate are `stride`
   elements apart. */
TAPED int gate_heads(char *x, const char *gate, int64_t stride, int64_t rows, int64_t count, int64_t dim,
                     int64_t is_softplus, int64_t dtype, int64_t num_threads)
{
    const int64_t item = item_bytes((int)dtype), lanes = dim == 1 ? VW : 1;
#pragma omp parallel for num_threads((int)num_threads) if (num_threads > 1 && rows > 1 &&                              \
                                                               rows * count * dim >= MIN_PARALLEL)
    for (int64_t row = 0; row < rows; row++) {
        char *const to = x + row * count * dim * item;
        const char *const from = gate + row * stride * item;
        for (int64_t first = 0; first < count; first += lanes) {
            vf factor;
            FOR_DTYPE(factor = load_some(from, first, count, TYPE))
            factor = is_softplus ? softplus_vector(factor) : 1.0f / (1.0f + exp2_vector(factor * -LOG2_E));
            const int64_t end = dim == 1 ? smaller(count, first + VW) : (first + 1) * dim;
            if (dim > 1)
                factor = splat(factor[0]);
            for (int64_t i = first * dim; i < end; i += VW)
                FOR_DTYPE(store_some(to, i, end, load_some(to, i, end, TYPE) * factor, TYPE))
        }
    }
    return 0;
}
