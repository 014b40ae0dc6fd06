/* Quantised weights in panels: kernels/quantization/weights.py says what they mean, panels.h what a panel is.

       column     of x and of the weight.  Each group's are filled up with zeros of x to whole words
       word       32 bits of codes of one output: 8 columns of 4 bits, or 4 of 8
       item       what a product takes of x at a time, 4 bytes: two bfloat16 if `is_paired`, else one float32
       panel      groups, one after another: scales, zeros, then words as panels.h has items
       row        of x as products read it: items, then, if there are zeros, -unit * (sum of x) of each group

   A group's products are added up from zero * (-unit * sum of x), and the result times its scale is added to the
   total.  The unit is 1 / 16 for codes of 4 bits, else 1. */

#pragma once

#include "panels.h"

/* Codes: of 4 bits; of 8, int8; of 8, a sign and 7 bits, which are those of e4m3 unless columns are paired. */
enum { NIBBLES = 0, INT8 = 1, SIGNED = 2 };
/* The types of scales: of a row, or VECTOR_SCALES: a float32 for each vector of outputs. */
enum { E4M3_SCALES = 3, E8M0_SCALES = 4, BYTE_SCALES = 5, VECTOR_SCALES = 6, NO_SCALES = 7 }; /* and FLOAT32, ... */

/* What all panels of a weight share.  Mirrored in layout.py. */
typedef struct {
    int64_t codes, scales, has_zeros, columns, group; /* group: columns */
    float values[16];                                 /* of codes of 4 bits */
    uint8_t high[128], low[128]; /* of codes of 8 bits without a sign: bytes of their bfloat16 */
} Quantised;

enum { CHUNK_COLUMNS = 512 }; /* of a group at most */

/* Whether a product takes two columns at a time. */
#if defined(__AVX512BF16__) && defined(__AVX512VBMI__) && defined(__AVX512BW__)
INLINE int is_paired(const int dtype) { return dtype == BFLOAT16; }
#else
INLINE int is_paired(const int dtype) { return 0; }
#endif

INLINE int64_t word_columns(const int codes) { return codes == NIBBLES ? 8 : 4; }

INLINE int64_t words_of(const Quantised *q, int64_t columns)
{
    const int64_t size = word_columns((int)q->codes);
    return (columns + size - 1) / size;
}

INLINE int64_t count_groups(const Quantised *q) { return (q->columns + q->group - 1) / q->group; }

INLINE int64_t group_columns(const Quantised *q, int64_t group)
{
    return smaller(q->group, q->columns - group * q->group);
}

/* Words of a row: all groups but the last are alike. */
INLINE int64_t count_words(const Quantised *q)
{
    const int64_t last = count_groups(q) - 1;
    return last * words_of(q, q->group) + words_of(q, group_columns(q, last));
}

INLINE int64_t word_items(const Quantised *q, const int dtype)
{
    return word_columns((int)q->codes) >> is_paired(dtype);
}

/* Rounded up, so that with AVX-512 each vector of words is a cache line. */
INLINE int64_t aligned(int64_t bytes) { return (bytes + PANEL - 1) / PANEL * PANEL; }

/* Bytes of a scale. */
INLINE int64_t scale_bytes(const Quantised *q)
{
    if (q->scales >= E4M3_SCALES && q->scales <= BYTE_SCALES)
        return 1;
    return q->scales == BFLOAT16 || q->scales == FLOAT16 ? 2 : 4;
}

/* Bytes of a group's scales, and of all that is before its words. */
INLINE int64_t scales_bytes(const Quantised *q)
{
    if (q->scales == NO_SCALES)
        return 0;
    return aligned((q->scales == VECTOR_SCALES ? VECTORS : PANEL) * scale_bytes(q));
}
INLINE int64_t head_bytes(const Quantised *q) { return scales_bytes(q) + (q->has_zeros ? PANEL : 0); }

INLINE int64_t group_bytes(const Quantised *q) { return head_bytes(q) + words_of(q, q->group) * PANEL * 4; }

INLINE int64_t panel_bytes(const Quantised *q) { return count_groups(q) * head_bytes(q) + count_words(q) * PANEL * 4; }

/* Bytes of a row: of its items, and of all. */
INLINE int64_t items_bytes(const Quantised *q, const int dtype) { return count_words(q) * word_items(q, dtype) * 4; }

INLINE int64_t prepared_bytes(const Quantised *q, const int dtype)
{
    const int64_t bytes = items_bytes(q, dtype) + (q->has_zeros ? count_groups(q) * 4 : 0);
    return (bytes + CACHE_LINE - 1) / CACHE_LINE * CACHE_LINE;
}

/* Scales of vector `v` of a panel; E8M0_SCALES have neither the lowest exponent nor NaN. */
INLINE vf load_vector_scales(const char *scales, int64_t v, const int type)
{
    switch (type) {
    case E4M3_SCALES: return e4m3_values(load_bytes(scales + v * VW) << 24);
    case E8M0_SCALES: return (vf)(load_bytes(scales + v * VW) << 23);
    case BYTE_SCALES: return __builtin_convertvector((vi)load_bytes(scales + v * VW), vf);
    case VECTOR_SCALES: return splat(((const item_memory *)scales)[v]);
    case NO_SCALES: return splat(1);
    default: return load_items(scales, v * VW, type);
    }
}

#define LOAD_SCALES(type)                                      \
    case type:                                                 \
        for (int v = 0; v < VECTORS; v++)                      \
            scales[v] = load_vector_scales(head, v, type);     \
        break;

/* Scales, and zeros, of a panel's group that begins at `head`. */
INLINE void load_scales(vf *scales, const Quantised *q, const char *head)
{
    switch (q->scales) {
        LOAD_SCALES(FLOAT32)
        LOAD_SCALES(BFLOAT16)
        LOAD_SCALES(FLOAT16)
        LOAD_SCALES(E4M3_SCALES)
        LOAD_SCALES(E8M0_SCALES)
        LOAD_SCALES(BYTE_SCALES)
        LOAD_SCALES(VECTOR_SCALES)
    default:
        LOAD_SCALES(NO_SCALES)
    }
}

INLINE void load_zeros(vf *zeros, const Quantised *q, const char *head)
{
    for (int v = 0; v < VECTORS; v++)
        zeros[v] = __builtin_convertvector(load_signed_bytes(head + scales_bytes(q) + v * VW), vf);
}
