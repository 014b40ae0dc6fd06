#!/usr/bin/env python
"""Find the best tiles for a layer's experts on this GPU, and compare with PyTorch's grouped product of the same pairs.

    python scripts/bench_experts.py                                   all shapes, 1 to 2048 tokens
    python scripts/bench_experts.py --shape qwen3-30b-a3b --tokens 1 32 256
    python scripts/bench_experts.py --shape gpt-oss-20b --weights mxfp4                      quantised weights

Every candidate is timed on random routing; the one in ``TILES`` (tp_engine/kernels/experts/products_triton.py) is
marked.  Times are compared with the least possible time.  That is the larger of two: the bytes of all experts in use,
over the bandwidth of a plain copy; the operations, over the rate of a large matrix product.  Both rates are measured in
the same run.  Ends with one JSON line.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from bench_attention_sizes import report
from bench_kernels import number_of_sets, seconds_per_launch
from benchmarks.kernels.quantised import FORMATS, make_weight
from benchmarks.machine import copy_bandwidth, matmul_rate, processor_name

from tp_engine.kernels.experts import routing
from tp_engine.kernels.experts.experts import ExpertWeights, QuantisedExpertWeights
from tp_engine.model_config.mlp import SILU, RoutingRule

BLOCK_M, BLOCK_N, BLOCK_K, WARPS, STAGES = (16, 32, 64, 128), (32, 64, 128), (64, 128), (4, 8), (3, 4)
"""Candidates.  One BLOCK_K must serve all sizes of a batch, so that a row's result does not depend on the others."""


@dataclass(frozen=True, slots=True)
class Shape:
    """One layer's experts on one rank, in bfloat16."""

    num_experts: int
    top_k: int
    hidden: int
    inner: int


SHAPES = {
    "qwen3-30b-a3b": Shape(128, 8, 2048, 768),
    "qwen3-30b-a3b-tp4": Shape(128, 8, 2048, 192),
    "gpt-oss-20b": Shape(32, 4, 2880, 2880),
    "mixtral-8x7b-tp8": Shape(8, 2, 4096, 1792),
}


def make_weights(shape: Shape, weights: str) -> ExpertWeights | QuantisedExpertWeights:
    """Random weights on the GPU, in bfloat16 ("none") or in a format of ``FORMATS``."""
    gate_up = (shape.num_experts, 2 * shape.inner, shape.hidden)
    down = (shape.num_experts, shape.hidden, shape.inner)
    others: dict[str, Any] = {"gate_up_bias": None, "down_bias": None, "first": 0, "activation": SILU}
    if weights != "none":
        return QuantisedExpertWeights(
            gate_up=make_weight(weights, gate_up, "cuda"), down=make_weight(weights, down, "cuda"), **others
        )

    def random(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, device="cuda", dtype=torch.bfloat16) * 0.02

    return ExpertWeights(gate_up=random(*gate_up), down=random(*down), **others)


def expert_bytes(shape: Shape, weights: str) -> int:
    """Bytes of one expert."""
    if weights == "none":
        return 3 * shape.hidden * shape.inner * 2
    sizes = ((2 * shape.inner, shape.hidden), (shape.hidden, shape.inner))
    return sum(make_weight(weights, one, "meta").num_bytes for one in sizes)


def least_seconds(shape: Shape, weights: str, ids: torch.Tensor, bandwidth: float, rate: float) -> float:
    """The time of the memory traffic or of the arithmetic, whichever is longer."""
    parameters = 3 * shape.hidden * shape.inner
    num_bytes = len(set(ids.flatten().tolist())) * expert_bytes(shape, weights)
    return max(num_bytes / bandwidth, 2 * ids.numel() * parameters / rate)


def grouped_mm(weights: ExpertWeights, ids: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """PyTorch's grouped products of the same pairs.  The pairs are sorted beforehand; sort and sum are not timed."""
    order = ids.flatten().sort(stable=True).indices
    counts = torch.bincount(ids.flatten(), minlength=len(weights.down))
    ends = counts.cumsum(0).to(torch.int32)
    gate_up, down = weights.gate_up.transpose(1, 2), weights.down.transpose(1, 2)

    def run(x: torch.Tensor) -> torch.Tensor:
        rows = x[order // ids.shape[1]]
        gate, up = torch._grouped_mm(rows, gate_up, offs=ends).chunk(2, 1)
        product: torch.Tensor = torch._grouped_mm(torch.nn.functional.silu(gate) * up, down, offs=ends)
        return product

    return run


def rows_of(shape: Shape, weights: str, num_tokens: int, rates: tuple[float, float]) -> Iterator[dict[str, object]]:
    """One row per candidate, the current tiles first, PyTorch's products of plain weights last."""
    from tp_engine.kernels.experts.experts_triton import TritonExperts
    from tp_engine.kernels.experts.products_triton import Tiles, tiles_for

    rule = RoutingRule(top_k=shape.top_k, renormalises=True)
    x = torch.randn(num_tokens, shape.hidden, device="cuda", dtype=torch.bfloat16)
    ids, shares = routing.route(torch.randn(num_tokens, shape.num_experts, device="cuda"), rule, None)
    bandwidth, rate = rates
    least = least_seconds(shape, weights, ids, bandwidth, rate)
    cache = torch.cuda.get_device_properties(0).L2_cache_size
    sets = [make_weights(shape, weights) for _ in range(number_of_sets(int(least * bandwidth), cache))]
    current = tiles_for(num_tokens * shape.top_k, shape.num_experts)
    block_k = BLOCK_K if weights == "none" else (current.block_k,)
    candidates = [Tiles(*one) for one in itertools.product(BLOCK_M, BLOCK_N, block_k, WARPS, STAGES)]
    for tiles in [current, *(one for one in candidates if one != current)]:
        products = [TritonExperts(one, tiles) for one in sets]
        yield _timed(str(tuple(tiles)), [partial(one, x, ids, shares) for one in products], least) | {
            "is_current": tiles == current
        }
    if not (others := [grouped_mm(one, ids) for one in sets if isinstance(one, ExpertWeights)]):
        return
    yield _timed("torch._grouped_mm", [partial(one, x) for one in others], least) | {"is_current": False}


def _timed(name: str, launches: Sequence[Callable[[], object]], least: float) -> dict[str, object]:
    try:
        seconds = seconds_per_launch(launches, 10)
    except Exception as error:  # for example, too much shared memory
        return {"sizes": name, "error": f"{type(error).__name__}: {error}"}
    return {"sizes": name, "us": round(seconds * 1e6, 2), "share": round(least / seconds, 3)}


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 2 without a GPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--weights", choices=("none", *FORMATS), default="none", help="a format of quantised weights")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 32, 128, 256, 2048], help="tokens of a step")
    parser.add_argument("--best", type=int, default=3, help="candidates to print beside the current one")
    args = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("bench_experts times CUDA kernels, and torch finds no CUDA GPU", file=sys.stderr)
        return 2
    bandwidth, rate = copy_bandwidth(), matmul_rate(torch.bfloat16)
    print(f"{processor_name()}: copies at {bandwidth / 1e9:,.0f} GB/s, matrix products at {rate / 1e12:,.0f} TFLOP/s")
    found = [
        row
        for name in args.shape
        for num_tokens in args.tokens
        for row in report(
            f"{name}, {args.weights}, {num_tokens} tokens",
            rows_of(SHAPES[name], args.weights, num_tokens, (bandwidth, rate)),
            args.best,
        )
    ]
    facts = {"benchmark": "experts", "weights": args.weights, "device": processor_name(), "torch": torch.__version__}
    print(json.dumps(facts | {"results": found}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
