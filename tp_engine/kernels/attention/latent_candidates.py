"""Latent attention over the paged cache on a GPU: our kernel in several sizes.

::

    latent_decode_attention     requests of one query each      own: sizes by the batch; fewer, more: its splits; ...
    latent_prompt_attention     short chunks of prompts         own: sizes by the batch; wide: 64 rows to a program

The sizes of ``own`` are the code's own choice, and numbers of splits follow from the size of the batch, as in
``paged_candidates.py``.  ``wide`` multiplies by groups of four warps (wgmma on Hopper, tcgen05 on data-centre
Blackwell), and does not split keys.  Decodes that attend to chosen keys alone are a shape of their own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, partial
from typing import TYPE_CHECKING

import torch

from tp_engine.kernels.attention.index_keys import ChosenKeys
from tp_engine.kernels.attention.paged_candidates import num_multiprocessors, shared_memory
from tp_engine.kernels.attention.paged_trials import (
    MOST_KEYS,
    decode_lengths,
    dtype_of,
    name_of,
    num_bytes,
    prompt_step,
    tables,
)
from tp_engine.kernels.attention.plain_attention import attend, paged_attention
from tp_engine.kernels.attention.prompt_packages import PromptStep
from tp_engine.kernels.candidates import MANY, Candidate, Choice, Inputs, Operation, Run, Shape, normal, why_no_triton
from tp_engine.kernels.kv_cache.layer_kv import LayerKv, is_quantised, states_at

if TYPE_CHECKING:
    from tp_engine.kernels.attention.paged_mla_triton import LatentSizes

LATENT_DECODES, LATENT_PROMPTS = "latent_decode_attention", "latent_prompt_attention"
# A chunk of a trial, at most: longer ones attend to keys and values made from the rows (``attention/mla.py``).
_LONGEST_CHUNK = 127
_BEFORE = 1000
# Dynamic shared memory of ``wide`` with rows of 576 elements, the most, on Blackwell, by compiled code.
_WIDE_BYTES = 209 << 10


def shape_of(
    *,
    num_heads: int,
    row_dim: int,
    rank: int,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    block_size: int,
    top_k: int | None = None,
) -> Shape:
    """The shape of one layer's attention on this rank; ``top_k``: the most chosen keys, None for all."""
    return {
        "heads": num_heads, "dim": row_dim, "rank": rank, "type": name_of(dtype), "cache": name_of(cache_dtype),
        "block": block_size, "chosen": top_k or 0,
    }  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Change:
    """What a candidate changes in the usual sizes of decodes: ``times`` as many splits, or other tiles."""

    times: float = 1.0
    most_rows: int | None = None
    num_warps: int = 8
    num_stages: int = 2


def _decode(change: _Change, weights: None, shape: Shape) -> Run:
    """Called with queries (n, heads, row_dim), the output (n, heads, rank), the cache, tables, lengths, scale,
    arrivals, and the chosen keys, None for all."""
    from tp_engine.kernels.attention.paged_mla_triton import latent_sizes, mla_decode_triton

    @cache
    def sizes_for(num_requests: int, device: torch.device) -> LatentSizes:
        usual = latent_sizes(num_requests, int(shape["heads"]), dtype_of(shape).itemsize, num_multiprocessors(device))
        return _changed(usual, change)

    def run(
        query: torch.Tensor, out: torch.Tensor, kv: LayerKv, block_table: torch.Tensor, seq_lens: torch.Tensor,
        scale: float, arrivals: torch.Tensor, chosen: ChosenKeys | None,
    ) -> torch.Tensor:  # fmt: skip
        sizes = sizes_for(len(query), query.device)
        mla_decode_triton(
            query, kv, block_table, seq_lens, out, scale=scale, sizes=sizes, arrivals=arrivals, chosen=chosen
        )
        return out

    return run


