/* SwiGLU's product. */
#pragma once

#include "simd.h"

/* silu(gate) * up, not yet rounded; silu is, as PyTorch's is. */
INLINE vf swiglu(vf gate, vf up, const int dtype)
{
    return rounded(gate / (1.0f + exp2_vector(gate * -LOG2_E)), dtype) * up;
}
