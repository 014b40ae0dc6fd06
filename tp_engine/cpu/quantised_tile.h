/* Tiles of quantised panels: groups of a panel times up to TILE_ROWS rows, added to totals.

   A single tile decodes words in registers.  If there are more, groups are decoded once into memory (`Decoded`), as
   items of panels.h.  The arithmetic is the same, in the same order. */

#pragma once

#include "linear_tile.h"
#include "quantised_codes.h"

enum { CHUNK_GROUPS = CHUNK_COLUMNS / 4 };
enum { AHEAD = 4096 }; /* bytes that hints to the processor are ahead */

/* Some groups' values. */
typedef struct {
    vf items[CHUNK_COLUMNS * VECTORS];
    vf scales[CHUNK_GROUPS][VECTORS], zeros[CHUNK_GROUPS][VECTORS];
} Decoded;

/* Groups `first` to `end` of a panel, and rows of x. */
typedef struct {
    const Quantised *weight;
    const char *panel;                     /* at group `first` */
    const char *x;                         /* whole rows as prepared */
    int64_t x_stride, x_offset, x_sums;    /* in bytes; to group `first`, to the sums over groups */
    int64_t first, end, num_groups;
    int64_t words, last_words, head_bytes; /* of a group, of the last one; before the words */
    int wants_hints;
} Groups;

INLINE int64_t words_in(const Groups *t, int64_t group) { return group < t->num_groups - 1 ? t->words : t->last_words; }

/* Sums without products: 0, or, if there are zeros, zero * (-unit * sum of x). */
INLINE void begin_group(Sums sums, const Groups *t, int64_t group, const vf *zeros, const int rows)
{
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++)
            sums[r][v] = splat(0);
    if (!zeros)
        return;
    const char *x = t->x + t->x_sums + group * 4;
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++, x += t->x_stride)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++)
            sums[r][v] = zeros[v] * splat(*(const item_memory *)x);
}

INLINE void end_group(vf (*totals)[VECTORS], Sums sums, const vf *scales, const int rows)
{
    __asm__ volatile("" ::: "memory"); /* totals stay where they are: copies of them on the stack cost more */
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; v++)
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++)
            totals[r][v] = multiply_add(totals[r][v], sums[r][v], scales[v]);
}

/* Adds the products of a panel's words in each of `rows` rows. */
INLINE void add_words(Sums sums, const char *x, int64_t x_stride, const float *words, const Decoder *decoder,
                      const int rows, const int codes, const int paired)
{
    const int items = (int)word_columns(codes) >> paired;
    if (codes != NIBBLES && paired) { /* the items of a word are decoded together */
        enum { TOGETHER = 2 };
#pragma GCC unroll 4
        for (int first = 0; first < VECTORS; first += TOGETHER) {
            vf weight[TOGETHER][2];
            if (rows > 1)
                __asm__ volatile("" ::: "memory"); /* loads x again: there are no registers to keep it in */
#pragma GCC unroll 4
            for (int v = 0; v < TOGETHER; v++)
                decode_pairs(weight[v], (vu)load_vector(words + (first + v) * VW), decoder, codes);
#pragma GCC unroll 2
            for (int n = 0; n < 2; n++)
#pragma GCC unroll 6
                for (int r = 0; r < rows; r++) {
                    const vf item = splat(*(const item_memory *)(x + r * x_stride + n * 4));
#pragma GCC unroll 4
                    for (int v = 0; v < TOGETHER; v++)
                        sums[r][first + v] = add_product(sums[r][first + v], item, weight[v][n], paired);
                }
        }
        return;
    }
#pragma GCC unroll 8
    for (int n = 0; n < items; n++) {
        vf weight[VECTORS];
        if (rows > 1)
            __asm__ volatile("" ::: "memory"); /* as above, for words */
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++)
            weight[v] = decode_item((vu)load_vector(words + v * VW), n, decoder, codes, paired);
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++) {
            const vf item = splat(*(const item_memory *)(x + r * x_stride + n * 4));
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++)
                sums[r][v] = add_product(sums[r][v], item, weight[v], paired);
        }
    }
}

/* A tile alone: words become items in registers. */
INLINE void multiply_words(vf (*totals)[VECTORS], const Groups *t, const int rows, const int codes, const int paired)
{
    const Quantised *q = t->weight;
    const Decoder decoder = make_decoder(q, codes, paired);
    const int64_t x_stride = t->x_stride;
    const int has_hints = t->wants_hints;
    const char *panel = t->panel, *x = t->x + t->x_offset;
    for (int64_t group = t->first; group < t->end; group++) {
        const char *head = panel;
        vf scales[VECTORS], zeros[VECTORS];
        Sums sums;
        if (q->has_zeros)
            load_zeros(zeros, q, head);
        begin_group(sums, t, group, q->has_zeros ? zeros : NULL, rows);
        panel += t->head_bytes;
        for (int64_t count = words_in(t, group); count > 0; count--) {
            if (has_hints)
#pragma GCC unroll 4
                for (int line = 0; line < PANEL_LINES; line++)
                    __builtin_prefetch(panel + AHEAD + line * CACHE_LINE, 0, 3);
            add_words(sums, x, x_stride, (const float *)panel, &decoder, rows, codes, paired);
            panel += PANEL * 4, x += (word_columns(codes) >> paired) * 4;
        }
        load_scales(scales, q, head);
        end_group(totals, sums, scales, rows);
    }
}

/* Decodes groups `first` to `end`. */
INLINE void decode_groups(Decoded *to, const Groups *t, const int codes, const int paired)
{
    const Quantised *q = t->weight;
    const Decoder decoder = make_decoder(q, codes, paired);
    const int items = (int)word_columns(codes) >> paired;
    const char *panel = t->panel;
    vf *out = to->items;
    for (int64_t group = t->first; group < t->end; group++) {
        load_scales(to->scales[group - t->first], q, panel);
        if (q->has_zeros)
            load_zeros(to->zeros[group - t->first], q, panel);
        panel += t->head_bytes;
        for (int64_t count = words_in(t, group); count > 0; count--) {
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) {
                vf values[8];
                decode_words(values, (vu)load_vector((const float *)panel + v * VW), &decoder, codes, paired);
#pragma GCC unroll 8
                for (int n = 0; n < items; n++)
                    out[n * VECTORS + v] = values[n];
            }
            panel += PANEL * 4, out += items * VECTORS;
        }
    }
}

/* One of several tiles: the groups are decoded. */
INLINE void multiply_decoded(vf (*totals)[VECTORS], const Groups *t, const Decoded *d, const int rows, const int paired)
{
    const int64_t x_stride = t->x_stride, steps = word_items(t->weight, paired ? BFLOAT16 : FLOAT32);
    const float *items = (const float *)d->items;
    const char *x = t->x + t->x_offset;
    for (int64_t group = t->first; group < t->end; group++) {
        Sums sums;
        begin_group(sums, t, group, t->weight->has_zeros ? d->zeros[group - t->first] : NULL, rows);
        /* A word has an even number of items. */
        for (int64_t count = words_in(t, group) * steps; count > 0; count -= 2)
#pragma GCC unroll 2
            for (int n = 0; n < 2; n++, x += 4, items += PANEL)
                add_products(sums, x, x_stride, items, rows, paired ? BFLOAT16 : FLOAT32);
        end_group(totals, sums, d->scales[group - t->first], rows);
    }
}
