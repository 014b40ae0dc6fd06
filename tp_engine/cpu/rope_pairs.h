/* The rotation of latent attention, whose pairs are neighbours or half of the turning items apart. */
#pragma once

#include "simd.h"

enum { MAX_ROPE = 256 };

/* Turns the `size` items at `to`, in place, by the cosines and the sines of their pairs; then multiplies them by
   `scale`. */
INLINE void turn_items(char *to, const float *cosines_sines, int64_t size, int64_t is_interleaved, float scale,
                       const int dtype)
{
    const int64_t half = size / 2, step = is_interleaved ? 2 : 1, other = is_interleaved ? 1 : half;
    const float *cosines = cosines_sines, *sines = cosines_sines + half;
    float item[MAX_ROPE + VW], turned[MAX_ROPE + VW];
    widen_row(item, to, size, dtype);
    for (int64_t i = 0; i < half; i++) {
        const float a = item[i * step], b = item[i * step + other];
        turned[i * step] = (a * cosines[i] - b * sines[i]) * scale;
        turned[i * step + other] = (b * cosines[i] + a * sines[i]) * scale;
    }
    narrow_row(to, turned, size, dtype);
}
