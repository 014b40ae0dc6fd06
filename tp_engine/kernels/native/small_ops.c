/* Row by row: root mean square normalisation, and SwiGLU's product.  Rows are contiguous; float32 inside. */

#include "swiglu.h"
#include "tape.h"

/* Items below which a second thread would cost more than it saves. */
enum { MIN_PARALLEL_ITEMS = 1 << 14 };

/* out = (x + residual) / rms * weight, and the rounded sum goes to `residual`; without one, out = x / rms * weight. */
INLINE void norm_row(const char *x, char *residual, const char *weight, char *out, int64_t width, float eps, const int dtype)
{
    vf squares = splat(0);
    for (int64_t i = 0; i < width; i += VW) {
        vf item = load_some(x, i, width, dtype);
        if (residual) {
            item = rounded(item + load_some(residual, i, width, dtype), dtype);
            store_some(residual, i, width, item, dtype);
        }
        squares += item * item;
    }
    const vf factor = splat(1.0f / sqrtf(sum_of(squares)[0] / (float)width + eps));
    const char *from = residual ? residual : x;
    for (int64_t i = 0; i < width; i += VW)
        store_some(out, i, width, load_some(from, i, width, dtype) * factor * load_some(weight, i, width, dtype), dtype);
}

/* out = silu(gate) * up of a row. */
INLINE void silu_row(const char *gate, const char *up, char *out, int64_t width, const int dtype)
{
    for (int64_t i = 0; i < width; i += VW) {
        const vf item = swiglu(load_some(gate, i, width, dtype), load_some(up, i, width, dtype), dtype);
        store_some(out, i, width, item, dtype);
    }
}

/* x, residual, out (rows, width); `residual` may be NULL. */
int rms_norm(const char *x, char *residual, const char *weight, char *out, int64_t rows, int64_t width, float eps, int64_t dtype,
             int64_t num_threads)
{
    const int64_t bytes = width * item_bytes((int)dtype);
#pragma omp parallel for num_threads((int)num_threads) if (num_threads > 1 && rows > 1 && rows * width >= MIN_PARALLEL_ITEMS)
    for (int64_t row = 0; row < rows; row++) {
        char *const sum = residual ? residual + row * bytes : residual;
        FOR_DTYPE(norm_row(x + row * bytes, sum, weight, out + row * bytes, width, eps, TYPE))
    }
    return 0;
}

/* gate_up (rows, 2 * width) -> out (rows, width). */
int silu_and_mul(const char *gate_up, char *out, int64_t rows, int64_t width, int64_t dtype, int64_t num_threads)
{
    const int64_t bytes = width * item_bytes((int)dtype);
#pragma omp parallel for num_threads((int)num_threads) if (num_threads > 1 && rows > 1 && rows * width >= MIN_PARALLEL_ITEMS)
    for (int64_t row = 0; row < rows; row++) {
        const char *const gate = gate_up + 2 * row * bytes;
        FOR_DTYPE(silu_row(gate, gate + bytes, out + row * bytes, width, TYPE))
    }
    return 0;
}

int play_rms_norm(const Word *a)
{
    return rms_norm(a[0].pointer, a[1].pointer, a[2].pointer, a[3].pointer, a[4].integer, a[5].integer, a[6].number,
                    a[7].integer, a[8].integer);
}

int play_silu_and_mul(const Word *a)
{
    return silu_and_mul(a[0].pointer, a[1].pointer, a[2].integer, a[3].integer, a[4].integer, a[5].integer);
}
