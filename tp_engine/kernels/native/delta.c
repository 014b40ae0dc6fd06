/* One step of the gated delta rule for each row (kernels/delta_rule.py has the formulas), and gates of attention.

   A task is a key head of a row, with the value heads that it serves.  All in float32; a row's result depends on that row
   alone, and is the same bit by bit with any number of threads. */

#include "simd.h"
#include "tape.h"

#include <string.h>

/* The largest key_dim and value_dim, and the vectors of a state's rows that are worked on together. */
enum { MAX_DIM = 256, TILE = 4, MIN_PARALLEL = 1 << 14 };

typedef struct {
    const float *conv, *decay, *dt_bias, *norm;
    float *inputs, *matrices; /* of slot 0 */
    int64_t inputs_stride, matrices_stride, key_heads, value_heads, key_dim, value_dim, taps;
    float eps;
} Delta;

static float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

static float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

INLINE vf silu(vf x) { return x / (1.0f + exp2_vector(x * -LOG2_E)); }

/* `count` channels from `first` on: their convolution and SiLU, to `out`; the kept inputs move on by one. */
INLINE void convolve(const Delta *d, float *kept, const char *mixed, int64_t first, int64_t count, float *out, const int dtype)
{
    const int64_t channels = 2 * d->key_heads * d->key_dim + d->value_heads * d->value_dim, taps = d->taps;
    const float *const weights = d->conv + first;
    const char *const x = mixed + first * item_bytes(dtype);
    kept += first;
    for (int64_t i = 0; i < count; i += VW) {
        const vf item = load_some(x, i, count, dtype);
        vf sum = splat(0);
        for (int64_t tap = 0; tap + 1 < taps; tap++) {
            float *const place = kept + tap * channels;
            sum += load_some(place, i, count, FLOAT32) * load_some(weights + tap * channels, i, count, FLOAT32);
            const vf next = tap + 2 < taps ? load_some(place + channels, i, count, FLOAT32) : item;
            store_some(place, i, count, next, FLOAT32);
        }
        sum += item * load_some(weights + (taps - 1) * channels, i, count, FLOAT32);
        store_some(out, i, count, silu(sum), FLOAT32);
    }
}

/* Divides a query or a key by its length. */
INLINE void to_length(float *x, int64_t count, float length)
{
    vf squares = splat(0);
    for (int64_t i = 0; i < count; i += VW) {
        const vf item = load_some(x, i, count, FLOAT32);
        squares += item * item;
    }
    multiply_row(x, count, length / sqrtf(sum_of(squares)[0] + 1e-6f), FLOAT32);
}

/* `n` vectors of a state's rows: `value` becomes the output. */
INLINE void update_tile(float *state, int64_t width, int64_t rows, const float *query, const float *key, float *value,
                        float decay, float beta, const int n)
{
    vf seen[TILE], out[TILE];
    for (int j = 0; j < n; j++)
        seen[j] = out[j] = splat(0);
    for (int64_t i = 0; i < rows; i++)
        for (int j = 0; j < n; j++)
            seen[j] = multiply_add(seen[j], load_vector(state + i * width + j * VW), splat(key[i]));
    for (int j = 0; j < n; j++)
        seen[j] = (load_vector(value + j * VW) - seen[j] * decay) * beta;
    for (int64_t i = 0; i < rows; i++)
        for (int j = 0; j < n; j++) {
            float *const place = state + i * width + j * VW;
            const vf next = multiply_add(load_vector(place) * decay, seen[j], splat(key[i]));
            store_vector(place, next);
            out[j] = multiply_add(out[j], next, splat(query[i]));
        }
    for (int j = 0; j < n; j++)
        store_vector(value + j * VW, out[j]);
}

/* The same of a single column. */
static void update_column(float *state, int64_t width, int64_t rows, const float *query, const float *key, float *value,
                          float decay, float beta)
{
    float seen = 0, out = 0;
    for (int64_t i = 0; i < rows; i++)
        seen += state[i * width] * key[i];
    seen = (*value - seen * decay) * beta;
    for (int64_t i = 0; i < rows; i++) {
        state[i * width] = state[i * width] * decay + seen * key[i];
        out += state[i * width] * query[i];
    }
    *value = out;
}

static void update_state(float *state, int64_t width, int64_t rows, const float *query, const float *key, float *value,
                         float decay, float beta)
{
    int64_t i = 0;
    for (; i + TILE * VW <= width; i += TILE * VW)
        update_tile(state + i, width, rows, query, key, value + i, decay, beta, TILE);
    for (; i + VW <= width; i += VW)
        update_tile(state + i, width, rows, query, key, value + i, decay, beta, 1);
    for (; i < width; i++)
        update_column(state + i, width, rows, query, key, value + i, decay, beta);
}

/* out = x / rms(x) * norm * silu(z). */
INLINE void gated_norm(const Delta *d, const float *x, const char *z, char *out, const int dtype)
{
    const int64_t width = d->value_dim;
    vf squares = splat(0);
    for (int64_t i = 0; i < width; i += VW) {
        const vf item = load_some(x, i, width, FLOAT32);
        squares += item * item;
    }
    const float factor = 1.0f / sqrtf(sum_of(squares)[0] / (float)width + d->eps);
    for (int64_t i = 0; i < width; i += VW) {
        const vf item = load_some(x, i, width, FLOAT32) * factor * load_some(d->norm, i, width, FLOAT32);
        store_some(out, i, width, item * silu(load_some(z, i, width, dtype)), dtype);
    }
}

