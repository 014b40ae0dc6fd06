/* Mamba2's state space layer for runs of tokens (kernels/mamba2.py has the formulas), and the norm of groups behind it.

   A task is some value heads of a run that share a key head.  It takes its tokens in order, a block at a time, and
   within a block each tile of a state's columns goes through all tokens while it is in the first-level cache.  The
   inputs that a run keeps for its next tokens are written when all tasks have read those before it.

   All in float32.  A token's numbers do not depend on where runs and blocks begin or end, on other rows, or on the
   number of threads, so a run gives the same bits as its tokens one by one. */

#include "matrix_states.h"
#include "tape.h"

/* The value heads of a task. */
enum { HEADS = 8 };

typedef struct {
    CausalConv conv;
    Matrices matrices;
    const float *decay, *dt_bias, *skip;
} Mamba;

INLINE void run_tile(const Block *b, int64_t first, const int n)
{
    vf change[TILE], out[TILE];
    for (int64_t token = 0; token < b->tokens; token++) {
        const float *const before = b->states[token] + first;
        float *const behind = b->states[token + 1] + first;
        const float *const query = b->queries + token * b->rows, *const key = b->keys + token * b->rows;
        float *const value = b->values + token * b->width + first;
        const vf decay = splat(b->decay[token]);
#pragma GCC unroll 4
        for (int j = 0; j < n; j++) {
            change[j] = load_vector(value + j * VW);
            out[j] = change[j] * b->skip;
            change[j] = change[j] * b->step[token];
        }
        for (int64_t i = 0; i < b->rows; i++) {
            const vf of_query = splat(query[i]), of_key = splat(key[i]);
#pragma GCC unroll 4
            for (int j = 0; j < n; j++) {
                const vf item = multiply_add(load_vector(before + i * b->width + j * VW) * decay, change[j], of_key);
                store_vector(behind + i * b->width + j * VW, item);
                out[j] = multiply_add(out[j], item, of_query);
            }
        }
#pragma GCC unroll 4
        for (int j = 0; j < n; j++)
            store_vector(value + j * VW, out[j]);
    }
}

static void run_column(const Block *b, int64_t first)
{
    for (int64_t token = 0; token < b->tokens; token++) {
        const float *const before = b->states[token] + first;
        float *const behind = b->states[token + 1] + first;
        const float *const query = b->queries + token * b->rows, *const key = b->keys + token * b->rows;
        float *const value = b->values + token * b->width + first;
        const float change = *value * b->step[token];
        float out = *value * b->skip;
        for (int64_t i = 0; i < b->rows; i++) {
            behind[i * b->width] = before[i * b->width] * b->decay[token] + change * key[i];
            out += behind[i * b->width] * query[i];
        }
        *value = out;
    }
}

/* How far each token of a block goes, and the decay, of value head `head`; `dt` are the block's numbers of the first
   row. */
INLINE void read_steps(const Mamba *m, Block *b, const Run *run, int64_t begin, const char *dt, int64_t stride,
                       int64_t head, const int dtype)
{
    float numbers[VW];
    for (int64_t token = 0; token < b->tokens; token++) {
        store_vector(numbers,
                     load_tail(dt + place_of(run, begin + token) * stride * item_bytes(dtype), head, 1, dtype));
        b->step[token] = softplus(numbers[0] + m->dt_bias[head]);
        b->decay[token] = expf(m->decay[head] * b->step[token]);
    }
    b->skip = m->skip[head];
}

/* `begun` are the matrices of value heads `first` to `first + count - 1`. */
INLINE void run_heads(const Mamba *m, const Run *run, int64_t first, int64_t count, const char *mixed, int64_t stride,
                      float *out, float *begun, const int dtype)
{
    const Matrices *const of = &m->matrices;
    const int64_t size = item_bytes(dtype), rows = of->key_dim, keys = of->key_heads * rows, width = of->value_dim;
    const int64_t own_width = of->value_heads * width, key_head = first / (of->value_heads / of->key_heads);
    const char *const gates = mixed + m->conv.channels * size, *const dt = gates + own_width * size;
    float queries[BLOCK * MAX_DIM], own_keys[BLOCK * MAX_DIM], values[BLOCK * MAX_DIM];
    Block b = {.queries = queries, .keys = own_keys, .values = values, .rows = rows, .width = width};
    for (int64_t begin = 0; begin < run->count; begin += BLOCK) {
        b.tokens = smaller(BLOCK, run->count - begin);
        convolve(&m->conv, run, mixed, stride, begin, b.tokens, key_head * rows, rows, queries, dtype);
        convolve(&m->conv, run, mixed, stride, begin, b.tokens, keys + key_head * rows, rows, own_keys, dtype);
        for (int64_t head = first; head < first + count; head++) {
            convolve(&m->conv, run, mixed, stride, begin, b.tokens, 2 * keys + head * width, width, values, dtype);
            read_steps(m, &b, run, begin, dt, stride, head, dtype);
            place_states(of, &b, run, begin, head, begun + (head - first) * rows * width);
            run_block(&b);
            for (int64_t token = 0; token < b.tokens; token++) {
                const int64_t place = place_of(run, begin + token);
                const char *const z = gates + (place * stride + head * width) * size;
                float *const to = out + place * own_width + head * width;
                for (int64_t i = 0; i < width; i += VW) {
                    const vf item = load_some(values + token * width, i, width, FLOAT32);
                    store_some(to, i, width, item * silu(load_some(z, i, width, dtype)), FLOAT32);
                }
            }
        }
    }
}

