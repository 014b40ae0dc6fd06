/* Vectors of VW floats in the compiler's own notation, and rows of the element types as float32. */
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__AVX512F__) || defined(__AVX2__) || defined(__F16C__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define VW 16
#elif defined(__AVX2__)
#define VW 8
#else
#define VW 4
#endif

#define INLINE static inline __attribute__((always_inline))

typedef float vf __attribute__((vector_size(4 * VW)));
typedef int32_t vi __attribute__((vector_size(4 * VW)));
typedef uint32_t vu __attribute__((vector_size(4 * VW)));
typedef uint16_t vh __attribute__((vector_size(2 * VW)));
typedef uint8_t vb __attribute__((vector_size(VW)));
/* For memory that is aligned to its elements only. */
typedef float vf_memory __attribute__((vector_size(4 * VW), aligned(4), may_alias));
typedef uint16_t vh_memory __attribute__((vector_size(2 * VW), aligned(2), may_alias));
typedef uint8_t vb_memory __attribute__((vector_size(VW), aligned(1), may_alias));

/* The types of rows; codes of 8 bits need a factor beside them. */
enum { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2, INT8_CODES = 3, E4M3_CODES = 4 };

enum { CACHE_LINE = 64 };

INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

INLINE int are_codes(int dtype) { return dtype >= INT8_CODES; }

INLINE int64_t item_bytes(int dtype) { return dtype == FLOAT32 ? 4 : are_codes(dtype) ? 1 : 2; }

INLINE vf splat(float x) { return x - (vf){0}; }

INLINE vf load_vector(const float *p) { return *(const vf_memory *)p; }

INLINE void store_vector(float *p, vf x) { *(vf_memory *)p = x; }

INLINE vf select_vector(vi where, vf yes, vf no) { return (vf)(((vi)yes & where) | ((vi)no & ~where)); }

/* sum + x * y, rounded once if the processor can: `sum + x * y` leaves that to the compiler, function by function. */
INLINE vf multiply_add(vf sum, vf x, vf y)
{
#if VW == 16
    return (vf)_mm512_fmadd_ps((__m512)x, (__m512)y, (__m512)sum);
#elif VW == 8 && defined(__FMA__)
    return (vf)_mm256_fmadd_ps((__m256)x, (__m256)y, (__m256)sum);
#elif defined(__FP_FAST_FMAF)
    for (int i = 0; i < VW; i++)
        sum[i] = __builtin_fmaf(x[i], y[i], sum[i]);
    return sum;
#else
    return sum + x * y;
#endif
}

/* b where one of them is NaN. */
INLINE vf max_vector(vf a, vf b)
{
#if VW == 16
    return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#else
    return select_vector(a > b, a, b);
#endif
}

/* Whether the processor multiplies bfloat16: sum + x[0] * y[0] + x[1] * y[1], of pairs that lie in 32 bits. */
#if defined(__AVX512BF16__)
enum { MULTIPLIES_BFLOAT16 = 1 };
#else
enum { MULTIPLIES_BFLOAT16 = 0 };
#endif

INLINE vf add_pair_products(vf sum, vf x, vf y)
{
#if defined(__AVX512BF16__)
    return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)x, (__m512bh)y);
#else
    return sum;
#endif
}

/* Applies `four` to each four indices of a vector. */
#if VW == 16
#define ALL_OF(four, n) four(0, n), four(4, n), four(8, n), four(12, n)
#elif VW == 8
#define ALL_OF(four, n) four(0, n), four(4, n)
#else
#define ALL_OF(four, n) four(0, n)
#endif

/* The vector with items i and i ^ n exchanged. */
#define FOUR_SWAPPED(i, n) (i) ^ n, (i + 1) ^ n, (i + 2) ^ n, (i + 3) ^ n
#define SWAPPED(x, n) __builtin_shufflevector(x, x, ALL_OF(FOUR_SWAPPED, n))

/* The sum of all items, in each item. */
INLINE vf sum_of(vf x)
{
#if VW == 16
    x += SWAPPED(x, 8);
#endif
#if VW >= 8
    x += SWAPPED(x, 4);
#endif
    x += SWAPPED(x, 2);
    return x + SWAPPED(x, 1);
}

/* The largest of all items, in each item. */
INLINE vf max_of(vf x)
{
#if VW == 16
    x = max_vector(x, SWAPPED(x, 8));
#endif
#if VW >= 8
    x = max_vector(x, SWAPPED(x, 4));
#endif
    x = max_vector(x, SWAPPED(x, 2));
    return max_vector(x, SWAPPED(x, 1));
}