def _changed(usual: LatentSizes, change: _Change) -> LatentSizes:
    from tp_engine.kernels.attention.paged_decode_triton import power_of_two_splits

    usual_splits = power_of_two_splits(int(usual.usual_splits * change.times))
    num_splits = max(usual_splits, power_of_two_splits(int(usual.num_splits * change.times)))
    found = replace(usual, usual_splits=usual_splits, num_splits=num_splits)
    if change.most_rows is None:
        return found
    return replace(found, most_rows=change.most_rows, num_warps=change.num_warps, num_stages=change.num_stages)


def _prompts(is_wide: bool, weights: None, shape: Shape) -> Run:
    """Called with queries (N, heads, row_dim), the output (N, heads, rank), the cache, the step, scale and arrivals."""
    from tp_engine.kernels.attention.paged_mla_triton import latent_sizes, mla_chunks_triton, wide_latent_sizes

    @cache
    def sizes_for(num_requests: int, num_queries: int, device: torch.device) -> LatentSizes:
        if is_wide:
            return wide_latent_sizes()
        itemsize = dtype_of(shape).itemsize
        return latent_sizes(
            num_requests, int(shape["heads"]), itemsize, num_multiprocessors(device), num_queries=num_queries
        )

    def run(
        query: torch.Tensor, out: torch.Tensor, kv: LayerKv, step: PromptStep, scale: float, arrivals: torch.Tensor
    ) -> torch.Tensor:
        sizes = sizes_for(len(step.seq_lens) - step.first_request, step.num_queries, query.device)
        mla_chunks_triton(
            query, kv, step.block_table, step.seq_lens, step.query_start, out, scale=scale, sizes=sizes,
            arrivals=arrivals, num_queries=step.num_queries, first_request=step.first_request,
        )  # fmt: skip
        return out

    return run


def _why_not_16_bits(shape: Shape, device: torch.device) -> str | None:
    """A candidate whose tiles are for rows of 16 bits."""
    if (reason := why_no_triton(shape, device)) is not None:
        return reason
    is_usual = dtype_of(shape).itemsize == 2 and not is_quantised(dtype_of(shape, "cache"))
    return None if is_usual else "it is for rows of 16 bits; with others its registers do not suffice"


def _why_not_wide(shape: Shape, device: torch.device) -> str | None:
    if (reason := _why_not_16_bits(shape, device)) is not None:
        return reason
    if shared_memory(device) < _WIDE_BYTES:
        return f"it needs {_WIDE_BYTES >> 10} KiB of shared memory"
    return None


