/* x @ weight.T + bias with a quantised weight in panels (quantised.h).

   As in linear_rows.h a task has one panel and some of the rows, and a sum's order is fixed, so that a row's result is
   the same, bit by bit, in each batch and with any number of threads. */

#include "quantised_rows.h"
#include "quantised_tile.h"
#include "tape.h"

/* Functions of their own, so that nothing else uses the registers that the loops need. */
#define DEFINE_WORDS(codes, rows)                                                                             \
    static __attribute__((noinline)) void codes##_##rows(vf (*totals)[VECTORS], const Groups *t, int paired)    \
    {                                                                                                         \
        if (is_paired(BFLOAT16) && paired)                                                                    \
            multiply_words(totals, t, rows, codes, 1);                                                        \
        else                                                                                                  \
            multiply_words(totals, t, rows, codes, 0);                                                        \
    }
#define DEFINE_DECODED(rows)                                                                                  \
    static __attribute__((noinline)) void decoded_##rows(vf (*totals)[VECTORS], const Groups *t, const Decoded *d, \
                                                         int paired)                                          \
    {                                                                                                         \
        if (is_paired(BFLOAT16) && paired)                                                                    \
            multiply_decoded(totals, t, d, rows, 1);                                                          \
        else                                                                                                  \
            multiply_decoded(totals, t, d, rows, 0);                                                          \
    }
#define DEFINE_TILES(rows)      \
    DEFINE_WORDS(NIBBLES, rows) \
    DEFINE_WORDS(INT8, rows)    \
    DEFINE_WORDS(SIGNED, rows)  \
    DEFINE_DECODED(rows)

DEFINE_TILES(1)
DEFINE_TILES(2)
DEFINE_TILES(3)
DEFINE_TILES(4)
DEFINE_TILES(5)
DEFINE_TILES(6)

#define ALL_ROWS(name) {name##_1, name##_2, name##_3, name##_4, name##_5, name##_6}

static void (*const WORDS[3][TILE_ROWS])(vf (*)[VECTORS], const Groups *, int) = {ALL_ROWS(NIBBLES), ALL_ROWS(INT8),
                                                                                  ALL_ROWS(SIGNED)};
static void (*const DECODED[TILE_ROWS])(vf (*)[VECTORS], const Groups *, const Decoded *, int) = ALL_ROWS(decoded);

static __attribute__((noinline)) void decode(Decoded *to, const Groups *t, int paired)
{
    switch (t->weight->codes) {
    case NIBBLES: return paired ? decode_groups(to, t, NIBBLES, 1) : decode_groups(to, t, NIBBLES, 0);
    case INT8: return paired ? decode_groups(to, t, INT8, 1) : decode_groups(to, t, INT8, 0);
    default: return paired ? decode_groups(to, t, SIGNED, 1) : decode_groups(to, t, SIGNED, 0);
    }
}

/* Groups that are decoded at a time. */
static int64_t count_chunk_groups(const Quantised *q)
{
    return larger(1, CHUNK_COLUMNS / (words_of(q, q->group) * word_columns((int)q->codes)));
}

static void fetch(const char *from, int64_t bytes)
{
    for (int64_t i = 0; i < bytes; i += CACHE_LINE)
        __builtin_prefetch(from + i, 0, 2);
}

/* The totals of several tiles: `count` rows, at most GROUP.  The tiles fetch what comes next.  Codes of 4 bits are
   decoded by each of few tiles, beside its products; for many tiles, and codes of 8 bits, they are decoded once. */
static __attribute__((noinline)) void add_tiles(vf (*totals)[VECTORS], Groups t, int64_t count, int dtype)
{
    const Quantised *q = t.weight;
    const int64_t num_groups = t.end, num_tiles = (count + TILE_ROWS - 1) / TILE_ROWS, step = count_chunk_groups(q);
    const int64_t items = words_of(q, q->group) * word_items(q, dtype) * 4;
    const int is_decoded = VW == 4 || q->codes != NIBBLES || num_tiles >= MANY_TILES;
    const char *x = t.x, *panel = t.panel;
    Decoded decoded;
    for (t.first = 0; t.first < num_groups; t.first = t.end) {
        t.end = smaller(t.first + step, num_groups);
        t.panel = panel + t.first * group_bytes(q), t.x_offset = t.first * items;
        if (is_decoded)
            decode(&decoded, &t, is_paired(dtype));
        const char *next = panel + smaller(t.end * group_bytes(q), panel_bytes(q));
        const int64_t fetched = step * group_bytes(q) / num_tiles;
        for (int64_t turn = 0; turn < num_tiles; turn++) {
            const int64_t row = turn * count / num_tiles, rows = (turn + 1) * count / num_tiles - row;
            fetch(next + turn * fetched, fetched);
            t.x = x + row * t.x_stride;
            if (is_decoded)
                DECODED[rows - 1](totals + row, &t, &decoded, is_paired(dtype));
            else
                WORDS[q->codes][rows - 1](totals + row, &t, is_paired(dtype));
        }
    }
}

