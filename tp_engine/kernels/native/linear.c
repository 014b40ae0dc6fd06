/* x @ weight.T + bias for few rows of x, where reading the weight is what takes the time.

   A tile is OUTPUTS rows of the weight times up to TILE_ROWS rows of x: 24 sums in registers with AVX-512.  A block is as
   many outputs as fill a cache line, and belongs to one thread; its weights stay in the second-level cache while all tiles
   of rows use them.  Where there are several, a tile takes a chunk of its rows at a time, which stays in the first-level
   cache for all outputs of the block; the sums wait in memory.

       for each block of outputs               in parallel
           for each tile of rows
               for each chunk of the rows      all of it, if there is one tile: the weight is read once, in order
                   for OUTPUTS at a time       the next ones are read ahead; with several tiles each of them reads
                                               a part of the next block ahead, while all of them compute

   A sum's items are added in the same order wherever the row and the output lie in their tiles: a row's result is the same
   bit by bit in each batch, and with any number of threads. */

#include "simd.h"
#include "tape.h"

#if VW == 16
enum { TILE_ROWS = 6 };
#else
enum { TILE_ROWS = 3 };
#endif
enum { OUTPUTS = 4, STEP = 2 * VW, MAX_BLOCK = 32, CHUNK_BYTES = 2048 };

/* Multiplications below which a second thread would cost more than it saves. */
enum { MIN_PARALLEL_PRODUCTS = 1 << 15 };

typedef struct {
    const char *x, *weight, *bias;
    char *out;
    int64_t x_stride; /* in bytes */
    int64_t rows, out_size, in_size;
} Linear;

/* OUTPUTS rows of the weight, and others that will be needed soon. */
typedef struct {
    const char *rows[OUTPUTS], *next[OUTPUTS];
    int num_next;
} Weights;

/* A tile's sums: of rows of x, by OUTPUTS. */
typedef vf Sums[TILE_ROWS][OUTPUTS];

/* What a block's tile has come to: its sums between chunks, and at last its results, row by row. */
typedef struct {
    Sums sums[MAX_BLOCK / OUTPUTS];
    float results[TILE_ROWS][MAX_BLOCK];
} Unfinished;

/* STEP items, as add_product wants them. */
typedef struct {
    vf first, second;
} Pair;

/* Those of bfloat16 stay as they are where the processor multiplies them; elsewhere they come out as the even and the odd
   ones: two instructions instead of four. */
INLINE Pair load_pair(const char *row, int64_t i, const int dtype)
{
    if (dtype == BFLOAT16 && MULTIPLIES_BFLOAT16)
        return (Pair){load_vector((const float *)(row + 2 * i)), (vf){0}};
    if (dtype == BFLOAT16) {
        const vu both = (vu)load_vector((const float *)(row + 2 * i));
        return (Pair){(vf)(both << 16), (vf)(both & 0xffff0000)};
    }
    return (Pair){load_items(row, i, dtype), load_items(row, i + VW, dtype)};
}

/* The last `count` < STEP items of a row of `size`, with zeros in place of the others. */
INLINE Pair load_pair_tail(const char *row, int64_t size, int64_t count, const int dtype)
{
    static const uint8_t masks[2 * STEP * 4] = {[STEP * 4 ... 2 * STEP * 4 - 1] = 0xff};
    const int64_t bytes = item_bytes(dtype);
    float items[STEP] = {0};
    if (size < STEP) {
        memcpy(items, row, size * bytes);
        return load_pair((const char *)items, 0, dtype);
    }
    const char *from = row + (size - STEP) * bytes;
    const uint8_t *mask = masks + STEP * 4 - (STEP - count) * bytes;
    for (int64_t byte = 0; byte < STEP * bytes; byte += 4 * VW) {
        const vi kept = (vi)load_vector((const float *)(mask + byte));
        store_vector(items + byte / 4, (vf)((vi)load_vector((const float *)(from + byte)) & kept));
    }
    return load_pair((const char *)items, 0, dtype);
}

INLINE vf add_product(vf sum, Pair x, Pair weight, const int dtype)
{
    if (dtype == BFLOAT16 && MULTIPLIES_BFLOAT16)
        return add_pair_products(sum, x.first, weight.first);
    sum += x.first * weight.first;
    return sum + x.second * weight.second;
}

/* Adds the products of items i to i + STEP, or of the last `tail` items, to the sums of a tile. */
INLINE void add_products(Sums sums, const Linear *p, const char *x, const char *const *weights, int64_t i, int64_t tail,
                         const int rows, const int dtype)
{
    Pair weight[OUTPUTS];
#pragma GCC unroll 4
    for (int o = 0; o < OUTPUTS; o++)
        weight[o] = tail ? load_pair_tail(weights[o], p->in_size, tail, dtype) : load_pair(weights[o], i, dtype);
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) {
        const char *row = x + r * p->x_stride;
        const Pair item = tail ? load_pair_tail(row, p->in_size, tail, dtype) : load_pair(row, i, dtype);
#pragma GCC unroll 4
        for (int o = 0; o < OUTPUTS; o++)
            sums[r][o] = add_product(sums[r][o], item, weight[o], dtype);
    }
}

INLINE void copy_sums(Sums to, Sums from, const int rows)
{
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) {
#pragma GCC unroll 4
        for (int o = 0; o < OUTPUTS; o++)
            to[r][o] = from[r][o];
    }
}

