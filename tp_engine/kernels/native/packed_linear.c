/* x @ weight.T + bias with the weight in an order of its own, in which no sum crosses a vector:

       item      a float32, or a pair of bfloat16 where the processor multiplies them
       panel     (items, PANEL): item 0 of PANEL outputs side by side, then item 1 of them ...
       weight    panels, one after another; outputs beyond the last are zeros

   A tile is a panel times up to TILE_ROWS rows of x: 24 sums in registers with AVX-512, 12 otherwise.  Each task has one
   panel and some of the rows, and goes through CHUNK items at a time, which stay in the second-level cache for all its
   tiles, while these fetch what follows in memory: the next chunk, or the next panel.  A single tile reads the weight
   from end to end, which the processor foresees better without being asked.

   A sum's items are added in their order: a row's result is the same bit by bit in each batch, and with any number of
   threads. */

#include "simd.h"
#include "tape.h"

#if VW == 16
enum { VECTORS = 4 };
#else
enum { VECTORS = 2 };
#endif
enum { TILE_ROWS = 6, PANEL = VECTORS * VW, PANEL_LINES = PANEL * 4 / CACHE_LINE, CHUNK = 1024, GROUP = 16 * TILE_ROWS };

/* Products below which a second thread would cost more than it saves. */
enum { MIN_PARALLEL_PRODUCTS = 1 << 15 };

typedef float item_memory __attribute__((aligned(2), may_alias));

typedef struct {
    const char *x, *bias;
    char *out;
    const float *weight;
    int64_t x_stride; /* in bytes */
    int64_t rows, out_size, items;
} Linear;

typedef vf Sums[TILE_ROWS][VECTORS];

int panel_width(void) { return PANEL; }

int multiplies_bfloat16(void) { return MULTIPLIES_BFLOAT16; }

/* VW items from `first` on of an output's row, or what there is of them. */
static vf load_row(const float *weight, int64_t output, int64_t out_size, int64_t first, int64_t items)
{
    return output < out_size ? load_some(weight + output * items, first, items, FLOAT32) : splat(0);
}

/* weight (out_size, items) -> packed (panels, items, PANEL). */
int pack_weight(const float *weight, float *packed, int64_t out_size, int64_t items, int64_t num_threads)
{
    const int64_t num_panels = (out_size + PANEL - 1) / PANEL;
#pragma omp parallel for schedule(static) num_threads((int)num_threads)
    for (int64_t panel = 0; panel < num_panels; panel++)
        for (int64_t o = 0; o < PANEL; o += VW)
            for (int64_t i = 0; i < items; i += VW) {
                float *to = packed + (panel * items + i) * PANEL + o;
                vf rows[VW];
                for (int j = 0; j < VW; j++)
                    rows[j] = load_row(weight, panel * PANEL + o + j, out_size, i, items);
                transpose(rows);
                for (int j = 0; j < smaller(VW, items - i); j++)
                    store_vector(to + j * PANEL, rows[j]);
            }
    return 0;
}

/* Adds `count` items of some rows times a panel to `sums`; each item asks for `lines` lines of the memory at `ahead`. */
INLINE void multiply_tile(Sums sums, const char *x, int64_t x_stride, const float *panel, int64_t count, const char *ahead,
                          int64_t lines, const int rows, const int by_pairs)
{
    for (int64_t i = 0; i < count; i++) {
        vf weight[VECTORS];
        for (int64_t line = 0; line < lines; line++, ahead += CACHE_LINE)
            __builtin_prefetch(ahead, 0, 2);
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++)
            weight[v] = load_vector(panel + i * PANEL + v * VW);
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++) {
            const vf item = splat(((const item_memory *)(x + r * x_stride))[i]);
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++)
                sums[r][v] = by_pairs ? add_pair_products(sums[r][v], item, weight[v]) : sums[r][v] + item * weight[v];
        }
    }
}

/* Adds the bias, rounds, and stores a tile's outputs from `first` on. */
INLINE void store_tile(const Linear *p, Sums sums, int64_t row, int64_t first, const int rows, const int dtype)
{
    const int64_t bytes = item_bytes(dtype), count = smaller(PANEL, p->out_size - first);
    const char *bias = p->bias ? p->bias + first * bytes : NULL;
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) {
        char *out = p->out + ((row + r) * p->out_size + first) * bytes;
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++)
            if (v * VW < count)
                store_some(out, v * VW, count, bias ? sums[r][v] + load_some(bias, v * VW, count, dtype) : sums[r][v], dtype);
    }
}

