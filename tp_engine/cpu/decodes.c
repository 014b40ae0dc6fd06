/* The begin and the end of a decode step: inputs from the rows' tables, embedding, the best token. */

#include "simd.h"
#include "tape.h"

/* Inputs of one token per request, as kernels/steps/decode_inputs.py draws them.  Only the used part of a block table
   is copied.  A row of a table has `num_columns`; groups are `source_stride` apart in the rows' tables, `slot_stride`
   and `table_stride` apart in the inputs. */
TAPED int prepare_decodes(const int32_t *rows, int64_t num_requests, const int32_t *token_ids, int64_t token_stride,
                          const int32_t *num_computed, const int32_t *tables, int64_t num_groups, int64_t source_stride,
                          int64_t num_columns, int64_t block_size, int32_t *input_ids, int64_t *positions,
                          int64_t *slots, int64_t slot_stride, int32_t *seq_lens, int32_t *block_table,
                          int64_t table_stride, const int32_t *rope_deltas, int64_t *rope_positions)
{
    for (int64_t i = 0; i < num_requests; i++) {
        const int64_t row = rows[i];
        if (row < 0) {
            input_ids[i] = seq_lens[i] = 0;
            positions[i] = 0;
            if (rope_deltas)
                rope_positions[i] = 0;
            for (int64_t group = 0; group < num_groups; group++)
                slots[group * slot_stride + i] = -1;
            continue;
        }
        const int64_t computed = num_computed[row], last = computed / block_size;
        input_ids[i] = token_ids[row * token_stride + computed];
        positions[i] = computed;
        if (rope_deltas)
            rope_positions[i] = computed + rope_deltas[row];
        seq_lens[i] = (int32_t)computed + 1;
        for (int64_t group = 0; group < num_groups; group++) {
            const int32_t *const table = tables + group * source_stride + row * num_columns;
            slots[group * slot_stride + i] = table[last] * block_size + computed % block_size;
            memcpy(block_table + group * table_stride + i * num_columns, table, (last + 1) * sizeof(int32_t));
        }
    }
    return 0;
}

/* Ends that step: its tokens are computed, and `sampled` follow them.  A second call changes nothing. */
TAPED int advance_decodes(const int32_t *rows, const int32_t *seq_lens, const int32_t *sampled, int64_t num_requests,
                          int32_t *token_ids, int64_t token_stride, int32_t *num_computed)
{
    for (int64_t i = 0; i < num_requests; i++) {
        if (rows[i] < 0)
            continue;
        const int64_t column = smaller(seq_lens[i], token_stride - 1);
        token_ids[rows[i] * token_stride + column] = sampled[i];
        num_computed[rows[i]] = seq_lens[i];
    }
    return 0;
}

/* The next inputs of a draft head, as kernels/steps/draft_inputs.py draws them; rows of `tables` are `num_columns`
   apart. */
TAPED int advance_drafts(int64_t *positions, const int64_t *limits, const int32_t *tables, int64_t num_columns,
                         int64_t num_requests, int64_t block_size, int64_t *slots, int32_t *seq_lens,
                         const int32_t *rope_deltas, int64_t *rope_positions)
{
    for (int64_t i = 0; i < num_requests; i++) {
        const int64_t following = positions[i] + 1, limit = limits[i];
        const int64_t last = smaller(following, limit - 1), at = last < 0 ? 0 : last;
        positions[i] = at;
        slots[i] = following < limit ? tables[i * num_columns + at / block_size] * block_size + at % block_size : -1;
        seq_lens[i] = limit ? (int32_t)at + 1 : 0;
        if (rope_deltas)
            rope_positions[i] = limit ? at + rope_deltas[i] : 0;
    }
    return 0;
}

/* out (n, row_bytes) = rows of `weight` (num_ids, row_bytes), which begins with id `first`, times `scale`; zeros for
   other ids.  Only a scale that is not 1 needs the rows' `dtype`. */
TAPED int embed(const int32_t *ids, const char *weight, char *out, int64_t n, int64_t row_bytes, int64_t first,
                int64_t num_ids, float scale, int64_t dtype)
{
    for (int64_t i = 0; i < n; i++) {
        const int64_t row = ids[i] - first;
        char *const to = out + i * row_bytes;
        if (row < 0 || row >= num_ids) {
            memset(to, 0, row_bytes);
            continue;
        }
        memcpy(to, weight + row * row_bytes, row_bytes);
        if (scale != 1)
            FOR_DTYPE(multiply_row(to, row_bytes / item_bytes(TYPE), scale, TYPE))
    }
    return 0;
}

INLINE vf load_scores(const char *row, int64_t i, int64_t width, const int dtype)
{
    if (i + VW <= width)
        return load_items(row, i, dtype);
    vf scores = load_tail(row, i, width - i, dtype);
    for (int64_t lane = width - i; lane < VW; lane++)
        scores[lane] = -INFINITY;
    return scores;
}

/* The first maximum of a row; a NaN is above all numbers. */
INLINE int32_t best_of_row(const char *row, int64_t width, const int dtype)
{
    vf best = splat(-INFINITY);
    vi nan = {0};
    for (int64_t i = 0; i < width; i += VW) {
        const vf scores = load_scores(row, i, width, dtype);
        best = max_vector(scores, best);
        nan |= scores != scores;
    }
    const vf wanted = max_of(best);
    int has_nan = 0;
    for (int lane = 0; lane < VW; lane++)
        has_nan |= nan[lane];
    for (int64_t i = 0; i < width; i += VW) {
        const vf scores = load_scores(row, i, width, dtype);
        const vi hits = has_nan ? scores != scores : scores == wanted;
        int any = 0;
        for (int lane = 0; lane < VW; lane++)
            any |= hits[lane];
        for (int lane = 0; any && lane < VW; lane++)
            if (hits[lane])
                return (int32_t)(i + lane);
    }
    return 0;
}

/* out (n,) = the first maximum of each row of `scores` (n, width), whose rows are `stride` elements apart. */
TAPED int best_tokens(const char *scores, int64_t stride, int32_t *out, int64_t n, int64_t width, int64_t dtype)
{
    for (int64_t i = 0; i < n; i++) {
        const char *row = scores + i * stride * item_bytes((int)dtype);
        FOR_DTYPE(out[i] = best_of_row(row, width, TYPE))
    }
    return 0;
}
