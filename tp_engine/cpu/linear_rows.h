/* x @ weight.T + bias with the weight in panels (panels.h); or an activation of that (gated.h), most of gate and up.
   With BOTH_PARTS it is the product without the activation, bit by bit, of a weight whose panels hold gate and up.

   Each task has one panel and some of the rows, and reads its panel in chunks of items.  A chunk stays in the
   second-level cache for all tiles of rows (linear_tile.h), and these fetch what follows in memory: the next chunk, or
   the next panel. A single tile reads the weight from end to end: AMD's processors prefetch that best by themselves,
   Intel's get hints a few items ahead.

   A sum's items are added in their order, so a row's result is the same, bit by bit, in each batch and with any number
   of threads.

   Items may be divided into shards, a power of two of equal parts, each with a sum of its own that begins at 0.  The
   sums are added as a balanced tree, ((0 + 1) + (2 + 3)) + ..., so a weight's result is the same, bit by bit, whether
   one rank has all shards or several ranks have some and add theirs as the upper part of that tree. */

#pragma once

#include "linear_tile.h"
#include "gated.h"

enum { GROUP = 16 * TILE_ROWS, CHUNK = 512, WHOLE = 2 * CHUNK, MANY_TILES = 8 };
enum { MAX_SHARDS = 8, PLACES = 4 }; /* PLACES: sums that wait at once while up to MAX_SHARDS are added as a tree */
enum { NEAR = 4096 }; /* bytes: far enough for memory's answer, and a small part of the first-level cache */

typedef struct {
    const char *x, *bias;
    char *out;
    const float *weight;
    int64_t x_stride; /* in bytes */
    int64_t rows, items, part_size; /* part_size: outputs of a part */
    float alpha, limit; /* of the activation */
    const float *factors; /* of quantised weights: of the sums, in the order of panels, or NULL */
    int64_t num_shards;   /* 0: not divided, and a bias is added to the whole sum; else to the first shard's */
    int64_t shard_bytes;  /* from a shard's outputs to the next shard's, which are not added; or 0 */
    int stores_float32;   /* out is float32, whatever the type */
} Linear;

/* Adds the bias to `sum`, the sums of outputs `i` to `i + VW` of a part. */
INLINE vf add_bias(const Linear *p, vf sum, int64_t part, int64_t i, const int dtype)
{
    const int64_t skipped = part * p->part_size * item_bytes(dtype);
    return p->bias ? sum + load_some(p->bias + skipped, i, p->part_size, dtype) : sum;
}

/* Stores sums as they are. */
INLINE void store_float32(const Linear *p, Sums sums, char *to, int64_t row, int64_t rows, int64_t panel)
{
    for (int64_t r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) {
            const int64_t i = (panel * VECTORS + v) * VW;
            if (i < p->part_size)
                store_some(to + (row + r) * p->part_size * sizeof(float), i, p->part_size, sums[r][v], FLOAT32);
        }
}