/* The items of a, and of b, whose index has bit n clear (EVEN), or set (ODD), side by side as in a transposition. */
#define FOUR_EVEN(i, n) ITEM_EVEN(i, n), ITEM_EVEN(i + 1, n), ITEM_EVEN(i + 2, n), ITEM_EVEN(i + 3, n)
#define FOUR_ODD(i, n) ITEM_ODD(i, n), ITEM_ODD(i + 1, n), ITEM_ODD(i + 2, n), ITEM_ODD(i + 3, n)
#define ITEM_EVEN(i, n) ((i) & n ? VW + (i) - n : (i))
#define ITEM_ODD(i, n) ((i) & n ? VW + (i) : (i) + n)

/* Exchanges, of each pair of rows that are n apart, the blocks of n items off the diagonal. */
#define EXCHANGE_BLOCKS(rows, n)                                                      \
    for (int i_ = 0; i_ < VW; i_++)                                                   \
        if (!(i_ & n)) {                                                              \
            const vf a_ = rows[i_], b_ = rows[i_ + n];                                \
            rows[i_] = __builtin_shufflevector(a_, b_, ALL_OF(FOUR_EVEN, n));         \
            rows[i_ + n] = __builtin_shufflevector(a_, b_, ALL_OF(FOUR_ODD, n));      \
        }

/* VW rows become VW columns. */
INLINE void transpose(vf *rows)
{
#if VW == 16
    _Pragma("GCC unroll 16") EXCHANGE_BLOCKS(rows, 8)
#endif
#if VW >= 8
    _Pragma("GCC unroll 16") EXCHANGE_BLOCKS(rows, 4)
#endif
    _Pragma("GCC unroll 16") EXCHANGE_BLOCKS(rows, 2)
    _Pragma("GCC unroll 16") EXCHANGE_BLOCKS(rows, 1)
}

/* 2^f to float32's precision for -1/2 <= f <= 1/2: Cephes' polynomial. */
INLINE vf exp2_fraction(vf f)
{
    vf p = splat(1.535336188319500e-4f);
    p = p * f + 1.339887440266574e-3f;
    p = p * f + 9.618437357674640e-3f;
    p = p * f + 5.550332471162809e-2f;
    p = p * f + 2.402264791363012e-1f;
    p = p * f + 6.931472028550421e-1f;
    return p * f + 1.0f;
}

#define LOG2_E 1.4426950408889634f

/* 2^x to float32's precision; 0 from 2^-126 down: numbers below that cost some processors hundreds of cycles. */
INLINE vf exp2_vector(vf x)
{
#if VW == 16
    const __mmask16 is_normal = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-126.0f), _CMP_NLE_UQ);
    const vf nearest = (vf)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    return (vf)_mm512_maskz_scalef_ps(is_normal, (__m512)exp2_fraction(x - nearest), (__m512)nearest);
#else
    const vf to_integer = splat(12582912.0f); /* 1.5 * 2^23: adding it rounds */
    const vi is_zero = x <= -126.0f;
    x = select_vector(x > 127.0f, splat(127.0f), x);
    const vf shifted = x + to_integer;
    const vi scaled = (vi)exp2_fraction(x - (shifted - to_integer)) + (vi)((vu)shifted << 23);
    return (vf)(scaled & ~is_zero);
#endif
}

INLINE vf magnitude(vf x) { return (vf)((vu)x & 0x7fffffffu); }

/* tanh to float32's precision; NaN stays.  Below 1 it is a polynomial, x + x^3 p(x^2) with the least relative error,
   because 1 - 2 / (e^2x + 1) loses digits there. */
INLINE vf tanh_vector(vf x)
{
    const vf size = magnitude(x), bounded = select_vector(size > 10.0f, splat(10.0f), size), square = x * x;
    const vf far = 1.0f - 2.0f / (exp2_vector(bounded * (2 * LOG2_E)) + 1.0f);
    vf p = splat(-3.584500228e-4f);
    p = p * square + 2.301357687e-3f;
    p = p * square - 7.946096361e-3f;
    p = p * square + 2.148665115e-2f;
    p = p * square - 5.387980118e-2f;
    p = p * square + 1.333234459e-1f;
    p = p * square - 3.333329558e-1f;
    const vf near = p * square * x + x, signed_far = (vf)((vu)far | ((vu)x & 0x80000000u));
    return select_vector(size < 1.0f, near, signed_far);
}

/* VW numbers of 16 bits, or of 8, as numbers of 32. */
INLINE vu load_halves(const void *p)
{
#if VW == 16
    return (vu)_mm512_cvtepu16_epi32(_mm256_loadu_si256(p));
#elif VW == 8
    return (vu)_mm256_cvtepu16_epi32(_mm_loadu_si128(p));
#else
    return __builtin_convertvector(*(const vh_memory *)p, vu);
#endif
}

