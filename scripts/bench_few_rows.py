#!/usr/bin/env python
"""Linear layers of 1 to 256 rows on this GPU: the library with its kernels around it, beside Triton's fused ones.

    python scripts/bench_few_rows.py                                        the 8B shape
    python scripts/bench_few_rows.py --shape qwen3-0.6b --rows 8 64
    python scripts/bench_few_rows.py --tiles --only head                    the LM head, with every candidate of TILES

Each of a layer's products is timed as it stands in a decode step: QKV and gate and up with the norm before them, the
output projection and down with the residual's sum, and the LM head with the choice of greedy or drawn tokens.  The
library's time is that of all these kernels.  At the end there are, for each weight, the rows for which Triton was
faster: lines of MOST_ROWS and HEAD_MOST_ROWS (tp_engine/layers/formats/few_rows.py) follow.  Shares are those of the
time of a plain copy of the weight's bytes.  Ends with one JSON line.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Protocol

import torch
from bench_attention_sizes import report
from bench_kernels import SHAPES, number_of_sets, seconds_per_launch
from benchmarks.head_choice import heads
from benchmarks.kernels.cases import Launch, Shape
from benchmarks.machine import copy_bandwidth, processor_name

from tp_engine.kernels.layer_ops import NormRule
from tp_engine.kernels.linear.few_rows_linear_triton import Tiles
from tp_engine.kernels.linear.fused_linear import RowsToNorm
from tp_engine.model_config.mlp import SILU, Activation

BLOCK_OUT, BLOCK_IN, WARPS, STAGES, SPLITS = (64, 128), (32, 64, 128), (4, 8), (2, 3, 4), (1, 4, 16)
"""Candidates.  A weight's outputs must be whole tiles of every size in ``TILES``."""
REPEATS = 10


class Timed(Protocol):
    """A product, by the library's kernels and by Triton's, and the table of ``few_rows.py`` that chooses."""

    table: ClassVar[str]

    @property
    def name(self) -> str:
        """In the report."""

    @property
    def num_in(self) -> int:
        """Columns of the weight."""

    @property
    def num_out(self) -> int:
        """Rows of the weight."""

    @property
    def num_bytes(self) -> int:
        """Of its weight in bfloat16."""

    def takes(self, tiles: Tiles) -> bool:
        """Whether ``tiles`` are a candidate."""

    def tensors(self, num_rows: int, device: str = "cuda") -> dict[str, Any]:
        """One set of what the kernels read and write."""

    def library(self, one: dict[str, Any]) -> Launch:
        """The library's product with the kernels around it."""

    def triton(self, one: dict[str, Any], tiles: Tiles | None = None) -> Launch:
        """Triton's, with ``tiles`` instead of those of ``TILES``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One product of a decoder layer: of a norm (``is_normed``) or added to the residual stream."""

    table: ClassVar[str] = "MOST_ROWS"
    name: str
    num_in: int
    num_out: int
    is_normed: bool
    activation: Activation | None = None

    @property
    def num_bytes(self) -> int:
        """Of its weight in bfloat16."""
        return 2 * self.num_in * self.num_out

    def takes(self, tiles: Tiles) -> bool:
        """Whether the outputs are whole tiles."""
        return self.num_out // (2 if self.activation is not None else 1) % tiles.block_out == 0

    def tensors(self, num_rows: int, device: str = "cuda") -> dict[str, Any]:
        """See ``Timed``."""

        def randn(*sizes: int) -> torch.Tensor:
            return torch.randn(sizes, device=device).to(torch.bfloat16)

        return {
            "x": randn(num_rows, self.num_in),
            "weight": randn(self.num_out, self.num_in) * self.num_in**-0.5,
            "rule": NormRule(randn(self.num_in), 1e-6),
            "stream": randn(num_rows, self.num_out),
        }

    def library(self, one: dict[str, Any]) -> Launch:
        """Norm, product and activation, or product and sum: as many kernels."""
        from tp_engine.kernels.ops import op

        norm, gate, add = (op(name, one["x"].device.type) for name in ("norm", "gate", "add"))

        def run() -> None:
            x = norm(one["x"], one["rule"]) if self.is_normed else one["x"]
            out = torch.nn.functional.linear(x, one["weight"])
            if self.activation is not None:
                gate(out, self.activation)
            if not self.is_normed:
                add(out, one["stream"])

        return run

    def triton(self, one: dict[str, Any], tiles: Tiles | None = None) -> Launch:
        """One kernel: of one row, or of tiles."""
        from tp_engine.attention.triton_backend import num_multiprocessors
        from tp_engine.kernels.linear.few_rows_linear_triton import few_rows_linear_triton, linear_sizes
        from tp_engine.kernels.linear.one_row_linear_triton import one_row_linear_triton, takes_weight

        x, weight, is_gated = one["x"], one["weight"], self.activation is not None
        rows = RowsToNorm(x, one["rule"]) if self.is_normed else x
        stream = None if self.is_normed else one["stream"]
        if len(x) == 1 and tiles is None and takes_weight(weight, is_gated=is_gated):
            return partial(one_row_linear_triton, rows, weight, None, self.activation, stream=stream)
        sizes = linear_sizes(weight, len(x), num_multiprocessors(weight.device), is_gated=is_gated, tiles=tiles)
        arrivals = torch.zeros(self.num_out, dtype=torch.int32, device=weight.device)
        return partial(
            few_rows_linear_triton,
            rows,
            weight,
            None,
            self.activation,
            stream=stream,
            sizes=sizes,
            arrivals=arrivals,
        )


