/* Normalisation, sums, activations and capped logits, row by row.  Rows are contiguous; float32 inside. */

#include "gated.h"
#include "tape.h"

/* Items below which a second thread would cost more than it saves, and items of a longer row that a thread takes at a
   time. */
enum { MIN_PARALLEL_ITEMS = 1 << 14, CHUNK = 1 << 12 };

typedef struct {
    const char *weight;
    int64_t width;
    float eps, offset;
    int is_centred;
} NormRule;

/* The sum of (x - mean)^2, spread over the lanes.  The mean is corrected by the mean of what is left after subtracting
   it. */
INLINE vf squares_around(const char *x, float *mean, int64_t width, const int dtype)
{
    vf squares = splat(0), sum = splat(0);
    for (int64_t i = 0; i < width; i += VW) {
        vf item = load_some(x, i, width, dtype) - *mean;
        for (int64_t lane = width - i; lane < VW; lane++)
            item[lane] = 0;
        squares += item * item;
        sum += item;
    }
    *mean += sum_of(sum)[0] / (float)width;
    return squares;
}

/* out = y / rms(y) * weight.  y = (x * scale + residual) * stream is rounded and stored in `residual`; without a
   residual, y = x.  A rule `is_special` if it has an offset or subtracts the mean. */
INLINE void norm_row(const char *x, char *residual, char *out, const NormRule *rule, float scale, float stream,
                     const int is_special, const int dtype)
{
    const int64_t width = rule->width;
    vf squares = splat(0), sum = splat(0);
    for (int64_t i = 0; i < width; i += VW) {
        vf item = load_some(x, i, width, dtype);
        if (residual) {
            item = rounded((item * scale + load_some(residual, i, width, dtype)) * stream, dtype);
            store_some(residual, i, width, item, dtype);
        }
        squares += item * item;
        if (is_special)
            sum += item;
    }
    const char *from = residual ? residual : x;
    float mean = 0;
    if (is_special && rule->is_centred) {
        mean = sum_of(sum)[0] / (float)width;
        squares = squares_around(from, &mean, width, dtype);
    }
    const vf factor = splat(1.0f / sqrtf(sum_of(squares)[0] / (float)width + rule->eps));
    for (int64_t i = 0; i < width; i += VW) {
        vf item = load_some(from, i, width, dtype), weight = load_some(rule->weight, i, width, dtype);
        if (is_special)
            item -= mean, weight += rule->offset;
        store_some(out, i, width, item * factor * weight, dtype);
    }
}

/* out = the activation of a row, `gate` then up, or up alone. */
INLINE void gate_row(const char *gate, char *out, int64_t width, float alpha, float limit, const int kind,
                     const int dtype)
{
    const char *const up = gate + width * item_bytes(dtype);
    for (int64_t i = 0; i < width; i += VW) {
        const vf first = load_some(gate, i, width, dtype);
        if (kind == RELU2)
            store_some(out, i, width, squared_relu(first), dtype);
        else
            store_some(out, i, width, gated(first, load_some(up, i, width, dtype), alpha, limit, kind, dtype), dtype);
    }
}

/* residual = (residual + x * scale) * stream of some items. */
INLINE void add_items(const char *x, char *residual, int64_t count, float scale, float stream, const int dtype)
{
    for (int64_t i = 0; i < count; i += VW) {
        const vf sum = load_some(x, i, count, dtype) * scale + load_some(residual, i, count, dtype);
        store_some(residual, i, count, sum * stream, dtype);
    }
}

/* Some logits times `scale`, capped unless `cap` is 0. */
INLINE void cap_items(char *logits, int64_t count, float scale, float cap, const int dtype)
{
    for (int64_t i = 0; i < count; i += VW) {
        const vf item = load_some(logits, i, count, dtype) * scale;
        store_some(logits, i, count, cap > 0 ? tanh_vector(item / cap) * cap : item, dtype);
    }
}

/* x, residual, out (rows, width), those of x `stride` elements apart; `residual` may be NULL. */
TAPED int norm_rows(const char *x, char *residual, const char *weight, char *out, int64_t rows, int64_t width,
                    int64_t stride, float eps, float offset, float scale, float stream, int64_t is_centred,
                    int64_t dtype, int64_t num_threads)
{
    const int64_t bytes = width * item_bytes((int)dtype);
    const NormRule rule = {weight, width, eps, offset, (int)is_centred};
    const int is_special = is_centred || offset != 0;
#pragma omp parallel for num_threads((int)num_threads) if (num_threads > 1 && rows > 1 &&                              \
                                                               rows * width >= MIN_PARALLEL_ITEMS)
    for (int64_t row = 0; row < rows; row++) {
        const char *const from = x + row * stride * item_bytes((int)dtype);
        char *const sum = residual ? residual + row * bytes : residual, *const to = out + row * bytes;
        if (is_special)
            FOR_DTYPE(norm_row(from, sum, to, &rule, scale, stream, 1, TYPE))
        else
            FOR_DTYPE(norm_row(from, sum, to, &rule, scale, stream, 0, TYPE))
    }
    return 0;
}

/* residual (count,) = (residual + x (count,) * scale) * stream. */
TAPED int add_scaled(const char *x, char *residual, int64_t count, float scale, float stream, int64_t dtype,
                     int64_t num_threads)
{
#pragma omp parallel for num_threads((int)num_threads) if (num_threads > 1 && count >= MIN_PARALLEL_ITEMS)
    for (int64_t first = 0; first < count; first += CHUNK) {
        const int64_t skipped = first * item_bytes((int)dtype), own = smaller(CHUNK, count - first);
        FOR_DTYPE(add_items(x + skipped, residual + skipped, own, scale, stream, TYPE))
    }
    return 0;
}

/* Rows of `bytes`, which lie apart by strides in bytes. */
TAPED int copy_rows(const char *from, char *to, int64_t rows, int64_t bytes, int64_t from_stride, int64_t to_stride)
{
    for (int64_t row = 0; row < rows; row++)
        memcpy(to + row * to_stride, from + row * from_stride, (size_t)bytes);
    return 0;
}

/* gate_up (rows, parts * width) -> out (rows, width). */
TAPED int gate_rows(const char *gate_up, char *out, int64_t rows, int64_t width, int64_t kind, float alpha, float limit,
                    int64_t dtype, int64_t num_threads)
{
    const int64_t bytes = width * item_bytes((int)dtype);
#pragma omp parallel for num_threads((int)num_threads) if (num_threads > 1 && rows > 1 &&                              \
                                                               rows * width >= MIN_PARALLEL_ITEMS)
    for (int64_t row = 0; row < rows; row++) {
        const char *const own = gate_up + parts_of((int)kind) * row * bytes;
        FOR_KIND(FOR_DTYPE(gate_row(own, out + row * bytes, width, alpha, limit, KIND, TYPE)))
    }
    return 0;
}

/* logits (rows, width), `stride` elements from row to row, in place; `cap` 0: they are only scaled. */
TAPED int cap_logits(char *logits, int64_t stride, int64_t rows, int64_t width, float scale, float cap, int64_t dtype,
                     int64_t num_threads)
{
    const int64_t chunks = (width + CHUNK - 1) / CHUNK;
#pragma omp parallel for num_threads((int)num_threads) if (num_threads > 1 && rows * width >= MIN_PARALLEL_ITEMS)
    for (int64_t task = 0; task < rows * chunks; task++) {
        const int64_t first = task % chunks * CHUNK, place = task / chunks * stride + first;
        FOR_DTYPE(cap_items(logits + place * item_bytes(TYPE), smaller(CHUNK, width - first), scale, cap, TYPE))
    }
    return 0;
}