/* Totals of rows `first` to `first + count`, at most GROUP, times one panel. */
static __attribute__((noinline)) void multiply_rows(vf (*totals)[VECTORS], const Linear *p, const Quantised *q,
                                                    int64_t first, int64_t count, int64_t panel, int dtype)
{
    const int64_t num_groups = count_groups(q);
    const Groups groups = {.weight = q, .panel = (const char *)p->weight + panel * panel_bytes(q),
                           .x = p->x + first * p->x_stride, .x_stride = p->x_stride, .x_sums = items_bytes(q, dtype),
                           .end = num_groups, .num_groups = num_groups, .words = words_of(q, q->group),
                           .last_words = words_of(q, group_columns(q, num_groups - 1)), .head_bytes = head_bytes(q),
                           .wants_hints = count <= TILE_ROWS && wants_hints()};
    memset(totals, 0, count * sizeof(totals[0]));
    if (count <= TILE_ROWS)
        WORDS[q->codes][count - 1](totals, &groups, is_paired(dtype));
    else
        add_tiles(totals, groups, count, dtype);
    for (int v = 0; p->factors && v < VECTORS; v++) {
        const vf factors = load_vector(p->factors + panel * PANEL + v * VW);
        for (int64_t r = 0; r < count; r++)
            totals[r][v] *= factors;
    }
}

void run_quantised_task(const Linear *p, const Quantised *q, int64_t task, int64_t num_groups, int64_t dtype,
                        int64_t kind)
{
    const int64_t panel = task / num_groups, group = task % num_groups;
    const int64_t first = group * p->rows / num_groups, count = (group + 1) * p->rows / num_groups - first;
    vf totals[GROUP][VECTORS];
    multiply_rows(totals, p, q, first, count, panel, (int)dtype);
    FOR_RESULT(FOR_DTYPE(store_sums(p, totals, first, count, panel, TYPE, KIND)))
}

void prepare_row(const Quantised *q, char *to, const char *from, int64_t dtype)
{
    const int64_t num_groups = count_groups(q), bytes = item_bytes((int)dtype);
    const int type = is_paired((int)dtype) ? BFLOAT16 : FLOAT32;
    float *sums = (float *)(to + items_bytes(q, (int)dtype));
    const int is_dense = q->group % word_columns((int)q->codes) == 0;
    if (is_dense)
        convert_row(to, type, from, (int)dtype, q->columns);
    for (int64_t group = 0; group < num_groups; group++) {
        const int64_t count = group_columns(q, group), room = words_of(q, count) * word_columns((int)q->codes);
        const char *own = from + group * q->group * bytes;
        if (!is_dense)
            convert_row(to, type, own, (int)dtype, count);
        memset(to + count * item_bytes(type), 0, (room - count) * item_bytes(type));
        to += room * item_bytes(type);
        if (q->has_zeros) {
            vf sum = splat(0);
            for (int64_t i = 0; i < count; i += VW)
                sum += load_some(own, i, count, (int)dtype);
            sums[group] = sum_of(sum)[0] * (q->codes == NIBBLES ? -0.0625f : -1);
        }
    }
}

/* out = x @ weight.T + bias, as packed_linear: the weight's panels and factors (panels, PANEL) or NULL are as packed,
   and `prepared` has room for `rows` rows. */
TAPED int quantised_linear(const Quantised *q, const char *x, int64_t x_stride, const void *panels,
                           const float *factors, const char *bias, char *out, char *prepared, int64_t rows,
                           int64_t out_size, int64_t kind, float alpha, float limit, int64_t dtype, int64_t num_threads)
{
    const int64_t parts = parts_of((int)kind), stride = prepared_bytes(q, (int)dtype);
    const Linear p = {.x = prepared, .bias = bias, .out = out, .weight = panels, .x_stride = stride, .rows = rows,
                      .part_size = out_size / parts, .alpha = alpha, .limit = limit, .factors = factors};
    const int64_t num_groups = (rows + GROUP - 1) / GROUP, num_tasks = count_panels(p.part_size, parts) * num_groups;
    const int is_parallel = num_threads > 1 && rows * out_size * q->columns >= MIN_PARALLEL_PRODUCTS;
#pragma omp parallel for schedule(static) num_threads((int)num_threads) if (is_parallel && rows > TILE_ROWS)
    for (int64_t row = 0; row < rows; row++)
        prepare_row(q, prepared + row * stride, x + row * x_stride * item_bytes((int)dtype), dtype);
    if (rows <= TILE_ROWS) {
#pragma omp parallel for schedule(static) num_threads((int)num_threads) if (is_parallel)
        for (int64_t task = 0; task < num_tasks; task++)
            run_quantised_task(&p, q, task, num_groups, dtype, kind);
    } else {
#pragma omp parallel for schedule(guided) num_threads((int)num_threads) if (is_parallel)
        for (int64_t task = 0; task < num_tasks; task++)
            run_quantised_task(&p, q, task, num_groups, dtype, kind);
    }
    return 0;
}
