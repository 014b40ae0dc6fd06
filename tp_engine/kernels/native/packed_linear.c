/* x @ weight.T + bias with the weight in an order of its own, in which no sum crosses a vector; or SwiGLU's product of that.

       item      a float32, or two numbers of 16 bits.  Pairs of bfloat16 are multiplied as they are where the processor does
                 that.  Elsewhere x is `widened` to float32 once, and the weight in registers: bfloat16 by a shift and by a
                 mask; of float16 the first halves of a vector's items lie side by side, then the second ones
       panel     (items, PANEL): item 0 of PANEL outputs side by side, then item 1 of them ...
       weight    panels, one after another; outputs beyond the last are zeros
       parts     1, or 2: each panel has PANEL / 2 outputs of the weight's first half (gate) and as many of its second (up),
                 so that a tile's sums hold all that SwiGLU's product wants

   A tile is a panel times up to TILE_ROWS rows of x: 24 sums in registers with AVX-512, 12 otherwise.  Each task has one
   panel and some of the rows, and goes through a chunk of its items at a time, which stays in the second-level cache for
   all its tiles, while these fetch what follows in memory: the next chunk, or the next panel.  A single tile reads the
   weight from end to end, which AMD's processors foresee better without being asked; Intel's are told a few items ahead.

   A sum's items are added in their order: a row's result is the same bit by bit in each batch, and with any number of
   threads. */

#include "swiglu.h"
#include "tape.h"

#if VW == 16
enum { VECTORS = 4 };
#else
enum { VECTORS = 2 };
#endif
enum { TILE_ROWS = 6, PANEL = VECTORS * VW, PANEL_LINES = PANEL * 4 / CACHE_LINE, GROUP = 16 * TILE_ROWS };
enum { CHUNK = 512, WHOLE = 2 * CHUNK, MANY_TILES = 8 };
enum { NEAR = 4096 }; /* bytes: far enough for memory's answer, and a small part of the first-level cache */

/* Products below which a second thread would cost more than it saves. */
enum { MIN_PARALLEL_PRODUCTS = 1 << 15 };

typedef float item_memory __attribute__((aligned(2), may_alias));

typedef struct {
    const char *x, *bias;
    char *out;
    const float *weight;
    int64_t x_stride; /* in bytes */
    int64_t rows, items, part_size; /* part_size: outputs of a part */
} Linear;

typedef vf Sums[TILE_ROWS][VECTORS];

/* Whether an item is two numbers that come as float32. */
INLINE int is_widened(const int dtype) { return dtype == FLOAT16 || (dtype == BFLOAT16 && !MULTIPLIES_BFLOAT16); }

int panel_width(void) { return PANEL; }

/* Whether x of this type is widened. */
int widens(int64_t dtype) { return is_widened((int)dtype); }

/* Whether the processor multiplies bfloat16 by instructions that oneDNN uses and this file does not. */
int has_bfloat16_matrices(void)
{
#if defined(__AMX_BF16__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
    return 1;
#else
    return 0;
#endif
}

static int64_t count_panels(int64_t part_size, int64_t parts) { return (part_size * parts + PANEL - 1) / PANEL; }

/* A vector of items, as panels have them. */
INLINE void store_packed(float *to, vf items, int64_t dtype)
{
    if (dtype == FLOAT16) {
        *(vh_memory *)to = __builtin_convertvector((vu)items & 0xffff, vh);
        *((vh_memory *)to + 1) = __builtin_convertvector((vu)items >> 16, vh);
    } else {
        store_vector(to, items);
    }
}

/* weight (out_size, items) -> packed (panels, items, PANEL). */
int pack_weight(const float *weight, float *packed, int64_t out_size, int64_t items, int64_t parts, int64_t dtype,
                int64_t num_threads)
{
    const int64_t part_size = out_size / parts, width = PANEL / parts, num_panels = count_panels(part_size, parts);
#pragma omp parallel for schedule(static) num_threads((int)num_threads)
    for (int64_t panel = 0; panel < num_panels; panel++)
        for (int64_t o = 0; o < PANEL; o += VW)
            for (int64_t i = 0; i < items; i += VW) {
                float *to = packed + (panel * items + i) * PANEL + o;
                const int64_t output = panel * width + o % width; /* of its part */
                const float *from = weight + (o / width * part_size + output) * items;
                vf rows[VW];
                for (int j = 0; j < VW; j++)
                    rows[j] = output + j < part_size ? load_some(from + j * items, i, items, FLOAT32) : splat(0);
                transpose(rows);
                for (int j = 0; j < smaller(VW, items - i); j++)
                    store_packed(to + j * PANEL, rows[j], dtype);
            }
    return 0;
}