INLINE void step_key_head(const Delta *d, int64_t head, const char *mixed, const char *gates, int64_t slot, char *out,
                          const int dtype)
{
    const int64_t size = item_bytes(dtype), keys = d->key_heads * d->key_dim, width = d->value_dim;
    const int64_t group = d->value_heads / d->key_heads, z = 2 * keys + d->value_heads * width;
    float query[MAX_DIM], key[MAX_DIM], value[MAX_DIM], numbers[VW];
    float *const kept = d->inputs + slot * d->inputs_stride;
    convolve(d, kept, mixed, head * d->key_dim, d->key_dim, query, dtype);
    convolve(d, kept, mixed, keys + head * d->key_dim, d->key_dim, key, dtype);
    to_length(query, d->key_dim, 1.0f / sqrtf((float)d->key_dim));
    to_length(key, d->key_dim, 1.0f);
    for (int64_t own = head * group; own < (head + 1) * group; own++) {
        convolve(d, kept, mixed, 2 * keys + own * width, width, value, dtype);
        store_vector(numbers, load_tail(gates, own, 1, dtype));
        const float beta = sigmoid(numbers[0]);
        store_vector(numbers, load_tail(gates, d->value_heads + own, 1, dtype));
        const float decay = expf(d->decay[own] * softplus(numbers[0] + d->dt_bias[own]));
        float *const state = d->matrices + slot * d->matrices_stride + own * d->key_dim * width;
        update_state(state, width, d->key_dim, query, key, value, decay, beta);
        gated_norm(d, value, mixed + (z + own * width) * size, out + own * width * size, dtype);
    }
}

/* mixed (rows, ...), gates (rows, 2 value_heads), so many elements from row to row; slots (rows), -1 for padding, whose output
   is 0; out (rows, value_heads * value_dim); the rest as in Delta. */
int delta_step(const float *conv, const float *decay, const float *dt_bias, const float *norm, float eps, float *inputs,
               float *matrices, int64_t inputs_stride, int64_t matrices_stride, int64_t key_heads, int64_t value_heads, int64_t key_dim, int64_t value_dim,
               int64_t taps, const char *mixed, int64_t mixed_stride, const char *gates, int64_t gates_stride,
               const int32_t *slots, char *out, int64_t rows, int64_t dtype, int64_t num_threads)
{
    const Delta d = {conv, decay, dt_bias, norm, inputs, matrices, inputs_stride, matrices_stride,
                     key_heads, value_heads, key_dim, value_dim, taps, eps};
    const int64_t width = value_heads * value_dim, size = item_bytes((int)dtype), tasks = rows * key_heads;
#pragma omp parallel for num_threads((int)num_threads) if (num_threads > 1 && tasks > 1 && rows * width * key_dim >= MIN_PARALLEL)
    for (int64_t task = 0; task < tasks; task++) {
        const int64_t row = task / key_heads, head = task % key_heads, own = width / key_heads * size;
        const char *const x = mixed + row * mixed_stride * size, *const of_row = gates + row * gates_stride * size;
        if (slots[row] < 0)
            memset(out + (row * key_heads + head) * own, 0, own);
        else
            FOR_DTYPE(step_key_head(&d, head, x, of_row, slots[row], out + row * width * size, TYPE))
    }
    return 0;
}

/* x (rows, width) times the sigmoid of gate (rows, width), whose rows are `stride` elements apart, in place. */
int sigmoid_gate(char *x, const char *gate, int64_t stride, int64_t rows, int64_t width, int64_t dtype, int64_t num_threads)
{
    const int64_t size = item_bytes((int)dtype);
#pragma omp parallel for num_threads((int)num_threads) if (num_threads > 1 && rows > 1 && rows * width >= MIN_PARALLEL)
    for (int64_t row = 0; row < rows; row++) {
        char *const to = x + row * width * size;
        const char *const from = gate + row * stride * size;
        for (int64_t i = 0; i < width; i += VW)
            FOR_DTYPE(store_some(to, i, width,
                                 load_some(to, i, width, TYPE) / (1.0f + exp2_vector(load_some(from, i, width, TYPE) * -LOG2_E)),
                                 TYPE))
    }
    return 0;
}

int play_delta_step(const Word *a)
{
    return delta_step(a[0].pointer, a[1].pointer, a[2].pointer, a[3].pointer, a[4].number, a[5].pointer, a[6].pointer,
                      a[7].integer, a[8].integer, a[9].integer, a[10].integer, a[11].integer, a[12].integer, a[13].integer,
                      a[14].pointer, a[15].integer, a[16].pointer, a[17].integer, a[18].pointer, a[19].pointer, a[20].integer,
                      a[21].integer, a[22].integer);
}

int play_sigmoid_gate(const Word *a)
{
    return sigmoid_gate(a[0].pointer, a[1].pointer, a[2].integer, a[3].integer, a[4].integer, a[5].integer, a[6].integer);
}
