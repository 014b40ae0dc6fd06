"""Attention over the paged cache on a GPU: Triton's kernels in several sizes, and those of installed packages.

::

    decode_attention     requests of one query each      own: sizes by the batch; fewer, more: its splits; tile-...
    prompt_attention     chunks of prompts               own: sizes by the heads; rows-...; flash_attn, varlen, cudnn

The sizes of ``own`` are the code's own choice.  The number of splits follows from the size of the batch in every
candidate, never from lengths, so a recorded step holds each of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch

from tp_engine.kernels.attention.paged_trials import (
    MOST_KEYS,
    decode_lengths,
    dtype_of,
    name_of,
    num_bytes,
    prompt_step,
    tables,
)
from tp_engine.kernels.attention.plain_attention import paged_attention
from tp_engine.kernels.attention.prompt_packages import PACKAGES, Package, PromptStep, runner, why_no_shape
from tp_engine.kernels.candidates import MANY, Candidate, Choice, Inputs, Operation, Run, Shape, normal, why_no_triton
from tp_engine.kernels.kv_cache.layer_kv import LayerKv, is_quantised

if TYPE_CHECKING:
    from tp_engine.kernels.attention.paged_decode_triton import DecodeSizes

DECODES, PROMPTS = "decode_attention", "prompt_attention"
# For Triton's interpreter, which has no GPU to ask.
_INTERPRETED_MULTIPROCESSORS = 4
_BEFORE = 200
_LEAST_ROWS_OF_ONE = 1024  # a prompt alone; fewer are those of two, of which one goes on behind a prefix


def shape_of(
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    block_size: int,
    window: int | None,
    softcap: float | None,
    has_sinks: bool,
    is_fixed: bool = False,
) -> Shape:
    """The shape of one layer's attention on this rank.  ``is_fixed``: a request's splits follow from its length."""
    return {
        "heads": num_heads, "kv_heads": num_kv_heads, "dim": head_dim, "type": name_of(dtype),
        "cache": name_of(cache_dtype), "block": block_size, "window": window or 0,
        "cap": "" if softcap is None else repr(softcap), "sinks": int(has_sinks), "fixed": int(is_fixed),
    }  # fmt: skip


def _rule(shape: Shape) -> dict[str, Any]:
    return {"window": int(shape["window"]) or None, "softcap": float(shape["cap"]) if shape["cap"] else None}


@cache
def num_multiprocessors(device: torch.device) -> int:
    """The multiprocessors of ``device``, over which work is split."""
    if device.type != "cuda":
        return _INTERPRETED_MULTIPROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@cache
def shared_memory(device: torch.device) -> int:
    """Bytes that one program may use."""
    from tp_engine.kernels.attention.paged_prefill_triton import LARGE_SHARED_MEMORY

    if device.type != "cuda":
        return LARGE_SHARED_MEMORY
    return int(getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", LARGE_SHARED_MEMORY))


@dataclass(frozen=True, slots=True)
class _DecodeChange:
    """What a candidate changes in the usual sizes: ``times`` as many splits, or other tiles."""

    times: float = 1.0
    tile: int | None = None
    num_warps: int = 4
    num_stages: int = 3


def _decode(change: _DecodeChange, weights: None, shape: Shape) -> Run:
    """Called with queries (B, heads, head_dim), the output, the cache, tables, lengths, scale, sinks and arrivals."""
    from tp_engine.kernels.attention.paged_decode_triton import decode_sizes, paged_decode_triton

    rule, is_fixed = _rule(shape), bool(shape["fixed"])
    quantised, itemsize = is_quantised(dtype_of(shape, "cache")), dtype_of(shape).itemsize

    @cache
    def sizes_for(num_requests: int, device: torch.device) -> DecodeSizes:
        usual = decode_sizes(
            num_requests, int(shape["kv_heads"]), int(shape["dim"]), itemsize, num_multiprocessors(device),
            is_quantised=quantised, is_fixed=is_fixed,
        )  # fmt: skip
        return _changed(usual, change)

    def run(
        query: torch.Tensor, out: torch.Tensor, kv: LayerKv, block_table: torch.Tensor, seq_lens: torch.Tensor,
        scale: float, sinks: torch.Tensor | None, arrivals: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        paged_decode_triton(
            query, kv, block_table, seq_lens, out, scale=scale, sizes=sizes_for(len(query), query.device),
            arrivals=arrivals, sinks=sinks, **rule,
        )  # fmt: skip
        return out

    return run


def _changed(usual: DecodeSizes, change: _DecodeChange) -> DecodeSizes:
    from tp_engine.kernels.attention.paged_decode_triton import power_of_two_splits

    usual_splits = power_of_two_splits(int(usual.usual_splits * change.times))
    num_splits = max(usual_splits, power_of_two_splits(int(usual.num_splits * change.times)))
    found = replace(usual, usual_splits=usual_splits, num_splits=num_splits)
    if change.tile is None:
        return found
    return replace(found, tile=change.tile, num_warps=change.num_warps, num_stages=change.num_stages)


def _prompts(rows: int | None, tile: int, num_warps: int, num_stages: int, weights: None, shape: Shape) -> Run:
    """``rows`` None: the usual sizes.  Called with queries (N, heads, head_dim), the output, and the step."""
    from tp_engine.kernels.attention.paged_prefill_triton import PrefillSizes, paged_prefill_triton, prefill_sizes

    rule, itemsize = _rule(shape), dtype_of(shape).itemsize

    @cache
    def sizes_on(device: torch.device) -> PrefillSizes:
        if rows is None:
            return prefill_sizes(int(shape["dim"]), itemsize, shared_memory(device))
        return PrefillSizes(rows=rows, tile=tile, num_warps=num_warps, num_stages=num_stages)

    def run(
        query: torch.Tensor, out: torch.Tensor, kv: LayerKv, step: PromptStep, scale: float, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        paged_prefill_triton(
            query, kv, step.block_table, step.seq_lens, step.query_start, out, scale=scale,
            sizes=sizes_on(query.device), num_queries=step.num_queries, first_request=step.first_request, sinks=sinks,
            **rule,
        )  # fmt: skip
        return out

    return run


def _of_package(package: Package, weights: None, shape: Shape) -> Run:
    return runner(package, _prompts(None, 0, 0, 0, None, shape), int(shape["window"]) or None)


def _why_no_tile(shape: Shape, device: torch.device) -> str | None:
    """A candidate with tiles of keys for usual heads of 16 bits."""
    if (reason := why_no_triton(shape, device)) is not None:
        return reason
    if shape["fixed"]:
        return "sizes are fixed"
    is_usual = int(shape["dim"]) <= 128 and dtype_of(shape).itemsize == 2
    return None if is_usual else "it is for heads of up to 128 numbers of 16 bits"


def _why_no_splits(shape: Shape, device: torch.device) -> str | None:
    return "sizes are fixed" if shape["fixed"] else why_no_triton(shape, device)


def _why_no_package(package: Package, shape: Shape, device: torch.device) -> str | None:
    if device.type != "cuda":
        return "it needs a GPU"
    return why_no_shape(shape) or package.why_not(shape, device)


def _queries(
    shape: Shape, num_rows: int, device: torch.device, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor, float, torch.Tensor | None]:
    """Queries, memory for the result, the scale, and sinks, if there are any."""
    size = num_rows, int(shape["heads"]), int(shape["dim"])
    query = normal(size, device, generator).to(dtype_of(shape))
    sinks = normal((size[1],), device, generator) if shape["sinks"] else None
    return query, torch.full_like(query, float("nan")), size[2] ** -0.5, sinks


def _decode_inputs(shape: Shape, num_rows: int, device: torch.device, generator: torch.Generator) -> Inputs:
    from tp_engine.kernels.attention.paged_decode_triton import MAX_ARRIVALS

    kv, table, seq_lens = tables(shape, decode_lengths(shape, num_rows), device, generator)
    query, out, scale, sinks = _queries(shape, num_rows, device, generator)
    return query, out, kv, table, seq_lens, scale, sinks, torch.zeros(MAX_ARRIVALS, dtype=torch.int32, device=device)


def _decode_twin(weights: None, shape: Shape, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    query, _, kv, table, seq_lens, scale, sinks, _ = inputs
    starts = torch.arange(len(query) + 1, dtype=torch.int32, device=query.device)
    return _both(query, kv, table, seq_lens, starts, scale=scale, sinks=sinks, **_rule(shape))


def _both(query: torch.Tensor, *arguments: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return paged_attention(query.double(), *arguments, **options), paged_attention(query, *arguments, **options)


def _prompt_inputs(shape: Shape, num_rows: int, device: torch.device, generator: torch.Generator) -> Inputs:
    """A long prompt alone, or two of which the second goes on behind a prefix."""
    behind = 0 if num_rows >= _LEAST_ROWS_OF_ONE else num_rows // 3
    counts = [num_rows - behind, behind] if behind else [num_rows]
    kv, step = prompt_step(shape, counts, [0, _BEFORE][: len(counts)], device, generator)
    query, out, scale, sinks = _queries(shape, num_rows, device, generator)
    return query, out, kv, step, scale, sinks


def _prompt_twin(weights: None, shape: Shape, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    query, _, kv, step, scale, sinks = inputs
    return _both(query, kv, step.block_table, step.seq_lens, step.query_start, scale=scale, sinks=sinks, **_rule(shape))


def _decode_rows(inputs: Inputs, rows: torch.Tensor) -> Inputs:
    query, out, kv, table, seq_lens, *others = inputs
    return query[rows], out[rows], kv, table[rows], seq_lens[rows], *others


def _own_choice(shape: Shape, device: torch.device) -> Choice:
    return ((MANY, "own"),)


_SOURCES = (
    "kernels/attention/paged_*.py", "kernels/attention/split_parts_triton.py", "kernels/attention/prompt_packages.py",
    "kernels/arrivals_triton.py",
)  # fmt: skip

DECODE = Operation(
    candidates=(
        Candidate(name="own", build=partial(_decode, _DecodeChange()), why_not=why_no_triton),
        Candidate(name="fewer", build=partial(_decode, _DecodeChange(0.5)), why_not=_why_no_splits),
        Candidate(name="more", build=partial(_decode, _DecodeChange(2.0)), why_not=_why_no_splits),
        *(
            Candidate(
                name=f"tile-{tile}-w{warps}-s{stages}",
                build=partial(_decode, _DecodeChange(1.0, tile, warps, stages)),
                why_not=_why_no_tile,
                is_quick=is_quick,
            )
            for tile, warps, stages, is_quick in ((64, 4, 3, True), (128, 4, 2, True), (32, 2, 4, False))
        ),
    ),
    default=_own_choice,
    inputs=_decode_inputs,
    twin=_decode_twin,
    num_bytes=num_bytes,
    sources=_SOURCES,
    rows_of=_decode_rows,
    most_rows=256,
    copies_inputs=True,
    num_terms=MOST_KEYS,
)
PROMPT = Operation(
    candidates=(
        Candidate(name="own", build=partial(_prompts, None, 0, 0, 0), why_not=why_no_triton),
        *(
            Candidate(
                name=f"rows-{rows}x{tile}-w{warps}-s{stages}",
                build=partial(_prompts, rows, tile, warps, stages),
                why_not=_why_no_tile,
                is_quick=is_quick,
            )
            for rows, tile, warps, stages, is_quick in ((64, 64, 4, 3, True), (128, 128, 8, 2, False))
        ),
        *(
            Candidate(
                name=package.name,
                build=partial(_of_package, package),
                why_not=partial(_why_no_package, package),
                least_rows=package.least_rows,
            )
            for package in PACKAGES
        ),
    ),
    default=_own_choice,
    inputs=_prompt_inputs,
    twin=_prompt_twin,
    num_bytes=num_bytes,
    sources=_SOURCES,
    rows_of=None,
    is_recorded=False,
    least_rows=17,
    copies_inputs=True,
    num_terms=MOST_KEYS,
)
