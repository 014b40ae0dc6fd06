/* What layers with a recurrent state have in common (kernels/recurrent.py): runs of tokens of one row, and the causal
   convolution over them, mostly with SiLU behind it.  What is computed for a token does not depend on where a run
   begins or ends. */
#pragma once

#include "simd.h"

/* `weights` (taps, channels), the last row for the token itself; `bias` (channels), or NULL; `inputs` of slot 0.  With
   `gate` each input is multiplied by the number so many elements behind it.  Without SiLU if it `is_linear`. */
typedef struct {
    const float *weights, *bias;
    float *inputs;
    int64_t inputs_stride, channels, taps, gate, is_linear;
} CausalConv;

/* `count` tokens of one row: `start`, then those from `next` on.  Its state is in `slot`, or nowhere if that is -1;
   `is_fresh`: what lies there is not read, the state before is 0.  With `slots`, of all tokens, the state behind each
   is in the token's own. */
typedef struct {
    int64_t start, count, slot, is_fresh, next;
    const int32_t *slots;
} Run;

/* Run `number` of a step.  Of prompts: `chunks` (number, 4), the start, count, slot and is_fresh of each; their slots
   are distinct.  Of decodes, if `chunks` is NULL: a row with its slot of `slots`, -1 for padding, and `runs` (rows, 2),
   or NULL, as in kernels/recurrent.py.  A row that is a draft row has count 0. */
INLINE Run run_of(int64_t number, const int32_t *slots, const int32_t *runs, const int64_t *chunks)
{
    if (chunks) {
        const int64_t *const own = chunks + 4 * number;
        return (Run){own[0], own[1], own[2], own[3], own[0] + 1, NULL};
    }
    const int64_t behind = runs ? runs[2 * number + 1] : 0;
    return (Run){number, 1 + behind, slots[number], 0, behind ? runs[2 * number] : 0, behind ? slots : NULL};
}

/* The place among a step's tokens of a run's token. */
INLINE int64_t place_of(const Run *run, int64_t token) { return token ? run->next + token - 1 : run->start; }

/* Where the state behind a run's token goes. */
INLINE int64_t slot_behind(const Run *run, int64_t token)
{
    return run->slots ? run->slots[place_of(run, token)] : run->slot;
}

INLINE float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

/* max(x, 0) + log(1 + y) with y = exp(-|x|), which is twice the series of atanh at y / (2 + y), at most 1/3. */
INLINE vf softplus_vector(vf x)
{
    const vf positive = select_vector(x > 0.0f, x, splat(0)), y = exp2_vector((x - 2.0f * positive) * LOG2_E);
    const vf s = y / (y + 2.0f), q = s * s;
    vf sum = splat(1.0f / 13);
    for (int odd = 11; odd > 0; odd -= 2)
        sum = sum * q + 1.0f / (float)odd;
    return positive + 2.0f * s * sum;
}

/* The sum of the squares of `count` numbers. */
INLINE float squares_of(const float *x, int64_t count)
{
    vf squares = splat(0);
    for (int64_t i = 0; i < count; i += VW) {
        const vf item = load_some(x, i, count, FLOAT32);
        squares = multiply_add(squares, item, item);
    }
    return sum_of(squares)[0];
}

INLINE vf silu(vf x) { return x / (1.0f + exp2_vector(x * -LOG2_E)); }

/* VW channels of a token of a run, which may lie before it: then of the inputs that its slot keeps. */
INLINE vf input_of(const CausalConv *c, const Run *run, const char *mixed, int64_t stride, int64_t token, int64_t first,
                   int64_t i, int64_t count, const int dtype)
{
    if (token >= 0) {
        const char *const own = mixed + (place_of(run, token) * stride + first) * item_bytes(dtype);
        const vf item = load_some(own, i, count, dtype);
        return c->gate ? item * load_some(own + c->gate * item_bytes(dtype), i, count, dtype) : item;
    }
    if (run->is_fresh || run->slot < 0)
        return splat(0);
    const float *const kept = c->inputs + run->slot * c->inputs_stride + (c->taps - 1 + token) * c->channels;
    return load_some(kept + first, i, count, FLOAT32);
}

/* `count` channels from `first` on, of `tokens` tokens from `begin` on: their convolution, to `out`. */
INLINE void convolve(const CausalConv *c, const Run *run, const char *mixed, int64_t stride, int64_t begin,
                     int64_t tokens, int64_t first, int64_t count, float *out, const int dtype)
{
    for (int64_t i = 0; i < count; i += VW)
        for (int64_t token = 0; token < tokens; token++) {
            const float *weights = c->weights + first;
            vf sum = c->bias ? load_some(c->bias + first, i, count, FLOAT32) : splat(0);
            for (int64_t tap = 1 - c->taps; tap <= 0; tap++, weights += c->channels) {
                const vf item = input_of(c, run, mixed, stride, begin + token + tap, first, i, count, dtype);
                sum = multiply_add(sum, item, load_some(weights, i, count, FLOAT32));
            }
            store_some(out + token * count, i, count, c->is_linear ? sum : silu(sum), FLOAT32);
        }
}

/* The slots keep the last inputs of `count` channels from `first` on: of the run, or behind each of its tokens, the
   last one first, because the first one's slot is that of the inputs before the run. */
INLINE void keep_inputs(const CausalConv *c, const Run *run, const char *mixed, int64_t stride, int64_t first,
                        int64_t count, const int dtype)
{
    for (int64_t token = run->count - 1; token >= (run->slots ? 0 : run->count - 1); token--) {
        float *kept = c->inputs + slot_behind(run, token) * c->inputs_stride + first;
        for (int64_t tap = 2 - c->taps; tap <= 0; tap++, kept += c->channels)
            for (int64_t i = 0; i < count; i += VW)
                store_some(kept, i, count, input_of(c, run, mixed, stride, token + tap, first, i, count, dtype),
                           FLOAT32);
    }
}
