"""The interpreter's cases on a GPU, and the same kernels in CUDA graphs."""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

import pytest
import torch

from tests.unit.kernels.kernel_harness import CASE_MODULES
from tp_engine.kernels.kv_cache.layer_kv import LayerKv
from tp_engine.kernels.layer_ops import NormRule
from tp_engine.kernels.ops import implementation, op
from tp_engine.model_config.mlp import SILU

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

MODULES = [f"kernel_cases_{name}" for name in CASE_MODULES]


@cache
def cases_of(module: str) -> Any:
    """The module of cases."""
    return importlib.import_module(f"tests.unit.kernels.{module}")


@pytest.mark.parametrize(("module", "case"), [(module, case) for module in MODULES for case in cases_of(module).CASES])
def test_kernel(module: str, case: str) -> None:
    """Oracle: the case's own."""
    if "float8" in case and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("8-bit floats need compute capability 8.9")
    cases_of(module).CASES[case]("cuda")


def captured(step: Any) -> torch.cuda.CUDAGraph:
    """``step`` as a graph, after one call that compiles its kernels."""
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


def test_decode_inputs_in_a_graph() -> None:
    """Oracle: the PyTorch twin on a copy of the tables; replays advance the rows, and also use other rows."""
    from tp_engine.kernels.steps.decode_inputs import DecodeInputs

    make_tables = cases_of("kernel_cases_decode_inputs").make_tables
    tables, twin_tables = (make_tables(9, 600, 16, 1, device) for device in ("cuda", "cpu"))
    inputs, twin_inputs = DecodeInputs.allocate(4, tables), DecodeInputs.allocate(4, twin_tables)
    sampled = torch.arange(4, dtype=torch.int32)
    on_device = sampled.cuda()
    names = ("prepare_decodes", "advance_decodes")
    prepare, advance = (op(name, "cuda") for name in names)
    prepare_twin, advance_twin = (op(name, "cpu") for name in names)

    def step() -> None:
        prepare(tables, inputs)
        advance(tables, inputs, on_device)

    graph = captured(step)  # all rows are padding so far, so nothing changes
    for rows in ([0, 5, -1, 3], [5, -1, -1, 0], [5, -1, -1, 0]):
        for kept in (inputs, twin_inputs):
            kept.rows.copy_(torch.tensor(rows, dtype=torch.int32))
        graph.replay()
        prepare_twin(twin_tables, twin_inputs)
        advance_twin(twin_tables, twin_inputs, sampled)
        for name in ("input_ids", "positions", "slot_mapping", "seq_lens"):
            torch.testing.assert_close(getattr(inputs, name).cpu(), getattr(twin_inputs, name), msg=name)
        assert torch.equal(tables.token_ids.cpu(), twin_tables.token_ids)
        assert torch.equal(tables.num_computed.cpu(), twin_tables.num_computed)


def test_padded_steps_in_a_graph() -> None:
    """Oracle: the PyTorch twin on a copy of the tables; replays are of other steps than the captured one."""
    from tp_engine.worker.batch.padded_batch import PaddedBatch, StepSize, StepSizes

    make_plan = cases_of("kernel_cases_padded_steps").make_plan
    make_tables = cases_of("kernel_cases_decode_inputs").make_tables
    tables, twin_tables = (make_tables(9, 600, 16, 3, device) for device in ("cuda", "cpu"))
    for kept in (tables, twin_tables):
        kept.num_computed.fill_(5)
    size, sampled = StepSize(decodes=8, tokens=64), torch.arange(24, dtype=torch.int32)
    sizes, on_device = StepSizes(decodes=(size.decodes,), tokens=(size.tokens,)), sampled.cuda()
    batch, twin = PaddedBatch(tables, sizes), PaddedBatch(twin_tables, sizes)
    batch.set_step(make_plan([], []), size)

    def step() -> None:
        batch.prepare(size)
        batch.advance(size, on_device)

    graph = captured(step)  # all is padding so far, so nothing changes
    for decodes, chunks in (([0, 5], [(3, 40, True), (2, 9, False)]), ([5, 3], [(2, 64, True)]), ([], [(7, 1, True)])):
        for kept in (batch, twin):
            kept.set_step(make_plan(decodes, chunks), size)
        graph.replay()
        twin.prepare(size)
        twin.advance(size, sampled)
        found, expected = batch.inputs(size), twin.inputs(size)
        for name in ("input_ids", "positions", "slot_mapping", "seq_lens"):
            torch.testing.assert_close(getattr(found, name).cpu(), getattr(expected, name), msg=name)
        assert torch.equal(tables.token_ids.cpu(), twin_tables.token_ids)
        assert torch.equal(tables.num_computed.cpu(), twin_tables.num_computed)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_layer_ops_in_a_graph(dtype: torch.dtype) -> None:
    """Oracle, bit by bit: the same kernels launched one by one, on other inputs than the captured ones."""
    make = cases_of("kernel_cases_layer_ops")
    gate, add_norm, qk_norm_rope_store = (op(name, "cuda") for name in ("gate", "add_norm", "qk_norm_rope_store"))
    assert add_norm is implementation("add_norm", "triton")
    weight, gate_up, merged = (make.random(shape, dtype, "cuda") for shape in ((96,), (3, 192), (3, 8, 32)))
    positions, slots = torch.tensor([4, 5, 6], device="cuda"), torch.tensor([1, -1, 7], device="cuda")
    rotation = cases_of("kernel_cases_heads").make_rotation(32, positions, dtype)
    cache = torch.zeros(2, 2, 4, 2, 32, dtype=dtype, device="cuda")
    residual = make.random((3, 96), dtype, "cuda")
    results: dict[str, torch.Tensor] = {}

    def step() -> None:
        x = gate(gate_up, SILU)
        results["norm"] = add_norm(x, residual, NormRule(weight, 1e-6))
        results["query"] = qk_norm_rope_store(merged, 2, None, rotation, LayerKv(cache), slots)[0]

    graph = captured(step)
    replayed = results["norm"], results["query"]
    for seed in (1, 2):
        inputs = [make.random(tuple(kept.shape), dtype, "cuda", seed) for kept in (gate_up, merged, residual)]
        outcomes = []
        for run in (graph.replay, step):
            for kept, fresh in zip((gate_up, merged, residual), inputs, strict=True):
                kept.copy_(fresh)
            run()
            norm, query = replayed if run is not step else (results["norm"], results["query"])
            outcomes.append([norm.clone(), query.clone(), residual.clone(), cache.clone()])
        for found, expected in zip(*outcomes, strict=True):
            assert torch.equal(found, expected)
