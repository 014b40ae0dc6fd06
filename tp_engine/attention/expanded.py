"""The expanded form of latent attention on GPUs: a long chunk over keys and values made from a request's rows.

::

    torch        keys joined, values padded to their width; PyTorch's attention, 256 queries at a time
    tiles-...    Triton (expanded_triton.py): both widths as they are, one launch; wgmma on 9.0, tcgen05 on 10.0
    cudnn        by PyTorch, widths 192 and 128 on 9.0 and 10.x: chunks that begin their request; others by tiles

By PyTorch's rules (``sdp_utils.cpp``) the first is flash-attn 2 for 256 queries without a prefix.  Others have
a mask: they are CUTLASS's kernel for 8.0, or on 9.0 and 10.x cuDNN from 9.23 on, with a plan for each number of keys.
"""

from __future__ import annotations

from functools import partial
from typing import TypeAlias

import torch
import torch.nn.functional as F

from tp_engine.attention.base import AttentionShape
from tp_engine.attention.tiles import attend_last
from tp_engine.kernels.attention.paged_candidates import shared_memory
from tp_engine.kernels.attention.paged_trials import dtype_of, name_of
from tp_engine.kernels.attention.plain_attention import attend
from tp_engine.kernels.attention.prompt_packages import LEAST_TOKENS, causal_by_cudnn, padded_length
from tp_engine.kernels.candidates import MANY, Candidate, Inputs, Operation, Run, Shape, normal, why_no_triton
from tp_engine.kernels.kv_cache.layer_kv import KeyValue

Tiles: TypeAlias = tuple[int, int, int, int]
"""Queries of a program, keys at a time, warps, and tiles in flight."""

EXPANDED_PROMPTS = "expanded_prompt_attention"
MIN_EXPANDED_QUERIES = 128
# Bounds the keys and values of one call, which has as many heads as fit.
_MAX_EXPANDED_ELEMENTS = {"cpu": 1 << 23, "cuda": 1 << 26}
_BEFORE = 1000  # keys before a trial's chunk of fewer tokens than cuDNN takes
_CUDNN_VERSION, _CUDNN_WIDTHS = 91100, (192, 128)
_USUAL: Tiles = (128, 64, 8, 2)
# With DeepSeek-V3's widths none spills where it fits.
_TILES: tuple[Tiles, ...] = (_USUAL, (128, 64, 8, 3), (64, 64, 4, 2), (128, 32, 8, 2), (64, 32, 4, 2))
_TILES_OF_32_BITS: tuple[Tiles, ...] = ((32, 32, 4, 1),)
_SPARE_BYTES = 2 << 10  # beside tiles: barriers, and sums of a row


def shape_of(shape: AttentionShape, dtype: torch.dtype) -> Shape:
    """The shape of a layer's attention over what its latents are expanded to."""
    maps, rank = shape.latent, shape.value_dim
    assert maps is not None and rank is not None
    rope = shape.head_dim - rank
    return {
        "heads": shape.num_heads, "nope": maps.query_dim - rope, "rope": rope, "value": maps.value_dim,
        "type": name_of(dtype),
    }  # fmt: skip


