/* A short convolution between two gates for runs of tokens (kernels/short_conv.py).

   A task is some channels of a run, in float32.  What is computed for a token does not depend on where runs begin or
   end, on other rows, or on the number of threads, so a run gives the same bits as its tokens one by one. */

#include "recurrent.h"
#include "tape.h"

#include <string.h>

/* The channels of a task, the tokens that are convolved together. */
enum { PART = 256, BLOCK = 16, MIN_PARALLEL = 1 << 14 };

/* `count` channels from `first` on of all tokens of a run. */
INLINE void run_part(const CausalConv *c, const Run *run, const char *mixed, int64_t stride, int64_t first,
                     int64_t count, char *out, const int dtype)
{
    float turned[BLOCK * PART];
    for (int64_t begin = 0; begin < run->count; begin += BLOCK) {
        const int64_t tokens = smaller(BLOCK, run->count - begin);
        convolve(c, run, mixed, stride, begin, tokens, first, count, turned, dtype);
        for (int64_t token = 0; token < tokens; token++) {
            const int64_t place = place_of(run, begin + token);
            const char *const gate = mixed + (place * stride + c->channels + first) * item_bytes(dtype);
            char *const to = out + (place * c->channels + first) * item_bytes(dtype);
            for (int64_t i = 0; i < count; i += VW)
                store_some(to, i, count,
                           load_some(turned + token * count, i, count, FLOAT32) * load_some(gate, i, count, dtype),
                           dtype);
        }
    }
    if (run->slot >= 0)
        keep_inputs(c, run, mixed, stride, first, count, dtype);
}

/* Of a decode's rows, or if `chunks` are given, of those. */
static void run_all(const CausalConv *c, const int32_t *slots, const int32_t *runs, const int64_t *chunks,
                    const char *mixed, int64_t stride, char *out, int64_t num_runs, int dtype, int64_t num_threads)
{
    const int64_t parts = (c->channels + PART - 1) / PART, tasks = num_runs * parts;
    const int is_large = chunks || num_runs * c->channels >= MIN_PARALLEL;
#pragma omp parallel for schedule(dynamic) num_threads((int)num_threads) if (num_threads > 1 && tasks > 1 && is_large)
    for (int64_t task = 0; task < tasks; task++) {
        const int64_t number = task / parts, first = task % parts * PART, count = smaller(PART, c->channels - first);
        const Run run = chunks ? run_of_chunk(chunks + 4 * number) : run_of_row(number, slots, runs);
        if (!chunks && run.slot < 0)
            memset(out + (number * c->channels + first) * item_bytes(dtype), 0, count * item_bytes(dtype));
        else
            FOR_DTYPE(run_part(c, &run, mixed, stride, first, count, out, TYPE))
    }
}

/* mixed (rows, 3 channels), `stride` elements from row to row; slots (rows), -1 for padding, whose output is 0; runs
   (rows, 2), NULL if no row is of a draft token; out (rows, channels); `conv` and the inputs of slots as in
   CausalConv. */
TAPED int short_conv_decode(const float *conv, float *inputs, int64_t inputs_stride, int64_t channels, int64_t taps,
                            const char *mixed, int64_t stride, const int32_t *slots, const int32_t *runs, char *out,
                            int64_t rows, int64_t dtype, int64_t num_threads)
{
    const CausalConv c = {conv, NULL, inputs, inputs_stride, channels, taps, 2 * channels, 1};
    run_all(&c, slots, runs, NULL, mixed, stride, out, rows, (int)dtype, num_threads);
    return 0;
}

/* `chunks` (num_chunks, 4), the start, count, slot and is_fresh of each, share the rows of mixed and out; their slots
   are distinct; the rest as in short_conv_decode. */
int short_conv_prefill(const float *conv, float *inputs, int64_t inputs_stride, int64_t channels, int64_t taps,
                       const char *mixed, int64_t stride, const int64_t *chunks, char *out, int64_t num_chunks,
                       int64_t dtype, int64_t num_threads)
{
    const CausalConv c = {conv, NULL, inputs, inputs_stride, channels, taps, 2 * channels, 1};
    run_all(&c, NULL, NULL, chunks, mixed, stride, out, num_chunks, (int)dtype, num_threads);
    return 0;
}