/* Items `begin` to `end` of a tile's rows times OUTPUTS rows of the weight; `results` are set when the rows end. */
INLINE void multiply_tile(const Linear *p, const char *x, const Weights *weights, int64_t begin, int64_t end, Sums waiting,
                          float *results, const int rows, const int dtype)
{
    Sums sums = {0};
    int64_t i = begin;
    if (begin)
        copy_sums(sums, waiting, rows);
    for (; i + STEP <= end; i += STEP) {
        for (int o = 0; o < weights->num_next; o++)
            for (int byte = 0; byte < STEP * item_bytes(dtype); byte += CACHE_LINE)
                __builtin_prefetch(weights->next[o] + i * item_bytes(dtype) + byte, 0, 2);
        add_products(sums, p, x, weights->rows, i, 0, rows, dtype);
    }
    if (end < p->in_size) {
        copy_sums(waiting, sums, rows);
        return;
    }
    if (i < end)
        add_products(sums, p, x, weights->rows, i, end - i, rows, dtype);
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
        *(v4f_memory *)(results + r * MAX_BLOCK) = sums_of_four(sums[r][0], sums[r][1], sums[r][2], sums[r][3]);
}

/* The tiles are as equal as can be. */
INLINE int64_t first_row(const Linear *p, int64_t tile, int64_t num_tiles) { return tile * p->rows / num_tiles; }

#define TILE_OF(n) \
    case n: multiply_tile(p, x, &weights, begin, end, to->sums[o / OUTPUTS], to->results[0] + o, n, dtype); break

/* Tile number `tile` of `num_tiles`: items `begin` to `end` of its rows times outputs `first` to `first + count`; in place
   of outputs beyond, the last one is repeated. */
INLINE void multiply_block(const Linear *p, int64_t tile, int64_t num_tiles, int64_t first, int64_t count, int64_t begin,
                           int64_t end, Unfinished *to, const int dtype)
{
    const int64_t bytes = p->in_size * item_bytes(dtype), row = first_row(p, tile, num_tiles);
    const char *x = p->x + row * p->x_stride;
    for (int64_t o = 0; o < count; o += OUTPUTS) {
        Weights weights = {.num_next = 0};
        for (int i = 0; i < OUTPUTS; i++) {
            weights.rows[i] = p->weight + (first + smaller(o + i, count - 1)) * bytes;
            if ((o + i) % num_tiles == tile)
                weights.next[weights.num_next++] = weights.rows[i] + (num_tiles == 1 ? OUTPUTS : count) * bytes;
        }
        switch (first_row(p, tile + 1, num_tiles) - row) {
            TILE_OF(1);
            TILE_OF(2);
            TILE_OF(3);
#if VW == 16
            TILE_OF(4);
            TILE_OF(5);
            TILE_OF(6);
#endif
        }
    }
}

/* Adds the bias, rounds, and stores outputs `first` to `first + count` of a row. */
INLINE void finish_row(const Linear *p, int64_t row, int64_t first, int64_t count, const float *results, const int dtype)
{
    char *out = p->out + (row * p->out_size + first) * item_bytes(dtype);
    const char *bias = p->bias ? p->bias + first * item_bytes(dtype) : NULL;
    for (int64_t o = 0; o < count; o += VW) {
        const vf sum = load_vector(results + o);
        store_some(out, o, count, bias ? sum + load_some(bias, o, count, dtype) : sum, dtype);
    }
}

/* All rows times one block of outputs. */
INLINE void linear_block(const Linear *p, int64_t first, int64_t count, const int dtype)
{
    const int64_t num_tiles = (p->rows + TILE_ROWS - 1) / TILE_ROWS;
    const int64_t chunk = num_tiles == 1 ? p->in_size : CHUNK_BYTES / item_bytes(dtype);
    Unfinished unfinished;
    for (int64_t tile = 0; tile < num_tiles; tile++) {
        for (int64_t begin = 0; begin < p->in_size; begin += chunk)
            multiply_block(p, tile, num_tiles, first, count, begin, smaller(begin + chunk, p->in_size), &unfinished, dtype);
        const int64_t row = first_row(p, tile, num_tiles), end = first_row(p, tile + 1, num_tiles);
        for (int64_t r = row; r < end; r++)
            finish_row(p, r, first, count, unfinished.results[r - row], dtype);
    }
}

/* out = x @ weight.T + bias: x (rows, in_size), its rows x_stride elements apart; weight (out_size, in_size), bias
   (out_size) or NULL and out (rows, out_size) contiguous; all of one dtype.  Sums are float32 and rounded once. */
int few_rows_linear(const void *x, int64_t x_stride, const void *weight, const void *bias, void *out, int64_t rows,
                    int64_t out_size, int64_t in_size, int64_t dtype, int64_t num_threads)
{
    const int64_t bytes = item_bytes((int)dtype), block = CACHE_LINE / bytes;
    const Linear p = {x, weight, bias, out, x_stride * bytes, rows, out_size, in_size};
    const int64_t num_blocks = (out_size + block - 1) / block;
    const int is_parallel = num_threads > 1 && rows * out_size * in_size >= MIN_PARALLEL_PRODUCTS;
#pragma omp parallel for schedule(static) num_threads((int)num_threads) if (is_parallel)
    for (int64_t i = 0; i < num_blocks; i++) {
        const int64_t first = i * block;
        FOR_DTYPE(linear_block(&p, first, smaller(block, out_size - first), TYPE))
    }
    return 0;
}

int play_few_rows_linear(const Word *a)
{
    return few_rows_linear(a[0].pointer, a[1].integer, a[2].pointer, a[3].pointer, a[4].pointer, a[5].integer, a[6].integer,
                           a[7].integer, a[8].integer, a[9].integer);
}

/* Whether the processor multiplies bfloat16 by instructions that oneDNN uses and this file does not. */
int has_bfloat16_matrices(void)
{
#if defined(__AMX_BF16__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
    return 1;
#else
    return 0;
#endif
}
