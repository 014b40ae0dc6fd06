/* Pack a weight into panels, and read rows of it back. */

#include "panels.h"
#include "tape.h"

int panel_width(void) { return PANEL; }

/* Whether x of this type is widened. */
int widens(int64_t dtype) { return is_widened((int)dtype); }

/* stored (out_size, items) -> packed (panels, items, PANEL); an item has the bytes of a float32. */
int pack_weight(const void *stored, float *packed, int64_t out_size, int64_t items, int64_t parts, int64_t dtype,
                int64_t num_threads)
{
    const float *weight = stored;
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

/* Copies one output's items of a panel in their unpacked form: each is `lane` of a vector, the first at `from`. */
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

/* made (num_ids, items) = rows of a packed weight, which begins with id first_id, times `scale`; zeros for ids that it
   does not hold. */
TAPED int embed_panels(const int32_t *ids, const float *packed, void *made, int64_t num_ids, int64_t items,
                       int64_t first_id, int64_t num_rows, float scale, int64_t dtype, int64_t num_threads)
{
    float *out = made;
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
        if (scale != 1)
            FOR_DTYPE(multiply_row(out + n * items, items * (int64_t)sizeof(float) / item_bytes(TYPE), scale, TYPE))
    }
    return 0;
}
