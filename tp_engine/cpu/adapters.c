/* Products with adapters: kernels/linear/adapters.py has the formulas and the order of the matrices.

   A tile is some rows of one slot.  First each row becomes `rank` numbers for each part, float32, by sums across
   vectors; then these times B, whose rows lie along the outputs, are added to the row's output.  A sum's items are
   added in their order, whatever rows are computed together, so a row's result is the same, bit by bit, in each batch
   and with any number of threads. */

#include "simd.h"

enum { BLOCK = 4, CHUNK = 16 * VW, MAX_PARTS = 8 };
enum { MIN_PARALLEL_PRODUCTS = 1 << 16 };

/* Mirrored in layout.py.  Strides are in elements. */
typedef struct {
    const char *a, *b;
    const int32_t *ranks;
    int64_t in_size, out_size, max_rank, num_parts, dtype;
    int64_t part_sizes[MAX_PARTS];
} Adapters;

typedef struct {
    const Adapters *w;
    const char *x;
    char *out;
    const int32_t *rows, *tiles;
    float *shrunk; /* (rows, parts * max_rank) */
    int64_t x_stride;
} AdapterStep;

/* Products of `rows` <= BLOCK rows of x and `count` <= BLOCK rows of A: to[r * stride + j]. */
INLINE void shrink_block(float *to, int64_t stride, const char *const *x, const int rows, const char *a,
                         const int count, int64_t size, const int dtype)
{
    vf sums[BLOCK][BLOCK] = {{{0}}};
    for (int64_t i = 0; i < size; i += VW) {
        vf items[BLOCK];
#pragma GCC unroll 4
        for (int j = 0; j < count; j++)
            items[j] = load_some(a + j * size * item_bytes(dtype), i, size, dtype);
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) {
            const vf item = load_some(x[r], i, size, dtype);
#pragma GCC unroll 4
            for (int j = 0; j < count; j++)
                sums[r][j] = multiply_add(sums[r][j], item, items[j]);
        }
    }
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < count; j++)
            to[r * stride + j] = sum_of(sums[r][j])[0];
}

/* Rows `first` to `first + count` of A, at most BLOCK, with all rows of a tile. */
INLINE void shrink_tile(const AdapterStep *s, const int32_t *tile, int64_t first, int64_t count, const int dtype)
{
    const Adapters *w = s->w;
    const int64_t height = w->num_parts * w->max_rank, size = item_bytes(dtype);
    const char *a = w->a + (tile[2] * height + first) * w->in_size * size;
    for (int64_t done = 0; done < tile[1]; done += BLOCK) {
        const int64_t rows = smaller(BLOCK, tile[1] - done);
        const char *x[BLOCK];
        for (int64_t r = 0; r < rows; r++)
            x[r] = s->x + s->rows[tile[0] + done + r] * s->x_stride * size;
        float *to = s->shrunk + (tile[0] + done) * height + first;
        if (rows == BLOCK && count == BLOCK)
            shrink_block(to, height, x, BLOCK, a, BLOCK, w->in_size, dtype);
        else
            for (int64_t r = 0; r < rows; r++) {
                if (count == BLOCK)
                    shrink_block(to + r * height, height, x + r, 1, a, BLOCK, w->in_size, dtype);
                else
                    for (int64_t j = 0; j < count; j++)
                        shrink_block(to + r * height + j, height, x + r, 1, a + j * w->in_size * size, 1, w->in_size,
                                     dtype);
            }
    }
}

/* `vectors` vectors of outputs from `i` on, of `width` in all: out += shrunk (rank) times rows of B, `stride` bytes
   apart. */
INLINE void expand_block(char *out, const float *shrunk, int64_t rank, const char *b, int64_t stride, int64_t i,
                         int64_t width, const int vectors, const int dtype)
{
    vf sums[BLOCK] = {{0}};
    for (int64_t k = 0; k < rank; k++) {
        const vf factor = splat(shrunk[k]);
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++)
            sums[v] = multiply_add(sums[v], factor, load_some(b + k * stride, i + v * VW, width, dtype));
    }