/* One tile over one chunk of items; between chunks its sums wait in `waiting`. */
INLINE void run_tile(const Linear *p, int64_t row, int64_t panel, int64_t begin, int64_t end, int64_t turn, int64_t turns,
                     float *waiting, const int rows, const int dtype)
{
    const float *weight = p->weight + (panel * p->items + begin) * PANEL;
    const int64_t lines = turns > 1 ? (PANEL_LINES + turns - 1) / turns : 0, step = lines * (end - begin) * CACHE_LINE;
    const char *ahead = (const char *)(weight + (end - begin) * PANEL) + turn * step;
    Sums sums = {0};
    if (begin)
        memcpy(sums, waiting, sizeof(vf) * rows * VECTORS);
    multiply_tile(sums, p->x + row * p->x_stride + begin * 4, p->x_stride, weight, end - begin, ahead, lines, rows,
                  dtype == BFLOAT16);
    if (end < p->items)
        memcpy(waiting, sums, sizeof(vf) * rows * VECTORS);
    else
        store_tile(p, sums, row, panel * PANEL, rows, dtype);
}

#define RUN_TILE(n) case n: run_tile(p, row, panel, begin, end, tile, num_tiles, sums, n, dtype); break

/* Rows `first` to `first + count`, at most GROUP, times one panel.  The tiles are as equal as can be. */
INLINE void run_group(const Linear *p, int64_t first, int64_t count, int64_t panel, const int dtype)
{
    float waiting[GROUP * PANEL];
    const int64_t num_tiles = (count + TILE_ROWS - 1) / TILE_ROWS, chunk = num_tiles > 1 ? CHUNK : p->items;
    for (int64_t begin = 0; begin < p->items; begin += chunk) {
        const int64_t end = smaller(begin + chunk, p->items);
        for (int64_t tile = 0; tile < num_tiles; tile++) {
            const int64_t row = first + tile * count / num_tiles;
            float *sums = waiting + (row - first) * PANEL;
            switch (first + (tile + 1) * count / num_tiles - row) {
                RUN_TILE(1);
                RUN_TILE(2);
                RUN_TILE(3);
                RUN_TILE(4);
                RUN_TILE(5);
                RUN_TILE(6);
            }
        }
    }
}

/* out = x @ weight.T + bias: x (rows, items), its rows x_stride elements of `dtype` apart; weight as packed; bias
   (out_size) or NULL and out (rows, out_size) contiguous.  Sums are float32 and rounded once. */
int packed_linear(const void *x, int64_t x_stride, const float *weight, const void *bias, void *out, int64_t rows,
                  int64_t out_size, int64_t items, int64_t dtype, int64_t num_threads)
{
    const Linear p = {x, bias, out, weight, x_stride * item_bytes((int)dtype), rows, out_size, items};
    const int64_t num_panels = (out_size + PANEL - 1) / PANEL, num_groups = (rows + GROUP - 1) / GROUP;
    const int is_parallel = num_threads > 1 && rows * out_size * items >= MIN_PARALLEL_PRODUCTS;
#pragma omp parallel for schedule(static) num_threads((int)num_threads) if (is_parallel)
    for (int64_t task = 0; task < num_panels * num_groups; task++) {
        const int64_t panel = task / num_groups, group = task % num_groups;
        const int64_t first = group * rows / num_groups, count = (group + 1) * rows / num_groups - first;
        if (dtype == BFLOAT16)
            run_group(&p, first, count, panel, BFLOAT16);
        else
            run_group(&p, first, count, panel, FLOAT32);
    }
    return 0;
}

int play_packed_linear(const Word *a)
{
    return packed_linear(a[0].pointer, a[1].integer, a[2].pointer, a[3].pointer, a[4].pointer, a[5].integer, a[6].integer,
                         a[7].integer, a[8].integer, a[9].integer);
}

/* out (num_ids, items) = rows of a packed weight, whose first is that of first_id; zeros for ids that it does not hold. */
int embed_panels(const int32_t *ids, const float *packed, float *out, int64_t num_ids, int64_t items, int64_t first_id,
                 int64_t num_rows, int64_t num_threads)
{
    const int is_parallel = num_threads > 1 && num_ids * items >= MIN_PARALLEL_PRODUCTS;
#pragma omp parallel for schedule(static) num_threads((int)num_threads) if (is_parallel)
    for (int64_t n = 0; n < num_ids; n++) {
        const int64_t row = ids[n] - first_id;
        if (row < 0 || row >= num_rows) {
            memset(out + n * items, 0, items * sizeof(float));
            continue;
        }
        const float *from = packed + row / PANEL * PANEL * items + row % PANEL;
        for (int64_t i = 0; i < items; i++)
            memcpy(out + n * items + i, from + i * PANEL, sizeof(float));
    }
    return 0;
}

int play_embed_panels(const Word *a)
{
    return embed_panels(a[0].pointer, a[1].pointer, a[2].pointer, a[3].integer, a[4].integer, a[5].integer, a[6].integer,
                        a[7].integer);
}