def _queries(
    shape: Shape, num_rows: int, device: torch.device, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Queries, memory for the result, and the scale."""
    query = normal((num_rows, int(shape["heads"]), int(shape["dim"])), device, generator).to(dtype_of(shape))
    return query, torch.full_like(query[..., : int(shape["rank"])], float("nan")), int(shape["dim"]) ** -0.5


def _zeros(device: torch.device) -> torch.Tensor:
    from tp_engine.kernels.attention.paged_decode_triton import MAX_ARRIVALS

    return torch.zeros(MAX_ARRIVALS, dtype=torch.int32, device=device)


def _decode_inputs(shape: Shape, num_rows: int, device: torch.device, generator: torch.Generator) -> Inputs:
    lengths = decode_lengths(shape, num_rows)
    kv, table, seq_lens = tables(shape, lengths, device, generator)
    query, out, scale = _queries(shape, num_rows, device, generator)
    return query, out, kv, table, seq_lens, scale, _zeros(device), _chosen(shape, lengths, device, generator)


def _chosen(shape: Shape, lengths: list[int], device: torch.device, generator: torch.Generator) -> ChosenKeys | None:
    """Rising positions at random, of all keys where these are few; None if all keys are attended to."""
    if not (top_k := int(shape["chosen"])):
        return None
    positions = torch.zeros(len(lengths), top_k, dtype=torch.int32, device="cpu")
    counts = [min(length, top_k) for length in lengths]
    for row, length, count in zip(positions, lengths, counts, strict=True):
        row[:count] = torch.randperm(length, generator=generator, device="cpu", dtype=torch.int32)[:count].sort().values
    return ChosenKeys(positions.to(device), torch.tensor(counts, dtype=torch.int32, device=device))


def _decode_twin(weights: None, shape: Shape, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    query, _, kv, table, seq_lens, scale, _, chosen = inputs
    block_size, results = kv.cache.shape[2], []
    for number, length in enumerate(seq_lens.tolist()):
        place = torch.arange(length, dtype=torch.int64, device=query.device)
        if chosen is not None:
            place = chosen.positions[number, : int(chosen.counts[number])].long()
        rows = states_at(kv, 0, table[number, place // block_size].long() * block_size + place % block_size).squeeze(1)
        results.append([_over_rows(one[number], rows, shape, scale) for one in (query.double(), query)])
    exact, own = (torch.stack(one) for one in zip(*results, strict=True))
    return exact, own


def _over_rows(query: torch.Tensor, rows: torch.Tensor, shape: Shape, scale: float) -> torch.Tensor:
    """One query (heads, row_dim) over ``rows`` (n, row_dim) -> (heads, rank)."""
    keys = rows.to(query.dtype)
    return attend(query, keys, keys[:, : int(shape["rank"])], None, scale=scale, softcap=None, sinks=None)


def _decode_rows(inputs: Inputs, rows: torch.Tensor) -> Inputs:
    query, out, kv, table, seq_lens, scale, arrivals, chosen = inputs
    own = None if chosen is None else ChosenKeys(chosen.positions[rows], chosen.counts[rows])
    return query[rows], out[rows], kv, table[rows], seq_lens[rows], scale, arrivals, own


def _prompt_inputs(shape: Shape, num_rows: int, device: torch.device, generator: torch.Generator) -> Inputs:
    """Chunks behind prefixes, of which the last begins its request."""
    full, rest = divmod(num_rows, _LONGEST_CHUNK)
    counts = [_LONGEST_CHUNK] * full + [rest] * (rest > 0)
    before = [_BEFORE - 37 * place % (_BEFORE // 2) for place in range(len(counts))]
    if len(counts) > 1:
        before[-1] = 0
    kv, step = prompt_step(shape, counts, before, device, generator)
    query, out, scale = _queries(shape, num_rows, device, generator)
    return query, out, kv, step, scale, _zeros(device)


def _prompt_twin(weights: None, shape: Shape, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    query, _, kv, step, scale, _ = inputs
    attended = partial(
        paged_attention, kv=kv, block_table=step.block_table, seq_lens=step.seq_lens, query_start=step.query_start,
        scale=scale, value_dim=int(shape["rank"]),
    )  # fmt: skip
    return attended(query.double()), attended(query)


def _own_choice(shape: Shape, device: torch.device) -> Choice:
    return ((MANY, "own"),)


_SOURCES = (
    "kernels/attention/paged_*.py", "kernels/attention/latent_candidates.py",
    "kernels/attention/split_parts_triton.py", "kernels/arrivals_triton.py",
)  # fmt: skip

LATENT_DECODE = Operation(
    candidates=(
        Candidate(name="own", build=partial(_decode, _Change()), why_not=why_no_triton),
        Candidate(name="fewer", build=partial(_decode, _Change(0.5)), why_not=why_no_triton),
        Candidate(name="more", build=partial(_decode, _Change(2.0)), why_not=why_no_triton),
        *(
            Candidate(
                name=f"rows-{rows}-w{warps}-s{stages}",
                build=partial(_decode, _Change(1.0, rows, warps, stages)),
                why_not=_why_not_16_bits,
                is_quick=is_quick,
            )
            for rows, warps, stages, is_quick in ((16, 4, 3, True), (32, 8, 3, False))
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
LATENT_PROMPT = Operation(
    candidates=(
        Candidate(name="own", build=partial(_prompts, False), why_not=why_no_triton),
        Candidate(name="wide", build=partial(_prompts, True), why_not=_why_not_wide),
    ),
    default=_own_choice,
    inputs=_prompt_inputs,
    twin=_prompt_twin,
    num_bytes=num_bytes,
    sources=_SOURCES,
    rows_of=None,
    is_recorded=False,
    least_rows=2,
    most_rows=2048,
    copies_inputs=True,
    num_terms=MOST_KEYS,
)
