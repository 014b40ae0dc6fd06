/* Rows quantised to 8 bits before an integer product, and the product's rows scaled back.
   kernels/quantization/int8_rows.py has the formulas. */

#include "simd.h"

/* Items below which a second thread would cost more than it saves. */
enum { MIN_PARALLEL_ITEMS = 1 << 14 };

#define SMALLEST_LARGEST 1e-30f

typedef uint8_t vb __attribute__((vector_size(VW)));

/* Returns the scale; NaN where an item is not finite. */
INLINE float quantise_row(const char *x, uint8_t *codes, int64_t width, const int dtype)
{
    const vf to_integer = splat(12582912.0f); /* 1.5 * 2^23: adding it rounds */
    vf largest = splat(SMALLEST_LARGEST), not_finite = splat(0);
    for (int64_t i = 0; i < width; i += VW) {
        const vf item = load_some(x, i, width, dtype);
        largest = max_vector(largest, magnitude(item));
        not_finite += item * 0.0f;
    }
    const float most = max_of(largest)[0];
    const vf factor = splat(127.0f / most);
    for (int64_t i = 0; i < width; i += VW) {
        const vf scaled = load_some(x, i, width, dtype) * factor;
        const vb code = __builtin_convertvector((vu)(scaled + to_integer) + 128u, vb);
        memcpy(codes + i, &code, width - i < VW ? width - i : VW);
    }
    return most / 127.0f + sum_of(not_finite)[0];
}

INLINE void scale_row(const float *products, float scale, const char *bias, char *out, int64_t width, const int dtype)
{
    for (int64_t i = 0; i < width; i += VW) {
        vf item = load_some(products, i, width, FLOAT32) * scale;
        if (bias)
            item += load_some(bias, i, width, dtype);
        store_some(out, i, width, item, dtype);
    }
}

/* x (rows, width) -> codes (rows, width) and scales (rows,). */
int quantise_rows(const char *x, uint8_t *codes, float *scales, int64_t rows, int64_t width, int64_t dtype,
                  int64_t num_threads)
{
    const int64_t bytes = width * item_bytes((int)dtype);
#pragma omp parallel for num_threads((int)num_threads) if (num_threads > 1 && rows > 1 &&                              \
                                                               rows * width >= MIN_PARALLEL_ITEMS)
    for (int64_t row = 0; row < rows; row++) {
        FOR_DTYPE(scales[row] = quantise_row(x + row * bytes, codes + row * width, width, TYPE))
    }
    return 0;
}

/* products (rows, width), scales (rows,), bias (width,) or NULL -> out (rows, width); `dtype` is bias's and out's. */
int scale_rows(const float *products, const float *scales, const char *bias, char *out, int64_t rows, int64_t width,
               int64_t dtype, int64_t num_threads)
{
    const int64_t bytes = width * item_bytes((int)dtype);
#pragma omp parallel for num_threads((int)num_threads) if (num_threads > 1 && rows > 1 &&                              \
                                                               rows * width >= MIN_PARALLEL_ITEMS)
    for (int64_t row = 0; row < rows; row++) {
        FOR_DTYPE(scale_row(products + row * width, scales[row], bias, out + row * bytes, width, TYPE))
    }
    return 0;
}
