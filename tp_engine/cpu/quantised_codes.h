/* The values of a vector's words: item by item, in the order of x's (quantised.h).

   Of 4 bits the pair n of a word is in bits 4n of its halves.  Of 8 bits, a vector's pairs 0 are in the lower halves of
   its 16-byte lanes, and its pairs 1 in the upper ones.  Columns that are not paired are in the order of their bits. */

#pragma once

#include "quantised.h"

/* Tables in registers. */
typedef struct {
#if VW == 16
    __m512i tables[4];
#elif VW == 8
    vf tables[2];
#else
    const float *values;
#endif
} Decoder;

INLINE Decoder make_decoder(const Quantised *q, const int codes, const int paired)
{
    Decoder d;
#if VW == 16
    if (codes == NIBBLES) {
        d.tables[0] = _mm512_loadu_si512(q->values);
        if (paired) {
            const __m256i halves = _mm512_cvtepi32_epi16(_mm512_srli_epi32(d.tables[0], 16));
            d.tables[0] = _mm512_broadcast_i64x4(halves);
        }
    } else if (paired) {
        for (int half = 0; half < 2; half++) {
            d.tables[half] = _mm512_loadu_si512(q->high + half * 64);
            d.tables[2 + half] = _mm512_loadu_si512(q->low + half * 64);
        }
    }
#elif VW == 8
    d.tables[0] = load_vector(q->values), d.tables[1] = load_vector(q->values + VW);
#else
    d.values = q->values;
#endif
    return d;
}

/* The values of the lowest 4 bits of each number. */
INLINE vf look_up(const Decoder *d, vu index)
{
#if VW == 16
    return (vf)_mm512_permutexvar_epi32((__m512i)index, d->tables[0]);
#elif VW == 8
    const __m256 low = _mm256_permutevar8x32_ps((__m256)d->tables[0], (__m256i)index);
    const __m256 high = _mm256_permutevar8x32_ps((__m256)d->tables[1], (__m256i)index);
    return (vf)_mm256_blendv_ps(low, high, (__m256)(index << 28));
#else
    vf found;
    for (int i = 0; i < VW; i++)
        found[i] = d->values[index[i] & 15];
    return found;
#endif
}

/* Pairs 0 and 1 of a vector of codes of 8 bits. */
INLINE void decode_pairs(vf *to, vu words, const Decoder *d, const int codes)
{
#if defined(__AVX512VBMI__) && defined(__AVX512BW__)
    const __m512i bytes = (__m512i)words, sign = _mm512_set1_epi8((char)0x80);
    const __m512i index = codes == INT8 ? _mm512_abs_epi8(bytes) : bytes;
    const __m512i low = _mm512_permutex2var_epi8(d->tables[2], index, d->tables[3]);
    __m512i high = _mm512_permutex2var_epi8(d->tables[0], index, d->tables[1]);
    high = _mm512_ternarylogic_epi32(high, bytes, sign, 0xf8); /* high | (bytes & sign) */
    if (codes == INT8) /* -128 has no index */
        high = _mm512_mask_mov_epi8(high, _mm512_cmpeq_epi8_mask(bytes, sign), _mm512_set1_epi8((char)0xc3));
    to[0] = (vf)_mm512_unpacklo_epi8(low, high), to[1] = (vf)_mm512_unpackhi_epi8(low, high);
#endif
}

/* Item `n` of a vector of words; not of pairs of 8 bits. */
INLINE vf decode_item(vu words, const int n, const Decoder *d, const int codes, const int paired)
{
    if (codes == INT8)
        return __builtin_convertvector((vi)(words << (24 - 8 * n)) >> 24, vf);
    if (codes == SIGNED)
        return e4m3_values(words << (24 - 8 * n));
#if VW == 16 && defined(__AVX512BW__)
    if (paired)
        return (vf)_mm512_permutexvar_epi16((__m512i)(words >> (4 * n)), d->tables[0]);
#endif
    return look_up(d, words >> (4 * n));
}

/* All items of a vector of words. */
INLINE void decode_words(vf *to, vu words, const Decoder *d, const int codes, const int paired)
{
    if (codes != NIBBLES && paired) {
        decode_pairs(to, words, d, codes);
        return;
    }
#pragma GCC unroll 8
    for (int n = 0; n < word_columns(codes) >> paired; n++)
        to[n] = decode_item(words, n, d, codes, paired);
}
