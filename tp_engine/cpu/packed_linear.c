/* A product of rows with a weight in panels (linear_rows.h). */

#include "linear_rows.h"
#include "tape.h"

/* out = x @ weight.T + bias: x (rows, items), its rows x_stride elements of `dtype` apart; weight as packed; bias
   (out_size) or NULL and out (rows, out_size) contiguous.  Sums are float32 and rounded once.  With an activation,
   out (rows, out_size / parts) is that of its one or two parts; BOTH_PARTS leaves it out.  If `widens` is true of the
   type, widened has room for rows of 2 * items float32, rounded up to a multiple of VW; otherwise it may be NULL.  With
   num_shards, the items' sums are added as a tree (linear_rows.h), without activation; out is float32 then if
   `keeps_sums`.

   With a single tile of rows each thread has the same panels in every step, which its core's caches may still hold.
   With more, arithmetic takes the time, and cores differ in speed from moment to moment, so the thread that is done
   first takes the next tasks. */
TAPED int packed_linear(const void *x, int64_t x_stride, const float *weight, const void *bias, void *out,
                        float *widened, int64_t rows, int64_t out_size, int64_t items, int64_t kind, float alpha,
                        float limit, int64_t dtype, int64_t num_shards, int64_t keeps_sums, int64_t num_threads)
{
    const int64_t parts = parts_of((int)kind);
    Linear p = {x, bias, out, weight, x_stride * item_bytes((int)dtype), rows, items, out_size / parts, alpha, limit,
                .num_shards = num_shards, .stores_float32 = (int)keeps_sums};
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
            run_task(&p, task, num_groups, dtype, kind);
    } else {
#pragma omp parallel for schedule(guided) num_threads((int)num_threads) if (is_parallel)
        for (int64_t task = 0; task < num_tasks; task++)
            run_task(&p, task, num_groups, dtype, kind);
    }
    return 0;
}
