"""Attention of prompts by packages: flash-attn 2 and 3, PyTorch's ``varlen_attn``, and cuDNN through PyTorch.

cuDNN reads no blocks and has one causal form, in which the queries are as many as the keys.  So it takes prompts of
1,024 tokens and more that begin in this step, whose keys are gathered from the cache; of others Triton takes the step.
It makes a plan for each length that it has not met, so a prompt is padded to one of four lengths from each power of two
to the next; padding repeats the first key, because NaN would pass through the mask.
"""

from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from inspect import signature
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from tp_engine.kernels.candidates import Run, Shape
from tp_engine.kernels.kv_cache.layer_kv import LayerKv, states_at
from tp_engine.plan import IntArray
from tp_engine.system.units import round_up

LEAST_TOKENS = 1024
_BLOCK_MULTIPLE = 256  # of flash-attn 2


class PromptStep(NamedTuple):
    """The prompts of a step: requests from ``first_request`` on, ``num_queries`` tokens in all.  The last two are the
    host's lengths of these requests alone."""

    block_table: torch.Tensor
    seq_lens: torch.Tensor
    query_start: torch.Tensor
    first_request: int
    num_queries: int
    query_lens: IntArray
    key_lens: IntArray

    @property
    def starts(self) -> torch.Tensor:
        """Where each prompt's queries begin, and the last one's end, among those of prompts."""
        own = self.query_start[self.first_request :]
        return own - own[0]


class Package(NamedTuple):
    """A package: ``attend`` gets the prompts' queries, the cache, the step, the scale and the window, and returns None
    for a step that it does not take; ``why_not`` says why a device cannot have it."""

    name: str
    attend: Callable[..., torch.Tensor | None]
    why_not: Callable[[Shape, torch.device], str | None]
    least_rows: int = 1


def runner(package: Package, own: Run, window: int | None) -> Run:
    """A candidate by ``package``, and by ``own`` in steps that it does not take."""

    def run(
        query: torch.Tensor, out: torch.Tensor, kv: LayerKv, step: PromptStep, scale: float, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        prompts = slice(step.first_request, step.first_request + step.num_queries)  # behind a token of each decode
        found = package.attend(query[prompts], kv, step, scale, window)
        if found is None:
            return own(query, out, kv, step, scale, sinks)
        out[prompts] = found
        return out

    return run


def why_no_shape(shape: Shape) -> str | None:
    """Why no package takes attention of ``shape``."""
    if shape["cap"] or shape["sinks"] or shape["fixed"]:
        return "it has no caps and no sinks, and its order of sums is its own"
    if shape["type"] not in ("float16", "bfloat16") or shape["cache"] != shape["type"]:
        return "it takes a cache of the queries' type, of 16 bits"
    return None if int(shape["dim"]) % 8 == 0 and int(shape["dim"]) <= 256 else "it takes heads of up to 256 numbers"


def flash_attn_version(device: torch.device) -> int | None:
    """The installed version of flash-attn that is for this GPU; None if there is none."""
    is_hopper = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9
    if is_hopper and find_spec("flash_attn_interface") is not None:
        return 3
    return 2 if find_spec("flash_attn") is not None else None


def _why_no_flash_attn(shape: Shape, device: torch.device) -> str | None:
    version = flash_attn_version(device)
    if version is None:
        return "the flash-attn package is not installed"
    return _why_no_blocks(shape) if version == 2 else None


def _why_no_blocks(shape: Shape) -> str | None:
    is_whole = int(shape["block"]) % _BLOCK_MULTIPLE == 0
    return None if is_whole else f"it needs blocks of a multiple of {_BLOCK_MULTIPLE} tokens"


def attend_by_flash_attn(
    query: torch.Tensor, kv: LayerKv, step: PromptStep, scale: float, window: int | None
) -> torch.Tensor:
    """Both versions read the paged cache; the mask is causal from the lower right."""
    lengths, table = step.seq_lens[step.first_request :], step.block_table[step.first_request :]
    options = {"softmax_scale": scale, "causal": True, "window_size": _window(window)}
    options |= {"cu_seqlens_q": step.starts, "max_seqlen_q": int(step.query_lens.max())}
    if flash_attn_version(query.device) == 3:
        attend = import_module("flash_attn_interface").flash_attn_with_kvcache
        options |= {"cache_seqlens": lengths, "page_table": table}
    else:
        attend = import_module("flash_attn").flash_attn_varlen_func
        options |= {"cu_seqlens_k": _sums(lengths), "max_seqlen_k": int(step.key_lens.max()), "block_table": table}
    found: torch.Tensor = attend(query, *kv.cache, **options)
    return found


def _window(window: int | None) -> tuple[int, int]:
    """Keys to the left and to the right of the query's own; -1: no limit."""
    return (-1, 0) if window is None else (window - 1, 0)


def _sums(lengths: torch.Tensor) -> torch.Tensor:
    return F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))