INLINE vu load_bytes(const void *p)
{
#if VW == 16
    return (vu)_mm512_cvtepu8_epi32(_mm_loadu_si128(p));
#elif VW == 8
    return (vu)_mm256_cvtepu8_epi32(_mm_loadl_epi64(p));
#else
    return __builtin_convertvector(*(const vb_memory *)p, vu);
#endif
}

INLINE vi load_signed_bytes(const void *p)
{
#if VW == 16
    return (vi)_mm512_cvtepi8_epi32(_mm_loadu_si128(p));
#elif VW == 8
    return (vi)_mm256_cvtepi8_epi32(_mm_loadl_epi64(p));
#else
    return (vi)(load_bytes(p) << 24) >> 24;
#endif
}

INLINE vf load_bfloat16(const uint16_t *p) { return (vf)(load_halves(p) << 16); }

/* Rounds to the nearest, ties to even; NaN stays NaN. */
INLINE void store_bfloat16(uint16_t *p, vf x)
{
    const vu bits = (vu)x;
    const vu rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const vu is_nan = (vu)(x != x);
    *(vh_memory *)p = __builtin_convertvector((rounded & ~is_nan) | (0x7fc0 & is_nan), vh);
}

INLINE vf load_float16(const uint16_t *p)
{
#if VW == 16
    return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
#elif VW == 8 && defined(__F16C__)
    return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
#else
    vf x;
    for (int i = 0; i < VW; i++) {
        _Float16 half;
        memcpy(&half, p + i, 2);
        x[i] = (float)half;
    }
    return x;
#endif
}

INLINE void store_float16(uint16_t *p, vf x)
{
#if VW == 16
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#elif VW == 8 && defined(__F16C__)
    _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT));
#else
    for (int i = 0; i < VW; i++) {
        const _Float16 half = (_Float16)x[i];
        memcpy(p + i, &half, 2);
    }
#endif
}

/* e4m3 in the highest 8 bits of each number, exactly: with the exponent of float32 it is 2^120 too small. */
INLINE vf e4m3_values(vu bits) { return (vf)(((vi)bits >> 4) & (int32_t)0x87f00000) * 0x1p120f; }

/* The numbers of codes in the highest 8 bits. */
INLINE vf code_values(vu bits, int dtype)
{
    return dtype == INT8_CODES ? __builtin_convertvector((vi)bits >> 24, vf) : e4m3_values(bits);
}

/* Numbers within the range of the codes as codes, rounded to the nearest, ties to even. */
INLINE void store_codes(uint8_t *p, vf x, int dtype)
{
    const vu bits = (vu)x, size = bits & 0x7fffffffu;
    const vu normal = ((size + 0x7ffff + ((size >> 20) & 1)) >> 20) - (120 << 3);
    const vu tiny = (vu)((vf)size * 512.0f + 8388608.0f) & 15; /* steps of 2^-9 below 2^-6; 2^23 rounds */
    const vi is_tiny = (vf)size < 0x1p-6f;
    const vu e4m3 = (tiny & (vu)is_tiny) | (normal & ~(vu)is_tiny) | ((bits >> 24) & 0x80);
    const vu int8 = (vu)(x + 12582912.0f); /* 1.5 * 2^23: adding it rounds */
    *(vb_memory *)p = __builtin_convertvector(dtype == INT8_CODES ? int8 : e4m3, vb);
}

/* Elements i to i + VW of a row of `dtype`. */
INLINE vf load_items(const void *row, int64_t i, int dtype)
{
    if (dtype == FLOAT32)
        return load_vector((const float *)row + i);
    if (dtype == BFLOAT16)
        return load_bfloat16((const uint16_t *)row + i);
    if (dtype == FLOAT16)
        return load_float16((const uint16_t *)row + i);
    if (dtype == INT8_CODES)
        return __builtin_convertvector(load_signed_bytes((const uint8_t *)row + i), vf);
    return code_values(load_bytes((const uint8_t *)row + i) << 24, dtype);
}

INLINE void store_items(void *row, int64_t i, vf x, int dtype)
{
    if (dtype == FLOAT32)
        store_vector((float *)row + i, x);
    else if (dtype == BFLOAT16)
        store_bfloat16((uint16_t *)row + i, x);
    else if (dtype == FLOAT16)
        store_float16((uint16_t *)row + i, x);
    else
        store_codes((uint8_t *)row + i, x, dtype);
}

/* `x` as it would be after being stored. */
INLINE vf rounded(vf x, const int dtype)
{
    uint16_t half[VW];
    if (dtype == FLOAT32)
        return x;
    store_items(half, 0, x, dtype);
    return load_items(half, 0, dtype);
}

/* The last `count` < VW elements of a row; what is beyond them reads as 0 and is not written. */
INLINE vf load_tail(const void *row, int64_t i, int64_t count, int dtype)
{
    float items[VW] = {0};
    memcpy(items, (const char *)row + i * item_bytes(dtype), count * item_bytes(dtype));
    return load_items(items, 0, dtype);
}