/* Stores the results of some rows times a panel. */
INLINE void store_sums(const Linear *p, Sums sums, int64_t row, int64_t rows, int64_t panel, const int dtype,
                       const int kind)
{
    const int vectors = VECTORS / parts_of(kind), stored_parts = kind == BOTH_PARTS ? 2 : 1;
    const int64_t part_bytes = p->part_size * item_bytes(dtype);
    if (p->stores_float32) {
        store_float32(p, sums, p->out, row, rows, panel);
        return;
    }
    for (int64_t r = 0; r < rows; r++) {
        char *out = p->out + (row + r) * stored_parts * part_bytes;
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) {
            const int64_t i = (panel * vectors + v) * VW;
            if (i >= p->part_size)
                break;
            vf result = p->num_shards ? sums[r][v] : add_bias(p, sums[r][v], 0, i, dtype);
            if (kind == RELU2) {
                result = squared_relu(rounded(result, dtype));
            } else if (kind != NO_GATE) {
                const vf up = add_bias(p, sums[r][v + vectors], 1, i, dtype);
                if (kind == BOTH_PARTS)
                    store_some(out + part_bytes, i, p->part_size, up, dtype);
                else
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

INLINE int64_t shards_of(const Linear *p) { return p->num_shards ? p->num_shards : 1; }

/* Where a shard's sums wait: behind those of the halves, quarters, ... of the tree that end before it. */
INLINE int64_t place_of(const Linear *p, int64_t shard) { return p->shard_bytes ? 0 : __builtin_popcountll(shard); }

/* Joins a shard's sums with those that wait for them.  `places` are `stride` rows apart; of each, `rows` rows are
   used. */
INLINE void end_shard(const Linear *p, vf (*places)[VECTORS], int64_t stride, int64_t shard, int64_t row, int64_t rows,
                      int64_t panel, const int dtype)
{
    if (!p->num_shards)
        return;
    if (shard == 0)
        for (int64_t r = 0; r < rows; r++)
            for (int v = 0; v < VECTORS; v++)
                if ((panel * VECTORS + v) * VW < p->part_size)
                    places[r][v] = add_bias(p, places[r][v], 0, (panel * VECTORS + v) * VW, dtype);
    if (p->shard_bytes) {
        store_float32(p, places, p->out + shard * p->shard_bytes, row, rows, panel);
        return;
    }
    for (vf(*own)[VECTORS] = places + place_of(p, shard) * stride; shard & 1; shard >>= 1, own -= stride)
        for (int64_t r = 0; r < rows; r++)
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++)
                own[r - stride][v] += own[r][v];
}

/* A single tile's rows times one panel. */
INLINE void run_alone(const Linear *p, int64_t row, int64_t rows, int64_t panel, const int dtype, const int kind)
{
    const int64_t num_shards = shards_of(p), size = p->items / num_shards;
    vf sums[PLACES * TILE_ROWS][VECTORS];
    for (int64_t shard = 0; shard < num_shards; shard++) {
        const float *weight = p->weight + (panel * p->items + shard * size) * PANEL;
        const Tile tile = {.x = p->x + row * p->x_stride + shard * size * item_step(dtype), .x_stride = p->x_stride,
                           .panel = weight, .count = size, .ahead = (const char *)weight + NEAR,
                           .lines = wants_hints() ? PANEL_LINES : 0, .is_first = 1, .is_near = 1, .dtype = dtype};
        MULTIPLY[rows - 1](sums + place_of(p, shard) * TILE_ROWS, &tile);
        end_shard(p, sums, TILE_ROWS, shard, row, rows, panel, dtype);
    }
    if (!p->shard_bytes)
        store_sums(p, sums, row, rows, panel, dtype, kind);
}

/* More chunks hide memory better, but sums are stored between them: with many tiles, up to WHOLE items are one
   chunk. */
INLINE int64_t chunk_limit(int64_t num_tiles) { return num_tiles > MANY_TILES ? WHOLE : CHUNK; }

/* Rows `first` to `first + count`, at most GROUP, times one panel.  Tiles and chunks are as equal as can be: a chunk is
   a part of a shard, or several shards.  The tiles of a chunk fetch the next chunk, each some lines of each item; in
   the last group of rows they also fetch the next panel. */
INLINE void run_group(const Linear *p, int64_t first, int64_t count, int64_t panel, const int dtype, const int kind)
{
    vf sums[PLACES * GROUP][VECTORS];
    const int64_t num_tiles = (count + TILE_ROWS - 1) / TILE_ROWS, limit = chunk_limit(num_tiles);
    const int64_t num_shards = shards_of(p), size = p->items / num_shards;
    const int64_t parts = size <= limit ? 1 : (size + CHUNK - 1) / CHUNK; /* of a shard */
    int64_t together = 1;                                                 /* shards */
    while (together < num_shards && 2 * together * size <= limit)
        together *= 2;
    const int64_t num_chunks = num_shards / together * parts;
    for (int64_t chunk = 0; chunk < num_chunks; chunk++) {
        const int64_t shard = chunk / parts * together, part = chunk % parts;
        const int64_t begin = shard * size + part * size / parts;
        const int64_t items = (shard + together - 1) * size + (part + 1) * size / parts - begin;
        const float *weight = p->weight + (panel * p->items + begin) * PANEL;
        const char *x = p->x + first * p->x_stride + begin * item_step(dtype);
        const char *next = (const char *)(weight + items * PANEL);
        const int is_last = chunk == num_chunks - 1, fetches = !is_last || first + count == p->rows;
        for (int64_t turn = 0; turn < num_tiles; turn++) {
            const int64_t row = turn * count / num_tiles, rows = (turn + 1) * count / num_tiles - row;
            const int64_t fetched = turn * PANEL_LINES / num_tiles,
                          lines = (turn + 1) * PANEL_LINES / num_tiles - fetched;
            for (int64_t i = 0; i < together; i++) {
                const int64_t skipped = i * size;
                const Tile tile = {.x = x + row * p->x_stride + skipped * item_step(dtype), .x_stride = p->x_stride,
                                   .panel = weight + skipped * PANEL, .count = items / together,
                                   .ahead = next + (fetched * items + lines * skipped) * CACHE_LINE,
                                   .lines = fetches ? lines : 0, .is_first = part == 0, .dtype = dtype};
                MULTIPLY[rows - 1](sums + place_of(p, shard + i) * GROUP + row, &tile);
                if (part == parts - 1)
                    end_shard(p, sums + row, GROUP, shard + i, first + row, rows, panel, dtype);
            }
            if (is_last && !p->shard_bytes)
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
    FOR_RESULT(FOR_DTYPE(run_rows(p, first, count, panel, TYPE, KIND)))
}

/* widened (rows, stride) = rows of x, which are x_stride bytes apart, in float32; a stride is a multiple of VW. */
static void widen_rows(const char *x, int64_t x_stride, float *widened, int64_t rows, int64_t stride, int64_t count,
                       int dtype, int64_t num_threads)
{
#pragma omp parallel for schedule(static) num_threads((int)num_threads) if (rows > TILE_ROWS)
    for (int64_t row = 0; row < rows; row++)
        widen_row(widened + row * stride, x + row * x_stride, count, dtype);
}
