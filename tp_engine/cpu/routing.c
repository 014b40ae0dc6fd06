/* Which experts a token goes to, and with which weights: kernels/experts/routing.py has the formulas. */

#include "simd.h"
#include "tape.h"

enum { SOFTMAX = 0, SOFTMAX_OF_CHOSEN = 1, SIGMOID = 2 }; /* Mirrored in model_config/mlp.py. */
enum { MAX_EXPERTS = 1024, MAX_GROUPS = 64 };

/* Mirrored in layout.py. */
typedef struct {
    int64_t num_experts, top_k, scores, renormalises, num_groups, top_groups, group_best, dtype;
    float sum_eps, factor;
} Routing;

/* Replaces scores (count) by their softmax. */
static void make_softmax(float *scores, int64_t count)
{
    float largest = scores[0], sum = 0;
    for (int64_t i = 1; i < count; i++)
        largest = scores[i] > largest ? scores[i] : largest;
    for (int64_t i = 0; i < count; i++)
        sum += scores[i] = expf(scores[i] - largest);
    for (int64_t i = 0; i < count; i++)
        scores[i] /= sum;
}

/* The place of the largest of values (count) that is not yet `taken`; of equal ones the first. */
static int64_t next_largest(const float *values, const uint8_t *taken, int64_t count)
{
    int64_t best = -1;
    for (int64_t i = 0; i < count; i++)
        if (!taken[i] && (best < 0 || values[i] > values[best]))
            best = i;
    return best;
}

/* The worth of a group of `count` experts: the sum of its `best` (1 or 2) largest values. */
static float worth_of(const float *values, int64_t count, int64_t best)
{
    float first = -INFINITY, second = -INFINITY;
    for (int64_t i = 0; i < count; i++)
        if (values[i] > first)
            second = first, first = values[i];
        else if (values[i] > second)
            second = values[i];
    return count > 1 && best > 1 ? first + second : first;
}

/* Replaces the values outside of the best groups by -inf. */
static void keep_groups(const Routing *r, float *values)
{
    const int64_t size = r->num_experts / r->num_groups;
    float worth[MAX_GROUPS];
    uint8_t kept[MAX_GROUPS] = {0};
    for (int64_t group = 0; group < r->num_groups; group++)
        worth[group] = worth_of(values + group * size, size, r->group_best);
    for (int64_t i = 0; i < r->top_groups; i++)
        kept[next_largest(worth, kept, r->num_groups)] = 1;
    for (int64_t i = 0; i < r->num_experts; i++)
        values[i] = kept[i / size] ? values[i] : -INFINITY;
}

static void route_row(const Routing *r, const char *logits, const float *correction, const float *expert_scale,
                      int32_t *ids, float *weights)
{
    float scores[MAX_EXPERTS + 2 * VW], choice[MAX_EXPERTS];
    uint8_t taken[MAX_EXPERTS] = {0};
    widen_row(scores, logits, r->num_experts, (int)r->dtype);
    if (r->scores == SOFTMAX)
        make_softmax(scores, r->num_experts);
    for (int64_t i = 0; i < r->num_experts; i++) {
        if (r->scores == SIGMOID)
            scores[i] = 1.0f / (1.0f + expf(-scores[i]));
        choice[i] = correction ? scores[i] + correction[i] : scores[i];
    }
    if (r->num_groups > 1)
        keep_groups(r, choice);
    float sum = 0;
    for (int64_t j = 0; j < r->top_k; j++) {
        const int64_t best = next_largest(choice, taken, r->num_experts);
        taken[best] = 1, ids[j] = (int32_t)best, weights[j] = scores[best];
    }
    if (r->scores == SOFTMAX_OF_CHOSEN)
        make_softmax(weights, r->top_k);
    for (int64_t j = 0; j < r->top_k; j++)
        sum += weights[j];
    const float divisor = r->renormalises ? sum + r->sum_eps : 1.0f;
    for (int64_t j = 0; j < r->top_k; j++)
        weights[j] = weights[j] / divisor * r->factor * (expert_scale ? expert_scale[ids[j]] : 1.0f);
}

/* logits (rows, num_experts), their rows `stride` elements apart; correction and expert_scale (num_experts) or NULL ->
   ids and weights (rows, top_k).  counts (num_experts) or NULL: adds one for each expert of a row whose slot is 0 or
   more. */
TAPED int route_tokens(const Routing *r, const char *logits, int64_t stride, const float *correction,
                       const float *expert_scale, int32_t *ids, float *weights, int64_t *counts, const int64_t *slots,
                       int64_t rows, int64_t num_threads)
{
#pragma omp parallel for schedule(static) num_threads((int)num_threads) if (rows * r->num_experts >= 1 << 13)
    for (int64_t row = 0; row < rows; row++)
        route_row(r, logits + row * stride * item_bytes((int)r->dtype), correction, expert_scale,
                  ids + row * r->top_k, weights + row * r->top_k);
    for (int64_t pair = 0; counts && pair < rows * r->top_k; pair++)
        counts[ids[pair]] += slots[pair / r->top_k] >= 0;
    return 0;
}

/* out (rows, width) float32 = x (rows, width). */
TAPED int widen_rows_to_float32(const char *x, float *out, int64_t rows, int64_t width, int64_t dtype)
{
    for (int64_t i = 0, count = rows * width; i < count; i += VW) {
        vf values;
        FOR_DTYPE(values = load_some(x, i, count, TYPE))
        store_some(out, i, count, values, FLOAT32);
    }
    return 0;
}
