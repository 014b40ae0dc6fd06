"""The quantised KV cache: the error of an element, and scales by slot."""

from __future__ import annotations

import pytest
import torch

from tests.paged_batches import among_layers
from tp_engine.kernels.kv_cache.layer_kv import (
    LARGEST_VALUE,
    SCALE_DTYPE,
    KeyValue,
    LayerKv,
    dequantise,
    is_quantised,
    quantise,
    states_at,
    store_kv,
)

QUANTISED = list(LARGEST_VALUE)
# Half a step of the largest value for integers; half a unit of a mantissa of 3 bits for floats.
RELATIVE_ERROR = {torch.int8: 0.5 / 127, torch.float8_e4m3fn: 2.0**-4}


@pytest.mark.parametrize("dtype", QUANTISED, ids=str)
@pytest.mark.parametrize("magnitude", [1e-6, 1.0, 1e4])
def test_error_of_an_element(dtype: torch.dtype, magnitude: float) -> None:
    """Oracle: half a step, of the vector's largest element (int8) or of the element itself (fp8)."""
    states = torch.randn(500, 3, 64, generator=torch.Generator().manual_seed(0)) * magnitude
    values, scales = quantise(states, dtype)
    assert values.dtype == dtype and scales.dtype == SCALE_DTYPE and scales.shape == (500, 3)
    peak = states.abs().amax(-1, keepdim=True)
    reference = peak if dtype == torch.int8 else states.abs().clamp(min=2.0**-6 / 448 * peak)
    error = (dequantise(values, scales) - states).abs()
    assert bool((error <= RELATIVE_ERROR[dtype] * reference * (1 + 1e-5)).all())


@pytest.mark.parametrize("dtype", QUANTISED, ids=str)
def test_zeros_and_extremes(dtype: torch.dtype) -> None:
    """Oracle: a vector of zeros stays zero, and the largest element of either sign stays what it is."""
    states = torch.tensor([[0.0, 0.0], [5.0, -2.5], [-3.0, 0.0]])
    back = dequantise(*quantise(states, dtype))
    torch.testing.assert_close(back, states, rtol=1e-2, atol=0)
    assert float(back[1, 0]) == 5.0 and float(back[2, 0]) == -3.0


@pytest.mark.parametrize("dtype", QUANTISED, ids=str)
def test_twin_stores_values_and_scales_by_slot(dtype: torch.dtype) -> None:
    """Oracle: an assignment per token; skipped and other slots keep their values."""
    key, value = torch.randn(2, 4, 2, 8, generator=torch.Generator().manual_seed(1))
    slots = [9, -1, 0, 4]
    kv = LayerKv(among_layers(torch.zeros(2, 3, 4, 2, 8, dtype=dtype)), among_layers(torch.zeros(2, 3, 2, 4)))
    store_kv(KeyValue(key, value), kv, torch.tensor(slots))
    for part, states in enumerate((key, value)):
        read = states_at(kv, part, torch.arange(12))
        for slot in range(12):
            expected = torch.zeros(2, 8)
            if slot in slots:
                expected = dequantise(*quantise(states[slots.index(slot)], dtype))
            torch.testing.assert_close(read[slot], expected, rtol=0, atol=0)


def test_which_types_are_quantised() -> None:
    """Oracle: the types of one byte."""
    assert [is_quantised(dtype) for dtype in (torch.int8, torch.float8_e4m3fn)] == [True, True]
    assert not any(is_quantised(dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16))
