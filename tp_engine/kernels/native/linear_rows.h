/* x @ weight.T + bias with the weight in panels (panels.h); or gate times up of that, by an activation (gated.h).

   Each task has one panel and some of the rows, and reads its panel in chunks of items.  A chunk stays in the second-level
   cache for all tiles of rows (linear_tile.h), and these fetch what follows in memory: the next chunk, or the next panel.
   A single tile reads the weight from end to end: AMD's processors prefetch that best by themselves, Intel's get hints a
   few items ahead.

   A sum's items are added in their order, so a row's result is the same, bit by bit, in each batch and with any number of
   threads. */

#pragma once

#include "linear_tile.h"
#include "gated.h"

enum { GROUP = 16 * TILE_ROWS, CHUNK = 512, WHOLE = 2 * CHUNK, MANY_TILES = 8 };
enum { NEAR = 4096 }; /* bytes: far enough for memory's answer, and a small part of the first-level cache */

typedef struct {
    const char *x, *bias;
    char *out;
    const float *weight;
    int64_t x_stride; /* in bytes */
    int64_t rows, items, part_size; /* part_size: outputs of a part */
    float alpha, limit; /* of the activation */
    const float *factors; /* of quantised weights: of the sums, in the order of panels, or NULL */
} Linear;

/* Parts of a weight: gate and up, if there is an activation. */
INLINE int parts_of(const int kind) { return kind == NO_GATE ? 1 : 2; }

/* Adds the bias to `sum`, the sums of outputs `i` to `i + VW` of a part. */
INLINE vf add_bias(const Linear *p, vf sum, int64_t part, int64_t i, const int dtype)
{
    const int64_t skipped = part * p->part_size * item_bytes(dtype);
    return p->bias ? sum + load_some(p->bias + skipped, i, p->part_size, dtype) : sum;
}

/* Stores the results of some rows times a panel. */
INLINE void store_sums(const Linear *p, Sums sums, int64_t row, int64_t rows, int64_t panel, const int dtype, const int kind)
{
    const int vectors = VECTORS / parts_of(kind);
    for (int64_t r = 0; r < rows; r++) {
        char *out = p->out + (row + r) * p->part_size * item_bytes(dtype);
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) {
            const int64_t i = (panel * vectors + v) * VW;
            if (i >= p->part_size)
                break;
            vf result = add_bias(p, sums[r][v], 0, i, dtype);
            if (kind != NO_GATE) {
                const vf up = add_bias(p, sums[r][v + vectors], 1, i, dtype);
                result = gated(rounded(result, dtype), rounded(up, dtype), p->alpha, p->limit, kind, dtype);
            }
            store_some(out, i, p->part_size, result, dtype);
        }
    }
}

static int wants_hints(void)
{
#if defined(__x86_64__)
    return __builtin_cpu_is("intel");
#else
    return 0;
#endif
}

/* A single tile's rows times one panel. */
INLINE void run_alone(const Linear *p, int64_t row, int64_t rows, int64_t panel, const int dtype, const int kind)
{
    const float *weight = p->weight + panel * p->items * PANEL;
    const Tile tile = {.x = p->x + row * p->x_stride, .x_stride = p->x_stride, .panel = weight, .count = p->items,
                       .ahead = (const char *)weight + NEAR, .lines = wants_hints() ? PANEL_LINES : 0,
                       .is_first = 1, .is_near = 1, .dtype = dtype};
    Sums sums;
    MULTIPLY[rows - 1](sums, &tile);
    store_sums(p, sums, row, rows, panel, dtype, kind);
}

/* More chunks hide memory better, but sums are stored between them: with many tiles, up to WHOLE items are one chunk. */
INLINE int64_t count_chunks(int64_t items, int64_t num_tiles)
{
    return num_tiles > MANY_TILES && items <= WHOLE ? 1 : (items + CHUNK - 1) / CHUNK;
}

/* Rows `first` to `first + count`, at most GROUP, times one panel.  Tiles and chunks are as equal as can be.  The tiles of a
   chunk fetch the next chunk, each some lines of each item; in the last group of rows they also fetch the next panel. */
INLINE void run_group(const Linear *p, int64_t first, int64_t count, int64_t panel, const int dtype, const int kind)
{
    vf sums[GROUP][VECTORS];
    const int64_t num_tiles = (count + TILE_ROWS - 1) / TILE_ROWS, num_chunks = count_chunks(p->items, num_tiles);
    for (int64_t chunk = 0; chunk < num_chunks; chunk++) {
        const int64_t begin = chunk * p->items / num_chunks, items = (chunk + 1) * p->items / num_chunks - begin;
        const float *weight = p->weight + (panel * p->items + begin) * PANEL;
        const char *x = p->x + first * p->x_stride + begin * item_step(dtype);
        const char *next = (const char *)(weight + items * PANEL);
        const int is_last = chunk == num_chunks - 1, fetches = !is_last || first + count == p->rows;
        for (int64_t turn = 0; turn < num_tiles; turn++) {
            const int64_t row = turn * count / num_tiles, rows = (turn + 1) * count / num_tiles - row;
            const int64_t fetched = turn * PANEL_LINES / num_tiles, lines = (turn + 1) * PANEL_LINES / num_tiles - fetched;
            const Tile tile = {.x = x + row * p->x_stride, .x_stride = p->x_stride, .panel = weight, .count = items,
                               .ahead = next + fetched * items * CACHE_LINE, .lines = fetches ? lines : 0,
                               .is_first = chunk == 0, .dtype = dtype};
            MULTIPLY[rows - 1](sums + row, &tile);
            if (is_last)
                store_sums(p, sums + row, first + row, rows, panel, dtype, kind);
        }
    }
}

INLINE void run_rows(const Linear *p, int64_t first, int64_t count, int64_t panel, const int dtype, const int kind)
{
    if (count <= TILE_ROWS)
        run_alone(p, first, count, panel, dtype, kind);
    else
        run_group(p, first, count, panel, dtype, kind);
}

/* A task has one panel and one of `num_groups` groups of rows. */
static void run_task(const Linear *p, int64_t task, int64_t num_groups, int64_t dtype, int64_t kind)
{
    const int64_t panel = task / num_groups, group = task % num_groups;
    const int64_t first = group * p->rows / num_groups, count = (group + 1) * p->rows / num_groups - first;
    if (kind == NO_GATE)
        FOR_DTYPE(run_rows(p, first, count, panel, TYPE, NO_GATE))
    else
        FOR_KIND(FOR_DTYPE(run_rows(p, first, count, panel, TYPE, KIND)))
}

/* widened (rows, stride) = rows of x, which are x_stride bytes apart, in float32; a stride is a multiple of VW. */
static void widen_rows(const char *x, int64_t x_stride, float *widened, int64_t rows, int64_t stride, int64_t count,
                       int dtype, int64_t num_threads)
{
#pragma omp parallel for schedule(static) num_threads((int)num_threads) if (rows > TILE_ROWS)
    for (int64_t row = 0; row < rows; row++)
        widen_row(widened + row * stride, x + row * x_stride, count, dtype);
}
