/* A tile: a panel times up to TILE_ROWS rows of x, with its sums in registers: 24 vectors with AVX-512, 12
   otherwise. */

#pragma once

#include "panels.h"

enum { TILE_ROWS = 6 };

typedef vf Sums[TILE_ROWS][VECTORS];

/* A tile's part of some items: rows of x, a panel, and memory that is fetched meanwhile, `lines` lines per item: into
   the first-level cache if it `is_near`, else into the second. */
typedef struct {
    const char *x;
    int64_t x_stride; /* in bytes */
    const float *panel;
    int64_t count;
    const char *ahead;
    int64_t lines;
    int is_first, is_near, dtype; /* is_first: the sums begin at 0 */
} Tile;

/* Bytes from one item of x to the next. */
INLINE int64_t item_step(const int dtype) { return is_widened(dtype) ? 8 : 4; }

/* `sum` and the product of an item. */
INLINE vf add_product(vf sum, vf item, vf weight, const int by_pairs)
{
    return by_pairs ? add_pair_products(sum, item, weight) : multiply_add(sum, item, weight);
}

/* Adds the products of an item of `rows` rows. */
INLINE void add_products(Sums sums, const char *x, int64_t x_stride, const float *panel, const int rows,
                         const int dtype)
{
#pragma GCC unroll 2
    for (int half = 0; half <= is_widened(dtype); half++, x += sizeof(float)) {
        if (half)
            __asm__ volatile("" ::: "memory"); /* loads the pairs again: there are no registers to keep them in */
        vf weight[VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++)
            weight[v] = load_weights(panel + v * VW, half, dtype);
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++) {
            const vf item = splat(*(const item_memory *)(x + r * x_stride));
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++)
                sums[r][v] = add_product(sums[r][v], item, weight[v], dtype == BFLOAT16 && !is_widened(dtype));
        }
    }
}

INLINE void multiply_tile(Sums waiting, const Tile *t, const int rows, const int lines, const int is_near,
                          const int dtype)
{
    const char *x = t->x, *ahead = t->ahead;
    const float *panel = t->panel;
    const int64_t x_stride = t->x_stride;
    Sums sums; /* in registers: copied item by item, because a copy of the whole would go through memory */
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++)
            sums[r][v] = t->is_first ? splat(0) : waiting[r][v];
    /* Unrolled by two: if another thread shares the core, the number of instructions is the limit. */
#pragma GCC unroll 2
    for (int64_t count = t->count; count > 0; count--, x += item_step(dtype), panel += PANEL) {
#pragma GCC unroll 4
        for (int line = 0; line < lines; line++, ahead += CACHE_LINE)
            if (is_near)
                __builtin_prefetch(ahead, 0, 3);
            else
                __builtin_prefetch(ahead, 0, 2);
        add_products(sums, x, x_stride, panel, rows, dtype);
    }
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++)
            waiting[r][v] = sums[r][v];
}

INLINE void multiply_items(Sums sums, const Tile *t, const int rows, const int dtype)
{
    if (!t->lines)
        multiply_tile(sums, t, rows, 0, 0, dtype);
    else if (t->is_near)
        multiply_tile(sums, t, rows, PANEL_LINES, 1, dtype);
    else if (t->lines == 1)
        multiply_tile(sums, t, rows, 1, 0, dtype);
    else
        multiply_tile(sums, t, rows, 2, 0, dtype);
}

/* Functions of their own, so that nothing else uses the registers that the loop needs. */
#define DEFINE_TILE(rows)                                                            \
    static __attribute__((noinline)) void multiply_##rows(Sums sums, const Tile *t)  \
    {                                                                                \
        if (t->dtype == FLOAT32)                                                     \
            multiply_items(sums, t, rows, FLOAT32);                                  \
        else if (t->dtype == BFLOAT16)                                               \
            multiply_items(sums, t, rows, BFLOAT16);                                 \
        else                                                                         \
            multiply_items(sums, t, rows, FLOAT16);                                  \
    }

DEFINE_TILE(1)
DEFINE_TILE(2)
DEFINE_TILE(3)
DEFINE_TILE(4)
DEFINE_TILE(5)
DEFINE_TILE(6)

static void (*const MULTIPLY[TILE_ROWS])(Sums, const Tile *) = {multiply_1, multiply_2, multiply_3,
                                                                multiply_4, multiply_5, multiply_6};
