/* Panels: an order of a weight (out, in) in which each sum of a product stays in one lane of a vector.

       item      a float32, or two numbers of 16 bits.  Pairs of bfloat16 are multiplied as they are where the processor
                 does that.  Elsewhere x is `widened` to float32 once, and the weight in registers: bfloat16 by a shift
                 and by a mask; of float16 the first halves of a vector's items lie side by side, then the second ones
       panel     (items, PANEL): item 0 of PANEL outputs side by side, then item 1 of them ...
       weight    panels, one after another; outputs beyond the last are zeros
       parts     1, or 2: each panel has PANEL / 2 outputs of the weight's first half (gate) and PANEL / 2 of its second
                 (up), so that a tile's sums hold both gate and up of each result */

#pragma once

#include "simd.h"

#if VW == 16
enum { VECTORS = 4 };
#else
enum { VECTORS = 2 };
#endif
enum { PANEL = VECTORS * VW, PANEL_LINES = PANEL * 4 / CACHE_LINE };

/* Of x, at any address. */
typedef float item_memory __attribute__((aligned(2), may_alias));

/* Multiplications, or numbers copied, below which a second thread would cost more than it saves. */
enum { MIN_PARALLEL_PRODUCTS = 1 << 15 };

/* Whether an item is two numbers that are widened to float32. */
INLINE int is_widened(const int dtype) { return dtype == FLOAT16 || (dtype == BFLOAT16 && !MULTIPLIES_BFLOAT16); }

static int64_t count_panels(int64_t part_size, int64_t parts) { return (part_size * parts + PANEL - 1) / PANEL; }

/* A vector of items, as panels have them. */
INLINE void store_packed(float *to, vf items, int64_t dtype)
{
    if (dtype == FLOAT16) {
        *(vh_memory *)to = __builtin_convertvector((vu)items & 0xffff, vh);
        *((vh_memory *)to + 1) = __builtin_convertvector((vu)items >> 16, vh);
    } else {
        store_vector(to, items);
    }
}

/* A vector of items; of two numbers that are widened, `half` 0 or 1. */
INLINE vf load_weights(const float *items, const int half, const int dtype)
{
    if (dtype == FLOAT16)
        return load_float16((const uint16_t *)items + half * VW);
    if (!is_widened(dtype))
        return load_vector(items);
    const vu pairs = (vu)load_vector(items);
    return half ? (vf)(pairs & 0xffff0000) : (vf)(pairs << 16);
}
