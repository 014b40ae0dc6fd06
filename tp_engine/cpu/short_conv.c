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

/* mixed (tokens, 3 channels), `stride` elements from row to row; runs as in run_of; out (tokens, channels), 0 of
   padding; `conv` and the inputs of slots as in CausalConv. */
TAPED int short_conv(const float *conv, float *inputs, int64_t inputs_stride, int64_t channels, int64_t taps,
                     const char *mixed, int64_t stride, const int32_t *slots, const int32_t *runs,
                     const int64_t *chunks, char *out, int64_t num_runs, int64_t dtype, int64_t num_threads)
{
    const CausalConv c = {conv, NULL, inputs, inputs_stride, channels, taps, 2 * channels, 1};
    const int64_t parts = (channels + PART - 1) / PART, tasks = num_runs * parts, size = item_bytes((int)dtype);
    const int is_large = chunks || num_runs * channels >= MIN_PARALLEL;
#pragma omp parallel for schedule(dynamic) num_threads((int)num_threads) if (num_threads > 1 && tasks > 1 && is_large)
    for (int64_t task = 0; task < tasks; task++) {
        const int64_t number = task / parts, first = task % parts * PART, count = smaller(PART, channels - first);
        const Run run = run_of(number, slots, runs, chunks);
        if (!chunks && run.slot < 0)
            memset(out + (number * channels + first) * size, 0, count * size);
        else
            FOR_DTYPE(run_part(&c, &run, mixed, stride, first, count, out, TYPE))
    }
    return 0;
}