def attend_expanded(query: torch.Tensor, rows: torch.Tensor, shape: AttentionShape, run: Run) -> torch.Tensor:
    """Queries (t, heads, query_dim), the last positions of ``rows`` (n, 1, row_dim) -> (t, heads, value_dim), by a
    candidate ``run``."""
    maps, rank = shape.latent, shape.value_dim
    assert maps is not None and rank is not None
    latents, turned = rows.squeeze(1).split_with_sizes((rank, rows.shape[2] - rank), 1)
    out = query.new_empty(len(query), shape.num_heads, maps.value_dim)
    room = _MAX_EXPANDED_ELEMENTS[query.device.type]
    step = max(1, room // (len(rows) * (maps.query_dim + maps.value_dim)))
    for first in range(0, shape.num_heads, step):
        heads = slice(first, min(first + step, shape.num_heads))
        run(query[:, heads], out[:, heads], maps.expand(latents, heads), turned, shape.scale)
    return out


def attend_by_torch(
    query: torch.Tensor, out: torch.Tensor, made: torch.Tensor, turned: torch.Tensor, scale: float
) -> torch.Tensor:
    """Attend with ``query`` (t, heads, nope + rope) into ``out`` (t, heads, value), over ``made`` (n, heads, nope +
    value) [ key without rotation | value ] and ``turned`` (n, rope), the keys' rotated part."""
    keys, values = _states(made, turned, out.shape[2])
    num_heads, size = keys.shape[1:]
    if values.shape[2] < size:  # PyTorch's fast functions want both of one size
        values = F.pad(values, (0, size - values.shape[2]))
    own = AttentionShape(num_heads=num_heads, num_kv_heads=num_heads, head_dim=size, scale=scale)
    out.copy_(attend_last(query, KeyValue(keys, values), own)[..., : out.shape[2]])
    return out


def _states(made: torch.Tensor, turned: torch.Tensor, value_dim: int) -> KeyValue:
    """Keys (n, heads, nope + rope) and values (n, heads, value)."""
    nope = made.shape[2] - value_dim
    shared = turned.unsqueeze(1).expand(-1, made.shape[1], -1)
    return KeyValue(torch.cat((made[..., :nope], shared), -1), made[..., nope:])


def _torch(weights: None, shape: Shape) -> Run:
    return attend_by_torch


def _tiles(tiles: Tiles, weights: None, shape: Shape) -> Run:
    """Called as ``attend_by_torch``."""
    from tp_engine.kernels.attention.expanded_triton import ExpandedSizes, expanded_prefill_triton

    sizes = ExpandedSizes(*tiles)

    def run(
        query: torch.Tensor, out: torch.Tensor, made: torch.Tensor, turned: torch.Tensor, scale: float
    ) -> torch.Tensor:
        expanded_prefill_triton(query, out, made, turned, scale=scale, sizes=sizes)
        return out

    return run


def _cudnn(weights: None, shape: Shape) -> Run:
    """Chunks whose queries are not all of the positions, and short ones, are a kernel's."""
    otherwise = _tiles(_USUAL, weights, shape)

    def run(
        query: torch.Tensor, out: torch.Tensor, made: torch.Tensor, turned: torch.Tensor, scale: float
    ) -> torch.Tensor:
        count = len(query)
        if len(made) != count or count < LEAST_TOKENS:
            return otherwise(query, out, made, turned, scale)
        padding = (0, 0, 0, 0, 0, padded_length(count) - count)  # of keys that no query sees
        states = (F.pad(one, padding) for one in _states(made, turned, out.shape[2]))
        out.copy_(causal_by_cudnn(F.pad(query, padding), *KeyValue(*states), scale)[:count])
        return out

    return run


def tiles_of(shape: Shape) -> tuple[Tiles, ...]:
    """The tiles for numbers of that many bits."""
    return _TILES if dtype_of(shape).itemsize == 2 else _TILES_OF_32_BITS


def tile_bytes(tiles: Tiles, shape: Shape) -> int:
    """Shared memory of a program: its queries, and the keys and values in flight."""
    rows, tile, _, num_stages = tiles
    nope, rope, value = (1 << (int(shape[name]) - 1).bit_length() for name in ("nope", "rope", "value"))
    elements = rows * (nope + rope) + num_stages * tile * (nope + rope + value)
    return dtype_of(shape).itemsize * elements + _SPARE_BYTES


def _why_no_tiles(tiles: Tiles, shape: Shape, device: torch.device) -> str | None:
    if (reason := why_no_triton(shape, device)) is not None:
        return reason
    if tiles not in tiles_of(shape):
        return "it is for numbers of as many bits as its registers hold"
    needed, room = tile_bytes(tiles, shape), shared_memory(device)
    return None if needed <= room else f"it needs {needed >> 10} KiB of shared memory, and a program has {room >> 10}"


def _why_not_cudnn(shape: Shape, device: torch.device) -> str | None:
    nope, rope, value = (int(shape[name]) for name in ("nope", "rope", "value"))
    if (nope + rope, value) != _CUDNN_WIDTHS or dtype_of(shape).itemsize != 2:
        return "it takes keys of 192 numbers of 16 bits, and values of 128"
    if (reason := _why_no_tiles(_USUAL, shape, device)) is not None:
        return reason
    if torch.cuda.get_device_capability(device)[0] not in (9, 10):
        return "it is for compute capability 9.0 and 10.x"
    version = torch.backends.cudnn.version() or 0
    return None if version >= _CUDNN_VERSION else f"cuDNN has these widths from 9.11 on, and this is {version}"


def _inputs(shape: Shape, num_rows: int, device: torch.device, generator: torch.Generator) -> Inputs:
    """A chunk that begins its request, if it is as long as cuDNN takes it; fewer queries follow a prefix."""
    num_keys = num_rows if num_rows >= LEAST_TOKENS else num_rows + _BEFORE
    heads, nope, rope, value = (int(shape[name]) for name in ("heads", "nope", "rope", "value"))
    query, made, rows = (
        normal(size, device, generator).to(dtype_of(shape))
        for size in ((num_rows, heads, nope + rope), (num_keys, heads, nope + value), (num_keys, rope + 8))
    )
    out = torch.full_like(query[..., :1], float("nan")).expand(-1, -1, value).contiguous()
    return query, out, made, rows[:, 8:], (nope + rope) ** -0.5


def _twin(weights: None, shape: Shape, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    query, _, made, turned, scale = inputs
    keys, values = _states(made, turned, int(shape["value"]))
    position = torch.arange(len(made), device=query.device, dtype=torch.int64)
    is_hidden = position > position[len(made) - len(query) :, None]
    hidden = torch.zeros(is_hidden.shape, dtype=torch.float32, device=query.device).masked_fill_(is_hidden, -torch.inf)

    def attended(dtype: torch.dtype) -> torch.Tensor:
        q, k, v = (one.to(dtype).transpose(0, 1) for one in (query, keys, values))
        return attend(q, k, v, hidden, scale=scale, softcap=None, sinks=None).transpose(0, 1)

    return attended(torch.float64), attended(query.dtype)


def _num_bytes(shape: Shape) -> int:
    width = int(shape["nope"]) + int(shape["value"])
    return LEAST_TOKENS * int(shape["heads"]) * width * dtype_of(shape).itemsize


OPERATION = Operation(
    candidates=(
        Candidate(name="torch", build=_torch),
        *(
            Candidate(
                name="tiles-{}x{}-w{}-s{}".format(*tiles),
                build=partial(_tiles, tiles),
                why_not=partial(_why_no_tiles, tiles),
            )
            for tiles in (*_TILES, *_TILES_OF_32_BITS)
        ),
        Candidate(name="cudnn", build=_cudnn, why_not=_why_not_cudnn),
    ),
    default=lambda shape, device: ((MANY, "torch"),),
    inputs=_inputs,
    twin=_twin,
    num_bytes=_num_bytes,
    sources=(
        "attention/expanded.py",
        "kernels/attention/expanded_triton.py",
        "kernels/attention/paged_tiles_triton.py",
    ),
    rows_of=None,
    is_recorded=False,
    least_rows=MIN_EXPANDED_QUERIES,
    most_rows=2048,
    comes_first=True,
    num_terms=2048,
)
