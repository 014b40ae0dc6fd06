/* Pack a quantised weight into panels (quantised.h). */

#include "quantised.h"

/* The longest vector's numbers of 32 bits. */
int vector_numbers(void) { return VW; }

/* Whether products with x of this type take columns in pairs. */
int pairs_columns(int64_t dtype) { return is_paired((int)dtype); }

int max_group(void) { return CHUNK_COLUMNS; }

int64_t quantised_panel_bytes(const Quantised *q) { return panel_bytes(q); }

int64_t quantised_row_bytes(const Quantised *q, int64_t dtype) { return prepared_bytes(q, (int)dtype); }

/* Halves of words with pairs of columns: nibbles 0, 2, 4, 6 in the lower half, 1, 3, 5, 7 in the upper one. */
INLINE vu pair_nibbles(vu words)
{
    vu even = words & 0x0f0f0f0fu, odd = (words >> 4) & 0x0f0f0f0fu;
    even = (even | even >> 4) & 0x00ff00ffu, odd = (odd | odd >> 4) & 0x00ff00ffu;
    return ((even | even >> 8) & 0xffffu) | (odd | odd >> 8) << 16;
}

/* Within 16 bytes: the first halves of 4 words, then the second ones. */
INLINE vf pair_bytes(vf words)
{
#if VW == 16
    const __m128i order = _mm_set_epi8(15, 14, 11, 10, 7, 6, 3, 2, 13, 12, 9, 8, 5, 4, 1, 0);
    return (vf)_mm512_shuffle_epi8((__m512i)words, _mm512_broadcast_i32x4(order));
#else
    return words;
#endif
}

/* The words of VW outputs, `from` (outputs, words), as vectors of a panel. */
static void pack_words(const Quantised *q, const float *from, int64_t outputs, char *panel, int paired)
{
    const int64_t words = count_words(q), in_group = words_of(q, q->group);
    for (int64_t i = 0; i < words; i += VW) {
        vf rows[VW];
        for (int j = 0; j < VW; j++) {
            rows[j] = j < outputs ? load_some(from + j * words, i, words, FLOAT32) : splat(0);
            if (paired && q->codes == NIBBLES)
                rows[j] = (vf)pair_nibbles((vu)rows[j]);
        }
        transpose(rows);
        for (int64_t j = 0; j < smaller(VW, words - i); j++) {
            const int64_t group = (i + j) / in_group;
            const vf items = paired && q->codes != NIBBLES ? pair_bytes(rows[j]) : rows[j];
            store_vector((float *)(panel + (group + 1) * head_bytes(q) + (i + j) * PANEL * 4), items);
        }
    }
}

/* One output's scales (groups) or zeros, to their place in each group. */
static void pack_head(const Quantised *q, const char *from, char *to, int64_t size)
{
    const int64_t groups = count_groups(q), step = group_bytes(q);
    for (int64_t group = 0; group < groups; group++)
        memcpy(to + group * step, from + group * size, size);
}

/* words (out_size, words of a row), scales (ceil(out_size / row_block), groups), zeros (out_size, groups) -> panels,
   which are zeros. */
int pack_quantised(const Quantised *q, const void *words, const char *scales, int64_t row_block, const char *zeros,
                   char *panels, int64_t out_size, int64_t parts, int64_t dtype, int64_t num_threads)
{
    const float *codes = words;
    const int64_t part_size = out_size / parts, width = PANEL / parts, num_panels = count_panels(part_size, parts);
    const int64_t groups = count_groups(q), size = scale_bytes(q);
#pragma omp parallel for schedule(static) num_threads((int)num_threads)
    for (int64_t panel = 0; panel < num_panels; panel++)
        for (int64_t o = 0; o < PANEL; o += VW) {
            char *to = panels + panel * panel_bytes(q);
            const int64_t in_part = panel * width + o % width, output = o / width * part_size + in_part;
            const int64_t outputs = larger(0, smaller(VW, part_size - in_part));
            pack_words(q, codes + output * count_words(q), outputs, to + o * 4, is_paired((int)dtype));
            for (int64_t j = 0; j < outputs; j++) {
                const char *own = scales + (output + j) / row_block * groups * size;
                if (q->scales == VECTOR_SCALES && j == 0)
                    pack_head(q, own, to + o / VW * size, size);
                else if (q->scales < VECTOR_SCALES)
                    pack_head(q, own, to + (o + j) * size, size);
                if (q->has_zeros)
                    pack_head(q, zeros + (output + j) * groups, to + scales_bytes(q) + o + j, 1);
            }
        }
    return 0;
}
