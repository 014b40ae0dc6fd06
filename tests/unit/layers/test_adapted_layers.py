"""Layers with slots for adapters beside the same layers without, in steps in which no row has an adapter, or some."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from tp_engine.cpu.library import native_library
from tp_engine.distributed.collectives import SingleRank
from tp_engine.kernels import ops
from tp_engine.layers.context import AdapterLimits, LayerContext
from tp_engine.layers.linear import GatedColumnParallelLinear, LocalLinear
from tp_engine.layers.lora import LocalPair, StepAdapters, adapting, group_step
from tp_engine.layers.quantization import choose_formats, dense, quantised_products
from tp_engine.layers.quantization.base import Product
from tp_engine.model_config.mlp import SILU, Activation, MlpSpec
from tp_engine.models import mlp

CPU = torch.device("cpu")
SIZE, INNER, RANK = 64, 80, 4
ACTIVATIONS = (SILU, Activation("swiglu_clamped", alpha=1.7, limit=1.5))


def context(quantization: str | None, dtype: torch.dtype, *, has_slots: bool) -> LayerContext:
    return LayerContext(
        communicator=SingleRank(),
        dtype=dtype,
        device=CPU,
        format_of=choose_formats(quantization),
        adapters=AdapterLimits(max_loras=2, max_rank=RANK) if has_slots else None,
    )


def fill(layer: LocalLinear) -> None:
    """Random weights, the same for equal layers, and for slot 1 an adapter."""
    generator, shape = torch.Generator().manual_seed(0), layer.shape
    for parameter in layer.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) / 8)
    layer.finish_loading()
    if layer.adapters is not None:
        sizes = ((len(shape.parts), RANK, shape.num_columns), (RANK, shape.num_rows))
        a, b = (torch.randn(size, generator=generator).to(layer._dtype) / 8 for size in sizes)
        layer.adapters.put(1, LocalPair(a=a, b=b))


def step_of(num_rows: int, adapted: list[int]) -> StepAdapters:
    slots = np.full(num_rows, -1, np.int32)
    slots[adapted] = 1
    return group_step(slots, None, CPU)


@pytest.fixture(params=[False, True], ids=["no_library", "library"])
def any_library(request: pytest.FixtureRequest) -> Iterator[None]:
    """With the compiled kernels, where they can be built, and without."""
    if request.param:
        if native_library() is None:
            pytest.skip("the native kernels cannot be built here")
        yield
        return
    ops.op.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        for module in (ops, dense, quantised_products):
            patch.setattr(module, "native_library", lambda: None)
        yield
    ops.op.cache_clear()


@pytest.mark.usefixtures("any_library")
@pytest.mark.parametrize("quantization", [None, "int8", "fp8", "int4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=lambda one: one.kind)
@pytest.mark.parametrize("bias", [False, True])
def test_rows_without_an_adapter(
    quantization: str | None, dtype: torch.dtype, activation: Activation, bias: bool
) -> None:
    """Oracle: the layer without slots, bit by bit, also of the rows beside one with an adapter, and as recordable; and
    what it gives if its product is asked for gate and up, then the activation applied: one weight has both."""
    plain, slots = (
        GatedColumnParallelLinear(
            SIZE, INNER, activation, bias=bias, context=context(quantization, dtype, has_slots=has)
        )
        for has in (False, True)
    )
    for layer in (plain, slots):
        fill(layer)
    assert slots.is_recordable == plain.is_recordable
    for num_rows in (1, 5, 40):
        x = torch.randn(num_rows, SIZE).to(dtype)
        expected = plain(x)
        assert expected.shape == (num_rows, INNER) and torch.equal(slots(x), expected)
        both = slots.loaded.before_activation(x, slots.bias)  # type: ignore[attr-defined]
        assert both.shape == (num_rows, 2 * INNER)
        assert torch.equal(ops.op("gate", "cpu")(both, activation), expected)
        with adapting(step_of(num_rows, [num_rows - 1])):
            beside = slots(x)
        assert torch.equal(beside[:-1], expected[:-1]) and not torch.equal(beside[-1], expected[-1])


@pytest.mark.parametrize("quantization", [None, "int8", "fp8", "int4"])
def test_adapters_come_before_the_activation(quantization: str | None) -> None:
    """Oracle: the formula in float64, from gate and up of the layer's product."""
    layer = GatedColumnParallelLinear(
        SIZE, INNER, SILU, bias=True, context=context(quantization, torch.float32, has_slots=True)
    )
    fill(layer)
    assert layer.adapters is not None
    weights, x = layer.adapters.weights, torch.randn(7, SIZE)
    both = layer.loaded.before_activation(x, layer.bias).double()  # type: ignore[attr-defined]
    for of_a, of_b in weights.parts():
        both[[1, 4], of_b] += x[[1, 4]].double() @ weights.a[1, of_a].double().T @ weights.b[1, :, of_b].double()
    first, up = both.chunk(2, 1)
    with adapting(step_of(7, [1, 4])):
        torch.testing.assert_close(layer(x), (first * first.sigmoid() * up).float())


@pytest.mark.parametrize("num_rows", [2, 3])
@pytest.mark.parametrize("has_adapters", [False, True])
def test_the_joint_product_of_an_mlp(num_rows: int, has_adapters: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: it is called for many rows, if none of the step's has an adapter; the result is the layers'."""
    calls: list[int] = []

    class Pair:
        more_than = 2

        def __init__(self, gate_up: Product, down: Product) -> None:
            self.gate_up, self.down = gate_up, down

        def __call__(self, x: torch.Tensor, *biases: torch.Tensor | None) -> torch.Tensor:
            calls.append(len(x))
            return self.down(self.gate_up(x, biases[0]), biases[1])

    monkeypatch.setattr(mlp, "gated_pair", Pair)
    own = replace(context(None, torch.float32, has_slots=True), path="mlp")
    layer = mlp.GatedMLP(MlpSpec(inner_size=INNER, bias=True), SIZE, context=own)
    for part in (layer.gate_up_proj, layer.down_proj):
        fill(part)
    x = torch.randn(num_rows, SIZE)
    with adapting(step_of(num_rows, [0]) if has_adapters else None):
        apart = layer.down_proj.part(layer.gate_up_proj(x))
        torch.testing.assert_close(layer(x), apart, rtol=0, atol=0)
    assert calls == [3] * (num_rows == 3 and not has_adapters)