/* Returns 0, or 1 if there is no memory for the state of a run that has no slot. */
static int run_task(const Mamba *m, const Run *run, int64_t first, int64_t count, const char *mixed, int64_t stride,
                    float *out, int dtype)
{
    float *const begun = begin_matrices(&m->matrices, run, first, count);
    if (!begun)
        return 1;
    FOR_DTYPE(run_heads(m, run, first, count, mixed, stride, out, begun, TYPE))
    end_matrices(run, begun);
    return 0;
}

/* mixed (tokens, ...), so many elements from row to row; runs as in run_of; out (tokens, value_heads * value_dim), 0 of
   padding; the rest as in Mamba.  Returns 1 if memory ran out. */
TAPED int mamba2(const float *conv, const float *conv_bias, const float *decay, const float *dt_bias, const float *skip,
                 float *inputs, float *matrices, int64_t inputs_stride, int64_t matrices_stride, int64_t key_heads,
                 int64_t value_heads, int64_t key_dim, int64_t value_dim, int64_t taps, const char *mixed,
                 int64_t stride, const int32_t *slots, const int32_t *runs, const int64_t *chunks, float *out,
                 int64_t num_runs, int64_t dtype, int64_t num_threads)
{
    const int64_t row_size = value_heads * value_dim, channels = 2 * key_heads * key_dim + row_size;
    const Mamba m = {{conv, conv_bias, inputs, inputs_stride, channels, taps},
                     {matrices, matrices_stride, key_heads, value_heads, key_dim, value_dim}, decay, dt_bias, skip};
    const int64_t group = value_heads / key_heads, parts = (group + HEADS - 1) / HEADS, row_tasks = key_heads * parts;
    const int64_t tasks = num_runs * row_tasks, elements = num_runs * row_size * key_dim;
    int failed = 0;
#pragma omp parallel num_threads((int)num_threads) if (num_threads > 1 && (chunks || elements >= MIN_PARALLEL))
    {
#pragma omp for schedule(dynamic) reduction(| : failed)
        for (int64_t task = 0; task < tasks; task++) {
            const int64_t number = task / row_tasks, key_head = task % row_tasks / parts, part = task % parts * HEADS;
            const Run run = run_of(number, slots, runs, chunks);
            const int64_t first = key_head * group + part, count = smaller(HEADS, group - part);
            if (!chunks && run.slot < 0)
                memset(out + number * row_size + first * value_dim, 0, count * value_dim * sizeof *out);
            else if (run.count)
                failed |= run_task(&m, &run, first, count, mixed, stride, out, (int)dtype);
        }
#pragma omp for
        for (int64_t number = 0; number < num_runs; number++) {
            const Run run = run_of(number, slots, runs, chunks);
            if (run.slot >= 0 && run.count)
                FOR_DTYPE(keep_inputs(&m.conv, &run, mixed, stride, 0, channels, TYPE))
        }
    }
    return failed;
}

/* x (rows, groups * width) -> the sum of squares of each group, out (rows, groups). */
TAPED int group_squares(const float *x, float *out, int64_t rows, int64_t groups, int64_t width, int64_t num_threads)
{
#pragma omp parallel for num_threads((int)num_threads) if (num_threads > 1 && rows * groups > 1 &&                     \
                                                               rows * groups * width >= MIN_PARALLEL)
    for (int64_t i = 0; i < rows * groups; i++)
        out[i] = squares_of(x + i * width, width);
    return 0;
}

/* out = x / rms(x) * weight, group by group: x and out (rows, groups * width), weight (groups * width).  `squares`
   (rows, groups), or NULL, are the sums over all `whole_width` elements of groups that other ranks have parts of. */
TAPED int norm_groups(const float *x, const char *weight, const float *squares, char *out, int64_t rows, int64_t groups,
                      int64_t width, int64_t whole_width, float eps, int64_t dtype, int64_t num_threads)
{
    const int64_t size = item_bytes((int)dtype);
#pragma omp parallel for num_threads((int)num_threads) if (num_threads > 1 && rows * groups > 1 &&                     \
                                                               rows * groups * width >= MIN_PARALLEL)
    for (int64_t number = 0; number < rows * groups; number++) {
        const float *const from = x + number * width;
        const char *const weights = weight + number % groups * width * size;
        char *const to = out + number * width * size;
        const float sum = squares ? squares[number] : squares_of(from, width);
        const float factor = 1.0f / sqrtf(sum / (float)whole_width + eps);
        for (int64_t i = 0; i < width; i += VW)
            FOR_DTYPE(store_some(
                to, i, width, load_some(from, i, width, FLOAT32) * factor * load_some(weights, i, width, TYPE), TYPE))
    }
    return 0;
}