def layers_of(shape: Shape) -> list[Layer]:
    """The four products of one layer."""
    heads = shape.num_heads * shape.head_dim
    qkv = heads + 2 * shape.num_kv_heads * shape.head_dim
    return [
        Layer(name="qkv", num_in=shape.hidden, num_out=qkv, is_normed=True),
        Layer(name="o", num_in=heads, num_out=shape.hidden, is_normed=False),
        Layer(name="gate_up", num_in=shape.hidden, num_out=2 * shape.inner, is_normed=True, activation=SILU),
        Layer(name="down", num_in=shape.inner, num_out=shape.hidden, is_normed=False),
    ]


def rows_of(layer: Timed, num_rows: int, bandwidth: float, *, all_tiles: bool) -> Iterator[dict[str, object]]:
    """One row per candidate, Triton's current kernel first, the library last."""
    cache = torch.cuda.get_device_properties(0).L2_cache_size
    sets = [layer.tensors(num_rows) for _ in range(number_of_sets(layer.num_bytes, cache))]
    least = layer.num_bytes / bandwidth
    yield _timed("triton", [layer.triton(one) for one in sets], least) | {"is_current": True}
    candidates = itertools.product(BLOCK_OUT, BLOCK_IN, WARPS, STAGES, SPLITS) if all_tiles else ()
    for tiles in itertools.starmap(Tiles, candidates):
        if layer.takes(tiles):
            launches = [layer.triton(one, tiles) for one in sets]
            yield _timed(str(tuple(tiles)), launches, least) | {"is_current": False}
    yield _timed("library", [layer.library(one) for one in sets], least) | {"is_current": False}


def _timed(name: str, launches: Sequence[Launch], least: float) -> dict[str, object]:
    try:
        seconds = seconds_per_launch(launches, REPEATS)
    except Exception as error:  # for example, too much shared memory
        return {"sizes": name, "error": f"{type(error).__name__}: {error}"}
    return {"sizes": name, "us": round(seconds * 1e6, 2), "share": round(least / seconds, 3)}


def faster_rows(results: Sequence[dict[str, Any]]) -> list[int]:
    """The rows for which Triton's current kernel was faster than the library."""
    times: dict[int, dict[str, float]] = {}
    for row in results:
        if row["sizes"] in ("triton", "library") and "us" in row:
            times.setdefault(row["rows"], {})[row["sizes"]] = row["us"]
    return [rows for rows, one in sorted(times.items()) if len(one) == 2 and one["triton"] < one["library"]]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-8b", help="the layer's shape (default: %(default)s)")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 16, 32, 64, 128, 256], help="rows of a step")
    parser.add_argument("--vocab-size", type=int, default=151_936, help="tokens of the head (default: %(default)s)")
    parser.add_argument("--only", help="products whose name contains this, such as head")
    parser.add_argument("--tiles", action="store_true", help="time every candidate of the tiles")
    parser.add_argument("--best", type=int, default=3, help="candidates to print beside the current one")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 2 without a GPU."""
    args = parse(arguments)
    if not torch.cuda.is_available():
        print("bench_few_rows times CUDA kernels, and torch finds no CUDA GPU", file=sys.stderr)
        return 2
    bandwidth, found = copy_bandwidth(), []
    print(f"{processor_name()}, {args.shape}: copies at {bandwidth / 1e9:,.0f} GB/s")
    shape = SHAPES[args.shape]
    layers: list[Timed] = [*layers_of(shape), *heads(shape.hidden, args.vocab_size)]
    if args.only:
        layers = [layer for layer in layers if args.only in layer.name]
    for layer, num_rows in itertools.product(layers, args.rows):
        rows = rows_of(layer, num_rows, bandwidth, all_tiles=args.tiles)
        name = f"{layer.name} ({layer.num_out} x {layer.num_in}), {num_rows} rows"
        found += [row | {"layer": layer.name, "rows": num_rows} for row in report(name, rows, args.best)]
    for layer in layers:
        faster = faster_rows([row for row in found if row["layer"] == layer.name])
        num_elements = layer.num_out * layer.num_in
        print(f"{layer.name}: {num_elements:,} elements: Triton is faster for {faster} rows ({layer.table})")
    facts = {"benchmark": "few_rows", "device": processor_name(), "torch": torch.__version__, "shape": args.shape}
    print(json.dumps(facts | {"results": found}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