/* A tile's part of some items: rows of x, a panel, and memory that is fetched meanwhile, `lines` lines per item: into the
   first-level cache if it `is_near`, else into the second. */
typedef struct {
    const char *x;
    int64_t x_stride; /* in bytes */
    const float *panel;
    int64_t count;
    const char *ahead;
    int64_t lines;
    int is_first, is_near, dtype; /* is_first: the sums begin at 0 */
} Tile;

/* Bytes from one item of x to the next. */
INLINE int64_t item_step(const int dtype) { return is_widened(dtype) ? 8 : 4; }

/* A vector of items; of two numbers that are widened, `half` 0 or 1. */
INLINE vf load_weights(const float *items, const int half, const int dtype)
{
    if (dtype == FLOAT16)
        return load_float16((const uint16_t *)items + half * VW);
    if (!is_widened(dtype))
        return load_vector(items);
    const vu pairs = (vu)load_vector(items);
    return half ? (vf)(pairs & 0xffff0000) : (vf)(pairs << 16);
}

/* Adds the products of an item of `rows` rows. */
INLINE void add_products(Sums sums, const char *x, int64_t x_stride, const float *panel, const int rows, const int dtype)
{
#pragma GCC unroll 2
    for (int half = 0; half <= is_widened(dtype); half++, x += sizeof(float)) {
        if (half)
            __asm__ volatile("" ::: "memory"); /* loads the pairs again: there are no registers to keep them in */
        vf weight[VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++)
            weight[v] = load_weights(panel + v * VW, half, dtype);
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++) {
            const vf item = splat(*(const item_memory *)(x + r * x_stride));
            const int by_pairs = dtype == BFLOAT16 && !is_widened(dtype);
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++)
                sums[r][v] = by_pairs ? add_pair_products(sums[r][v], item, weight[v]) : sums[r][v] + item * weight[v];
        }
    }
}

INLINE void multiply_tile(Sums waiting, const Tile *t, const int rows, const int lines, const int is_near, const int dtype)
{
    const char *x = t->x, *ahead = t->ahead;
    const float *panel = t->panel;
    const int64_t x_stride = t->x_stride;
    Sums sums; /* in registers: gone through item by item, as a copy of all would go through memory */
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++)
            sums[r][v] = t->is_first ? splat(0) : waiting[r][v];
    /* By twos: where another thread shares the core, what limits is the number of instructions. */
#pragma GCC unroll 2
    for (int64_t count = t->count; count > 0; count--, x += item_step(dtype), panel += PANEL) {
#pragma GCC unroll 4
        for (int line = 0; line < lines; line++, ahead += CACHE_LINE)
            if (is_near)
                __builtin_prefetch(ahead, 0, 3);
            else
                __builtin_prefetch(ahead, 0, 2);
        add_products(sums, x, x_stride, panel, rows, dtype);
    }
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++)
            waiting[r][v] = sums[r][v];
}

INLINE void multiply_items(Sums sums, const Tile *t, const int rows, const int dtype)
{
    if (!t->lines)
        multiply_tile(sums, t, rows, 0, 0, dtype);
    else if (t->is_near)
        multiply_tile(sums, t, rows, PANEL_LINES, 1, dtype);
    else if (t->lines == 1)
        multiply_tile(sums, t, rows, 1, 0, dtype);
    else
        multiply_tile(sums, t, rows, 2, 0, dtype);
}

/* Functions of their own, so that nothing else wants the registers that the loop needs. */
#define DEFINE_TILE(rows)                                                            \
    static __attribute__((noinline)) void multiply_##rows(Sums sums, const Tile *t)  \
    {                                                                                \
        if (t->dtype == FLOAT32)                                                     \
            multiply_items(sums, t, rows, FLOAT32);                                  \
        else if (t->dtype == BFLOAT16)                                               \
            multiply_items(sums, t, rows, BFLOAT16);                                 \
        else                                                                         \
            multiply_items(sums, t, rows, FLOAT16);                                  \
    }

DEFINE_TILE(1)
DEFINE_TILE(2)
DEFINE_TILE(3)
DEFINE_TILE(4)
DEFINE_TILE(5)
DEFINE_TILE(6)

static void (*const MULTIPLY[TILE_ROWS])(Sums, const Tile *) = {multiply_1, multiply_2, multiply_3,
                                                                multiply_4, multiply_5, multiply_6};

/* Outputs `i` to `i + VW` of a part, of which `sum` are the sums. */
INLINE vf add_bias(const Linear *p, vf sum, int64_t part, int64_t i, const int dtype)
{
    const int64_t skipped = part * p->part_size * item_bytes(dtype);
    return p->bias ? sum + load_some(p->bias + skipped, i, p->part_size, dtype) : sum;
}