INLINE void store_tail(void *row, int64_t i, int64_t count, vf x, int dtype)
{
    float items[VW];
    store_items(items, 0, x, dtype);
    memcpy((char *)row + i * item_bytes(dtype), items, count * item_bytes(dtype));
}

/* VW elements of a row of `width`, or fewer at its end. */
INLINE vf load_some(const void *row, int64_t i, int64_t width, const int dtype)
{
    return i + VW <= width ? load_items(row, i, dtype) : load_tail(row, i, width - i, dtype);
}

INLINE void store_some(void *row, int64_t i, int64_t width, vf x, const int dtype)
{
    if (i + VW <= width)
        store_items(row, i, x, dtype);
    else
        store_tail(row, i, width - i, x, dtype);
}

/* A row of `dtype` times `factor`, as one of `to_dtype`. */
INLINE void convert_scaled(void *to, const int to_dtype, const void *from, const int dtype, int64_t count, float factor)
{
    for (int64_t i = 0; i < count; i += VW)
        store_some(to, i, count, load_some(from, i, count, dtype) * factor, to_dtype);
}

/* A row times `factor`, in place. */
INLINE void multiply_row(void *row, int64_t count, float factor, const int dtype)
{
    convert_scaled(row, dtype, row, dtype, count, factor);
}

/* The largest number of the codes. */
INLINE float largest_code(int dtype) { return dtype == INT8_CODES ? 127.0f : 448.0f; }

/* The largest magnitude of a row; NaN if an element is not finite. */
INLINE float peak_of(const void *row, int64_t count, const int dtype)
{
    vf largest = splat(0), not_finite = splat(0);
    for (int64_t i = 0; i < count; i += VW) {
        const vf item = load_some(row, i, count, dtype);
        largest = max_vector(largest, magnitude(item));
        not_finite += item * 0.0f;
    }
    return max_of(largest)[0] + sum_of(not_finite)[0];
}

/* A row of `count` elements as float32, with zeros up to a multiple of VW. */
INLINE void widen_row(float *to, const void *from, int64_t count, int dtype)
{
    int64_t i = 0;
    for (; i + VW <= count; i += VW)
        store_vector(to + i, load_items(from, i, dtype));
    if (i < count)
        store_vector(to + i, load_tail(from, i, count - i, dtype));
}

/* The inverse of widen_row. */
INLINE void narrow_row(void *to, const float *from, int64_t count, int dtype)
{
    int64_t i = 0;
    for (; i + VW <= count; i += VW)
        store_items(to, i, load_vector(from + i), dtype);
    if (i < count)
        store_tail(to, i, count - i, load_vector(from + i), dtype);
}

INLINE void convert_row(void *to, int to_dtype, const void *from, int from_dtype, int64_t count)
{
    int64_t i = 0;
    if (to_dtype == from_dtype) {
        memcpy(to, from, count * item_bytes(to_dtype));
        return;
    }
    for (; i + VW <= count; i += VW)
        store_items(to, i, load_items(from, i, from_dtype), to_dtype);
    if (i < count)
        store_tail(to, i, count - i, load_tail(from, i, count - i, from_dtype), to_dtype);
}

/* `statement`, compiled for each type of rows. */
#define FOR_DTYPE(statement)                                            \
    switch (dtype) {                                                    \
    case FLOAT32: { enum { TYPE = FLOAT32 }; statement; } break;        \
    case BFLOAT16: { enum { TYPE = BFLOAT16 }; statement; } break;      \
    default: { enum { TYPE = FLOAT16 }; statement; }                    \
    }

/* The same for types of caches. */
#define FOR_CACHE_DTYPE(statement)                                           \
    switch (dtype) {                                                         \
    case INT8_CODES: { enum { TYPE = INT8_CODES }; statement; } break;       \
    case E4M3_CODES: { enum { TYPE = E4M3_CODES }; statement; } break;       \
    default: FOR_DTYPE(statement)                                            \
    }

/* Writes a row as a cache of `to_dtype` keeps it; of codes also the scale: the row's largest magnitude over the largest
   code. */
INLINE void store_row(void *to, int to_dtype, char *scale, const void *row, int dtype, int64_t count)
{
    if (!are_codes(to_dtype)) {
        convert_row(to, to_dtype, row, dtype, count);
        return;
    }
    float peak = 0;
    FOR_DTYPE(peak = peak_of(row, count, TYPE))
    const float largest = largest_code(to_dtype), factor = peak > 0 ? 1.0f / peak * largest : 0, own = peak / largest;
    memcpy(scale, &own, sizeof(float));
    FOR_DTYPE(convert_scaled(to, to_dtype, row, TYPE, count, factor))
}
