"""Paged caches, tables and lengths to try attention's candidates with, of any shape of cache.

::

    shape           a cache with "kv_heads" has keys and values; one with a "rank" has the rows of latents alone
    pool            block: [ keys | values | others' ]        as in an engine, where other layers lie between

What lies between is all bits set: NaN, or -1.  A candidate must neither read it into its result nor change it.
"""

from collections.abc import Sequence

import numpy as np
import torch

from tp_engine.kernels.attention.prompt_packages import PromptStep
from tp_engine.kernels.candidates import Shape, normal
from tp_engine.kernels.kv_cache.layer_kv import LayerKv, is_quantised, quantise
from tp_engine.system.units import MIB, ceil_div

MOST_KEYS = 8192
_CACHE_BYTES = 128 * MIB  # of a trial; more than a GPU's cache holds
_LEAST_KEYS = 256
_USUAL_REQUESTS = 8


def name_of(dtype: torch.dtype) -> str:
    """A type's name in a shape."""
    return str(dtype).removeprefix("torch.")


def dtype_of(shape: Shape, name: str = "type") -> torch.dtype:
    """The type that ``shape`` has under ``name``."""
    found = getattr(torch, str(shape[name]))
    assert isinstance(found, torch.dtype)
    return found


def _width(shape: Shape) -> tuple[int, int, int]:
    """Parts of a cache, heads of a key, and elements of a head."""
    return 1 if "rank" in shape else 2, int(shape.get("kv_heads", 1)), int(shape["dim"])


def num_keys(shape: Shape, num_rows: int) -> int:
    """Keys of each of ``num_rows`` requests of a trial."""
    return max(_LEAST_KEYS, min(MOST_KEYS, _CACHE_BYTES // (num_rows * _key_bytes(shape))))


def _key_bytes(shape: Shape) -> int:
    """Bytes of a key and its value."""
    parts, heads, dim = _width(shape)
    return parts * heads * dim * dtype_of(shape, "cache").itemsize


def num_bytes(shape: Shape) -> int:
    """What a step of some decodes reads."""
    return _USUAL_REQUESTS * num_keys(shape, _USUAL_REQUESTS) * _key_bytes(shape)


def decode_lengths(shape: Shape, num_rows: int) -> list[int]:
    """Different lengths of ``num_rows`` requests."""
    most = num_keys(shape, num_rows)
    return [most - 37 * row % (most // 2) for row in range(num_rows)]


def tables(
    shape: Shape, lengths: Sequence[int], device: torch.device, generator: torch.Generator
) -> tuple[LayerKv, torch.Tensor, torch.Tensor]:
    """A cache in which the blocks of requests of these ``lengths`` lie in a random order, their table and lengths."""
    counts = [ceil_div(length, int(shape["block"])) for length in lengths]
    order = torch.randperm(sum(counts), generator=generator, dtype=torch.int32, device="cpu")
    table = torch.zeros(len(lengths), max(counts), dtype=torch.int32, device="cpu")
    for row, own in zip(table, order.split(counts), strict=True):
        row[: len(own)] = own
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device="cpu")
    return _cache(shape, sum(counts), device, generator), table.to(device), seq_lens.to(device)


def _cache(shape: Shape, num_blocks: int, device: torch.device, generator: torch.Generator) -> LayerKv:
    parts, heads, dim = _width(shape)
    size, dtype = (num_blocks, parts + 1, int(shape["block"]), heads, dim), dtype_of(shape, "cache")
    values = normal(size, device, generator)
    if not is_quantised(dtype):
        return LayerKv(_own_parts(values.to(dtype), parts))
    codes, scales = quantise(values, dtype)
    return LayerKv(_own_parts(codes, parts), _own_parts(scales.transpose(2, 3).contiguous(), parts))


def _own_parts(pool: torch.Tensor, parts: int) -> torch.Tensor:
    """A layer's view of ``pool`` (blocks, parts + 1, ...), whose last part is others'."""
    pool[:, parts:].view(torch.uint8).fill_(0xFF)
    return pool[:, :parts].transpose(0, 1)


def prompt_step(
    shape: Shape, counts: Sequence[int], before: Sequence[int], device: torch.device, generator: torch.Generator
) -> tuple[LayerKv, PromptStep]:
    """Chunks of ``counts`` tokens, each behind a prefix of ``before``; all keys are in the cache."""
    lengths = [own + earlier for own, earlier in zip(counts, before, strict=True)]
    kv, table, seq_lens = tables(shape, lengths, device, generator)
    starts = torch.tensor([0, *np.cumsum(counts)], dtype=torch.int32, device=device)
    on_host = (np.array(one, dtype=np.int32) for one in (counts, lengths))
    return kv, PromptStep(table, seq_lens, starts, 0, sum(counts), *on_host)