/* Stores what some rows times a panel come to. */
INLINE void store_sums(const Linear *p, Sums sums, int64_t row, int64_t rows, int64_t panel, const int dtype, const int parts)
{
    const int vectors = VECTORS / parts;
    for (int64_t r = 0; r < rows; r++) {
        char *out = p->out + (row + r) * p->part_size * item_bytes(dtype);
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) {
            const int64_t i = (panel * vectors + v) * VW;
            if (i >= p->part_size)
                break;
            vf result = add_bias(p, sums[r][v], 0, i, dtype);
            if (parts == 2) {
                const vf up = add_bias(p, sums[r][v + vectors], 1, i, dtype);
                result = swiglu(rounded(result, dtype), rounded(up, dtype), dtype);
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
INLINE void run_alone(const Linear *p, int64_t row, int64_t rows, int64_t panel, const int dtype, const int parts)
{
    const float *weight = p->weight + panel * p->items * PANEL;
    const Tile tile = {.x = p->x + row * p->x_stride, .x_stride = p->x_stride, .panel = weight, .count = p->items,
                       .ahead = (const char *)weight + NEAR, .lines = wants_hints() ? PANEL_LINES : 0,
                       .is_first = 1, .is_near = 1, .dtype = dtype};
    Sums sums;
    MULTIPLY[rows - 1](sums, &tile);
    store_sums(p, sums, row, rows, panel, dtype, parts);
}

/* More chunks hide memory better, but between them sums are stored: many tiles take up to WHOLE items in one. */
INLINE int64_t count_chunks(int64_t items, int64_t num_tiles)
{
    return num_tiles > MANY_TILES && items <= WHOLE ? 1 : (items + CHUNK - 1) / CHUNK;
}

/* Rows `first` to `first + count`, at most GROUP, times one panel.  Tiles and chunks are as equal as can be.  The last tiles
   of a chunk fetch the next one, `lines` lines of each item each; the last group of rows also the panel that follows. */
INLINE void run_group(const Linear *p, int64_t first, int64_t count, int64_t panel, const int dtype, const int parts)
{
    vf sums[GROUP][VECTORS];
    const int64_t num_tiles = (count + TILE_ROWS - 1) / TILE_ROWS, num_chunks = count_chunks(p->items, num_tiles);
    const int64_t lines = (PANEL_LINES + num_tiles - 1) / num_tiles; /* none, where a panel is narrower than a line */
    const int64_t num_fetching = lines ? (PANEL_LINES + lines - 1) / lines : 0;
    for (int64_t chunk = 0; chunk < num_chunks; chunk++) {
        const int64_t begin = chunk * p->items / num_chunks, items = (chunk + 1) * p->items / num_chunks - begin;
        const float *weight = p->weight + (panel * p->items + begin) * PANEL;
        const char *x = p->x + first * p->x_stride + begin * item_step(dtype);
        const char *next = (const char *)(weight + items * PANEL);
        const int is_last = chunk == num_chunks - 1, fetches = !is_last || first + count == p->rows;
        for (int64_t turn = 0; turn < num_tiles; turn++) {
            const int64_t row = turn * count / num_tiles, rows = (turn + 1) * count / num_tiles - row;
            const int64_t share = turn - (num_tiles - num_fetching);
            const Tile tile = {.x = x + row * p->x_stride, .x_stride = p->x_stride, .panel = weight, .count = items,
                               .ahead = next + share * lines * items * CACHE_LINE,
                               .lines = fetches && share >= 0 ? lines : 0,
                               .is_first = chunk == 0, .dtype = dtype};
            MULTIPLY[rows - 1](sums + row, &tile);
            if (is_last)
                store_sums(p, sums + row, first + row, rows, panel, dtype, parts);
        }
    }
}

INLINE void run_rows(const Linear *p, int64_t first, int64_t count, int64_t panel, const int dtype, const int parts)
{
    if (count <= TILE_ROWS)
        run_alone(p, first, count, panel, dtype, parts);
    else
        run_group(p, first, count, panel, dtype, parts);
}

/* A task has one panel and one of `num_groups` groups of rows. */
static void run_task(const Linear *p, int64_t task, int64_t num_groups, int64_t dtype, int64_t parts)
{
    const int64_t panel = task / num_groups, group = task % num_groups;
    const int64_t first = group * p->rows / num_groups, count = (group + 1) * p->rows / num_groups - first;
    if (parts == 2)
        FOR_DTYPE(run_rows(p, first, count, panel, TYPE, 2))
    else
        FOR_DTYPE(run_rows(p, first, count, panel, TYPE, 1))
}

/* widened (rows, stride) = rows of x, which are x_stride bytes apart, in float32; a stride is a multiple of VW. */
static void widen_rows(const char *x, int64_t x_stride, float *widened, int64_t rows, int64_t stride, int64_t count,
                       int dtype, int64_t num_threads)
{
#pragma omp parallel for schedule(static) num_threads((int)num_threads) if (rows > TILE_ROWS)
    for (int64_t row = 0; row < rows; row++)
        widen_row(widened + row * stride, x + row * x_stride, count, dtype);
}

/* out = x @ weight.T + bias: x (rows, items), its rows x_stride elements of `dtype` apart; weight as packed; bias
   (out_size) or NULL and out (rows, out_size) contiguous.  Sums are float32 and rounded once.  Of two parts, as SwiGLU's
   kernel would make it of that, out (rows, out_size / 2).  widened has room for rows of 2 * items float32, up to a
   multiple of VW, if `widens` the type; otherwise it may be NULL.

   With a single tile of rows each thread has the same panels in every step, which its core's caches may still hold.
   With more it is arithmetic that takes the time, and cores differ in speed from moment to moment: who is done first
   takes what is left. */
int packed_linear(const void *x, int64_t x_stride, const float *weight, const void *bias, void *out, float *widened,
                  int64_t rows, int64_t out_size, int64_t items, int64_t parts, int64_t dtype, int64_t num_threads)
{
    Linear p = {x, bias, out, weight, x_stride * item_bytes((int)dtype), rows, items, out_size / parts};
    if (is_widened((int)dtype)) {
        const int64_t stride = (2 * items + VW - 1) / VW * VW;
        widen_rows(x, p.x_stride, widened, rows, stride, 2 * items, (int)dtype, num_threads);
        p.x = (const char *)widened, p.x_stride = stride * sizeof(float);
    }
    const int64_t num_groups = (rows + GROUP - 1) / GROUP, num_tasks = count_panels(p.part_size, parts) * num_groups;
    const int is_parallel = num_threads > 1 && rows * out_size * items >= MIN_PARALLEL_PRODUCTS;
    if (rows <= TILE_ROWS) {
#pragma omp parallel for schedule(static) num_threads((int)num_threads) if (is_parallel)
        for (int64_t task = 0; task < num_tasks; task++)
            run_task(&p, task, num_groups, dtype, parts);
    } else {
#pragma omp parallel for schedule(guided) num_threads((int)num_threads) if (is_parallel)
        for (int64_t task = 0; task < num_tasks; task++)
            run_task(&p, task, num_groups, dtype, parts);
    }
    return 0;
}

int play_packed_linear(const Word *a)
{
    return packed_linear(a[0].pointer, a[1].integer, a[2].pointer, a[3].pointer, a[4].pointer, a[5].pointer, a[6].integer,
                         a[7].integer, a[8].integer, a[9].integer, a[10].integer, a[11].integer);
}

/* One output's items of a panel, each of which is `lane` of the vector at `from`, as they were before they were packed. */
static void unpack_items(const float *from, int64_t lane, float *out, int64_t items, int64_t dtype)
{
    for (int64_t i = 0; i < items; i++, from += PANEL)
        if (dtype == FLOAT16) {
            memcpy(out + i, (const uint16_t *)from + lane, 2);
            memcpy((uint16_t *)(out + i) + 1, (const uint16_t *)from + VW + lane, 2);
        } else {
            memcpy(out + i, from + lane, sizeof(float));
        }
}

/* out (num_ids, items) = rows of a packed weight, whose first is that of first_id; zeros for ids that it does not hold. */
int embed_panels(const int32_t *ids, const float *packed, float *out, int64_t num_ids, int64_t items, int64_t first_id,
                 int64_t num_rows, int64_t dtype, int64_t num_threads)
{
    const int is_parallel = num_threads > 1 && num_ids * items >= MIN_PARALLEL_PRODUCTS;
#pragma omp parallel for schedule(static) num_threads((int)num_threads) if (is_parallel)
    for (int64_t n = 0; n < num_ids; n++) {
        const int64_t row = ids[n] - first_id;
        if (row < 0 || row >= num_rows) {
            memset(out + n * items, 0, items * sizeof(float));
            continue;
        }
        const float *from = packed + row / PANEL * PANEL * items + row % PANEL / VW * VW;
        unpack_items(from, row % VW, out + n * items, items, dtype);
    }
    return 0;
}

int play_embed_panels(const Word *a)
{
    return embed_panels(a[0].pointer, a[1].pointer, a[2].pointer, a[3].integer, a[4].integer, a[5].integer, a[6].integer,
                        a[7].integer, a[8].integer);
}
