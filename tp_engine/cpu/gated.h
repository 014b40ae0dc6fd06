/* An MLP's gate and up multiplied, or the square of up alone: kernels/layer_ops.py has the formulas. */
#pragma once

#include "simd.h"

/* The activations of the gate, mirrored in model_config/mlp.py.  NO_GATE: none; BOTH_PARTS: none, of a weight that has
   gate and up. */
enum { BOTH_PARTS = -2, NO_GATE = -1, SILU = 0, GELU_TANH = 1, SWIGLU_CLAMPED = 2, RELU2 = 3, SILU_CLAMPED = 4 };

/* x * sigmoid(2 sqrt(2 / pi) (x + 0.044715 x^3)), which is gelu's tanh formula without the loss of digits below 0. */
INLINE vf gelu_tanh(vf x)
{
    const float slope = -2 * LOG2_E * 0.7978845608028654f;
    const vf power = x * (slope + slope * 0.044715f * (x * x));
    return x / (1.0f + exp2_vector(select_vector(power > 200.0f, splat(200.0f), power)));
}

/* Gate times up, not rounded.  The activated gate is rounded before the product, as PyTorch's is. */
INLINE vf gated(vf gate, vf up, float alpha, float limit, const int kind, const int dtype)
{
    if (kind == SILU)
        return rounded(gate / (1.0f + exp2_vector(gate * -LOG2_E)), dtype) * up;
    if (kind == GELU_TANH)
        return rounded(gelu_tanh(gate), dtype) * up;
    gate = select_vector(gate > limit, splat(limit), gate);
    up = select_vector(up > limit, splat(limit), select_vector(up < -limit, splat(-limit), up));
    if (kind == SILU_CLAMPED)
        return rounded(gate / (1.0f + exp2_vector(gate * -LOG2_E)), dtype) * up;
    return (up + 1.0f) * gate / (1.0f + exp2_vector(gate * (-LOG2_E * alpha)));
}

/* Of RELU2, which has no gate. */
INLINE vf squared_relu(vf up)
{
    const vf kept = select_vector(up < 0.0f, splat(0), up);
    return kept * kept;
}

/* Parts of a weight with this activation behind it: gate and up, or one. */
INLINE int parts_of(const int kind) { return kind == NO_GATE || kind == RELU2 ? 1 : 2; }

/* `statement`, compiled for each activation. */
#define FOR_KIND(statement)                                                             \
    switch (kind) {                                                                     \
    case SILU: { enum { KIND = SILU }; statement; } break;                              \
    case GELU_TANH: { enum { KIND = GELU_TANH }; statement; } break;                    \
    case SWIGLU_CLAMPED: { enum { KIND = SWIGLU_CLAMPED }; statement; } break;          \
    case SILU_CLAMPED: { enum { KIND = SILU_CLAMPED }; statement; } break;              \
    default: { enum { KIND = RELU2 }; statement; }                                      \
    }

/* The same, and without activation. */
#define FOR_RESULT(statement)                                                           \
    switch (kind) {                                                                     \
    case BOTH_PARTS: { enum { KIND = BOTH_PARTS }; statement; } break;                  \
    case NO_GATE: { enum { KIND = NO_GATE }; statement; } break;                        \
    default: FOR_KIND(statement)                                                        \
    }