@cache
def _varlen_attn() -> Callable[..., Any] | None:
    """PyTorch's function, if it takes a block table."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    needed = {"window_size", "enable_gqa", "seqused_k", "block_table", "num_splits"}
    return varlen_attn if needed <= signature(varlen_attn).parameters.keys() else None


def _why_no_varlen(shape: Shape, device: torch.device) -> str | None:
    return "this PyTorch's varlen_attn takes no block table" if _varlen_attn() is None else _why_no_blocks(shape)


def attend_by_varlen(
    query: torch.Tensor, kv: LayerKv, step: PromptStep, scale: float, window: int | None
) -> torch.Tensor:
    """Its keys are never split over programs."""
    lengths, attend = step.seq_lens[step.first_request :], _varlen_attn()
    assert attend is not None, "why_not comes first"
    found: torch.Tensor = attend(
        query, *kv.cache, step.starts, _sums(lengths), int(step.query_lens.max()), int(step.key_lens.max()),
        scale=scale, window_size=_window(window), enable_gqa=query.shape[1] != kv.cache.shape[3], seqused_k=lengths,
        block_table=step.block_table[step.first_request :], num_splits=1,
    )  # fmt: skip
    return found


def _why_no_cudnn(shape: Shape, device: torch.device) -> str | None:
    if int(shape["dim"]) > 128 or shape["window"]:
        return "it takes heads of up to 128 numbers, without a window"
    return None if torch.backends.cudnn.is_available() else "this PyTorch has no cuDNN"


def attend_by_cudnn(
    query: torch.Tensor, kv: LayerKv, step: PromptStep, scale: float, window: int | None
) -> torch.Tensor | None:
    """Prompt by prompt, if all of them are long and begin in this step."""
    if (step.query_lens < LEAST_TOKENS).any() or (step.query_lens != step.key_lens).any():
        return None
    found, start = [], 0
    for place, count in enumerate(step.query_lens.tolist()):
        slots = _slots(step.block_table[step.first_request + place], count, kv.cache.shape[2])
        keys, values = (states_at(kv, part, slots) for part in range(2))
        padded = F.pad(query[start : start + count], (0, 0, 0, 0, 0, len(slots) - count))
        found.append(causal_by_cudnn(padded, keys, values, scale)[:count])
        start += count
    return torch.cat(found)


def _slots(blocks: torch.Tensor, num_tokens: int, block_size: int) -> torch.Tensor:
    """Where a prompt's keys lie in the cache, padded with the first one's place."""
    position = torch.arange(padded_length(num_tokens), dtype=torch.int64, device=blocks.device)
    position = torch.where(position < num_tokens, position, 0)
    return blocks[position // block_size].long() * block_size + position % block_size


def padded_length(num_tokens: int) -> int:
    """One of four lengths from each power of two to the next."""
    return round_up(num_tokens, 1 << (num_tokens.bit_length() - 3))


def causal_by_cudnn(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
    """``query`` (n, heads, d), ``keys`` (n, KV heads, d) and ``values`` (n, KV heads, v) -> (n, heads, v)."""
    q, k, v = (one.transpose(0, 1).unsqueeze(0) for one in (query, keys, values))
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
    return found.squeeze(0).transpose(0, 1)


PACKAGES = (
    Package("flash_attn", attend_by_flash_attn, _why_no_flash_attn),
    Package("varlen", attend_by_varlen, _why_no_varlen),
    Package("cudnn", attend_by_cudnn, _why_no_cudnn, LEAST_TOKENS),
)
