"""Tiles for ``bench_kernels --tiles``: kernels whose sizes are a table in tp_engine/kernels, with candidates for it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from benchmarks.kernels.cases import Launch, Shape
from benchmarks.kernels.quantised import FORMATS, make_weight
from tp_engine.kernels.experts import routing
from tp_engine.kernels.experts.experts import ExpertWeights, Weights
from tp_engine.model_config.mlp import SILU, RoutingRule

Tensors = Any
WEIGHTS = ("none", *FORMATS)


@dataclass(frozen=True, kw_only=True)
class TileCase:
    """One kernel at one size, with the ``num_bytes`` and ``num_flops`` that it needs at least.  ``make`` allocates a
    set of its tensors, ``launch`` gives the launch of one set with given tiles.  ``others`` are other implementations
    of the same work."""

    name: str
    num_bytes: int
    num_flops: int
    make: Callable[[], Tensors]
    current: tuple[int, ...]
    candidates: Sequence[tuple[int, ...]]
    launch: Callable[[Tensors, tuple[int, ...]], Launch]
    others: dict[str, Callable[[Tensors], Launch]] = field(default_factory=dict)


def quantised_tiles(shape: Shape, weights: str, num_rows: int) -> Iterator[TileCase]:
    """Products of few rows with down and with gate and up.  Where "dequantise" is faster, FEW_ROWS is too high."""
    from tp_engine.kernels.quantization.dequantise_triton import multiply_dequantised
    from tp_engine.kernels.quantization.linear_triton import TILES, RowTiles, quantised_linear_triton

    current = next(tiles for most, tiles in TILES if num_rows <= most)
    candidates = list(itertools.product((16, 32, 64, 128), (2, 4, 8), (3, 4, 5)))
    for name, sizes in {"down": (shape.hidden, shape.inner), "gate, up": (2 * shape.inner, shape.hidden)}.items():
        x = torch.randn(num_rows, sizes[1], device=shape.device, dtype=torch.bfloat16)
        yield TileCase(
            name=f"{weights}, {name}, {num_rows} rows",
            num_bytes=make_weight(weights, sizes, "meta").num_bytes,
            num_flops=0,
            make=partial(make_weight, weights, sizes, shape.device),
            current=current,
            candidates=[RowTiles(current.block_m, n, n, warps, stages) for n, warps, stages in candidates],
            launch=lambda weight, tiles, x=x: partial(quantised_linear_triton, x, weight, None, None, tiles),  # type: ignore[misc]
            others={"dequantise": lambda weight, x=x: partial(multiply_dequantised, x, weight, None)},  # type: ignore[misc]
        )


@dataclass(frozen=True, slots=True)
class Experts:
    """One layer's experts on one rank, in bfloat16."""

    num_experts: int
    top_k: int
    hidden: int
    inner: int


EXPERTS = {
    "qwen3-30b-a3b": Experts(128, 8, 2048, 768),
    "qwen3-30b-a3b-tp4": Experts(128, 8, 2048, 192),
    "gpt-oss-20b": Experts(32, 4, 2880, 2880),
    "mixtral-8x7b-tp8": Experts(8, 2, 4096, 1792),
}


def expert_tiles(name: str, shape: Experts, weights: str, num_tokens: int, device: str) -> Iterator[TileCase]:
    """The experts of random routing, beside PyTorch's grouped product of the same pairs."""
    from tp_engine.kernels.experts.experts_triton import TritonExperts
    from tp_engine.kernels.experts.tiles import Tiles, tiles_for

    x = torch.randn(num_tokens, shape.hidden, device=device, dtype=torch.bfloat16)
    rule = RoutingRule(top_k=shape.top_k, renormalises=True)
    ids, shares = routing.route(torch.randn(num_tokens, shape.num_experts, device=device), rule, None)
    is_quantised = weights != "none"
    current = tiles_for(num_tokens * shape.top_k, shape.num_experts, is_quantised=is_quantised)
    block_k = (64, 128) if weights == "none" else (current.block_k,)  # one for all sizes of a batch
    candidates = itertools.product((16, 32, 64, 128), (32, 64, 128), block_k, (4, 8), (3, 4))
    parameters = 3 * shape.hidden * shape.inner
    yield TileCase(
        name=f"{name}, {weights}, {num_tokens} tokens",
        num_bytes=len(set(ids.flatten().tolist())) * _expert_bytes(shape, weights),
        num_flops=2 * ids.numel() * parameters,
        make=partial(_make_experts, shape, weights, device),
        current=current,
        candidates=[Tiles(*one) for one in candidates],
        launch=lambda experts, tiles: partial(TritonExperts(experts, tiles), x, ids, shares),  # type: ignore[arg-type]
        others={"torch._grouped_mm": partial(_grouped_mm, x, ids)} if weights == "none" else {},
    )


def _expert_bytes(shape: Experts, weights: str) -> int:
    if weights == "none":
        return 3 * shape.hidden * shape.inner * 2
    sizes = ((2 * shape.inner, shape.hidden), (shape.hidden, shape.inner))
    return sum(make_weight(weights, one, "meta").num_bytes for one in sizes)


def _make_experts(shape: Experts, weights: str, device: str) -> ExpertWeights[Weights]:
    gate_up = (shape.num_experts, 2 * shape.inner, shape.hidden)
    down = (shape.num_experts, shape.hidden, shape.inner)
    others: dict[str, Any] = {"gate_up_bias": None, "down_bias": None, "first": 0, "activation": SILU}
    if weights != "none":
        both = [make_weight(weights, sizes, device) for sizes in (gate_up, down)]
        return ExpertWeights(gate_up=both[0], down=both[1], **others)
    plain = [torch.randn(sizes, device=device, dtype=torch.bfloat16) * 0.02 for sizes in (gate_up, down)]
    return ExpertWeights(gate_up=plain[0], down=plain[1], **others)


def _grouped_mm(x: torch.Tensor, ids: torch.Tensor, weights: ExpertWeights[Weights]) -> Launch:
    """The pairs are sorted beforehand; sort and sum are not timed."""
    assert isinstance(weights.gate_up, torch.Tensor) and isinstance(weights.down, torch.Tensor)
    order = ids.flatten().sort(stable=True).indices
    ends = torch.bincount(ids.flatten(), minlength=len(weights.down)).cumsum(0).to(torch.int32)
    gate_up, down = weights.gate_up.transpose(1, 2), weights.down.transpose(1, 2)

    def run() -> torch.Tensor:
        gate, up = torch._grouped_mm(x[order // ids.shape[1]], gate_up, offs=ends).chunk(2, 1)
        product: torch.Tensor = torch._grouped_mm(torch.nn.functional.silu(gate) * up, down, offs=ends)
        return product

    return run