#pragma GCC unroll 4
    for (int v = 0; v < vectors; v++)
        store_some(out, i + v * VW, width, load_some(out, i + v * VW, width, dtype) + sums[v], dtype);
}

/* Outputs `from` to `to` of a part, whose columns begin with `first`, of all rows of a tile. */
INLINE void expand_tile(const AdapterStep *s, const int32_t *tile, int64_t part, int64_t first, int64_t from,
                        int64_t to, const int dtype)
{
    const Adapters *w = s->w;
    const int64_t rank = w->ranks[tile[2]], height = w->num_parts * w->max_rank, size = item_bytes(dtype);
    const int64_t stride = w->out_size * size;
    const char *b = w->b + tile[2] * w->max_rank * stride + first * size;
    for (int64_t r = 0; r < tile[1]; r++) {
        const float *shrunk = s->shrunk + (tile[0] + r) * height + part * w->max_rank;
        char *out = s->out + s->rows[tile[0] + r] * stride + first * size;
        int64_t i = from;
        for (; i + BLOCK * VW <= to; i += BLOCK * VW)
            expand_block(out, shrunk, rank, b, stride, i, to, BLOCK, dtype);
        for (; i < to; i += VW)
            expand_block(out, shrunk, rank, b, stride, i, to, 1, dtype);
    }
}

static void shrink_task(const AdapterStep *s, const int32_t *tile, int64_t task, int64_t dtype)
{
    const Adapters *w = s->w;
    const int64_t rank = w->ranks[tile[2]], blocks = (w->max_rank + BLOCK - 1) / BLOCK;
    const int64_t part = task / blocks, first = task % blocks * BLOCK;
    if (first < rank)
        FOR_DTYPE(shrink_tile(s, tile, part * w->max_rank + first, smaller(BLOCK, rank - first), TYPE))
}

static void expand_task(const AdapterStep *s, const int32_t *tile, int64_t task, int64_t dtype)
{
    const Adapters *w = s->w;
    int64_t part = 0, first = 0;
    if (!w->ranks[tile[2]])
        return;
    for (; task >= (w->part_sizes[part] + CHUNK - 1) / CHUNK; part++) {
        task -= (w->part_sizes[part] + CHUNK - 1) / CHUNK;
        first += w->part_sizes[part];
    }
    const int64_t from = task * CHUNK, to = smaller(w->part_sizes[part], from + CHUNK);
    FOR_DTYPE(expand_tile(s, tile, part, first, from, to, TYPE))
}

/* out (N, out_size), contiguous, += the adapters' products of x (N, in_size), whose rows are x_stride elements apart.
   rows (n) and tiles (num_tiles, 3) as in AdapterRows; shrunk has room for (n, num_parts * max_rank). */
int add_adapters(const Adapters *w, const void *x, int64_t x_stride, void *out, const int32_t *rows,
                 const int32_t *tiles, float *shrunk, int64_t num_rows, int64_t num_tiles, int64_t num_threads)
{
    const AdapterStep s = {w, x, out, rows, tiles, shrunk, x_stride};
    const int64_t to_shrink = w->num_parts * ((w->max_rank + BLOCK - 1) / BLOCK);
    int64_t to_expand = 0;
    for (int64_t part = 0; part < w->num_parts; part++)
        to_expand += (w->part_sizes[part] + CHUNK - 1) / CHUNK;
    const int64_t work = num_rows * w->max_rank * (w->num_parts * w->in_size + w->out_size);
#pragma omp parallel num_threads((int)num_threads) if (num_threads > 1 && work >= MIN_PARALLEL_PRODUCTS)
    {
#pragma omp for schedule(static)
        for (int64_t task = 0; task < num_tiles * to_shrink; task++)
            shrink_task(&s, tiles + task % num_tiles * 3, task / num_tiles, w->dtype);
#pragma omp for schedule(static)
        for (int64_t task = 0; task < num_tiles * to_expand; task++)
            expand_task(&s, tiles + task % num_tiles * 3, task / num_tiles, w->dtype);
    }
    return 0;
}
