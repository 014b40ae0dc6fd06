"""Paged attention with Triton kernels: decodes split over their keys, prompt chunks tile by tile."""

from collections.abc import Iterable
from typing import NamedTuple

import torch

from tp_engine.attention.base import AttentionMetadata, AttentionNeeds, AttentionShape
from tp_engine.kernels.attention.paged_candidates import DECODES, PROMPTS, shape_of
from tp_engine.kernels.attention.prompt_packages import PromptStep
from tp_engine.kernels.candidates import DEFAULTS, Choices, Run, Shape, Wanted, chosen
from tp_engine.kernels.kv_cache.layer_kv import KeyValue, LayerKv
from tp_engine.kernels.ops import has_triton

MIN_CAPABILITY = (8, 0)
MIN_FP8_CAPABILITY = (8, 9)
MAX_HEAD_DIM = 512


class _LayerKind(NamedTuple):
    """What layers that run the same have in common."""

    shape: AttentionShape
    has_sinks: bool
    dtype: torch.dtype
    cache_dtype: torch.dtype
    block_size: int
    device: torch.device


class _Runs(NamedTuple):
    """``padded_prompts``: of steps that are padded."""

    decodes: Run
    prompts: Run
    padded_prompts: Run


class TritonBackend:
    """Stores, decodes and prefills in a kernel launch each; nothing waits for the device.

    If it ``is_invariant``, a decode's keys are split by its length alone.
    """

    name = "triton"
    can_capture_decodes = True
    can_capture_prompts = True

    def __init__(self, *, is_invariant: bool = False, choices: Choices = DEFAULTS) -> None:
        from tp_engine.kernels.attention import paged_decode_triton
        from tp_engine.kernels.kv_cache.store_kv_triton import store_kv_triton

        self._store_kv = store_kv_triton
        self._is_invariant, self._choices = is_invariant, choices
        self._runs: dict[_LayerKind, _Runs] = {}
        self._max_arrivals = paged_decode_triton.MAX_ARRIVALS * (
            paged_decode_triton.FIXED_SPLITS if is_invariant else 1
        )
        self._arrivals: torch.Tensor | None = None
        self._prompts: PromptStep | None = None
        self._decode_tables = (
            torch.empty(0, dtype=torch.float32, device="cpu"),
            torch.empty(0, dtype=torch.float32, device="cpu"),
        )

    def prepare(self, metadata: AttentionMetadata) -> None:
        """Find where the decodes end; see ``AttentionBackend``."""
        first = metadata.num_decodes
        query_lens = metadata.host_query_lens[first:]
        num_queries = int(query_lens.sum())
        self._prompts = None
        if num_queries:
            self._prompts = PromptStep(
                metadata.block_table, metadata.seq_lens, metadata.query_start, first, num_queries, query_lens,
                metadata.host_seq_lens[first:],
            )  # fmt: skip
        self._decode_tables = (metadata.block_table[:first], metadata.seq_lens[:first])

    def forward(
        self, query: torch.Tensor, new: KeyValue | None, kv: LayerKv, metadata: AttentionMetadata, shape: AttentionShape
    ) -> torch.Tensor:
        if new is not None:
            self._store_kv(new, kv, metadata.slot_mapping)
        prompts, num_decodes = self._prompts, metadata.num_decodes
        has_padding = metadata.is_padded and prompts is not None  # only the device knows after which chunk
        out = (torch.zeros if has_padding else torch.empty)(query.shape, dtype=query.dtype, device=query.device)
        kind = _LayerKind(shape, shape.sinks is not None, query.dtype, kv.cache.dtype, kv.cache.shape[2], out.device)
        runs = self._runs.get(kind) or self._choose(kind)
        if num_decodes:
            arrivals = self._own_arrivals(query.device)
            own_query, own_out = query[:num_decodes], out[:num_decodes]
            runs.decodes(own_query, own_out, kv, *self._decode_tables, shape.scale, shape.sinks, arrivals)
        num_tokens = num_decodes
        if prompts is not None:
            attend = runs.padded_prompts if has_padding else runs.prompts
            attend(query, out, kv, prompts, shape.scale, shape.sinks)
            num_tokens += prompts.num_queries
        if num_tokens < len(query):
            out[num_tokens:] = 0.0
        return out

    def _own_arrivals(self, device: torch.device) -> torch.Tensor:
        if self._arrivals is None:
            self._arrivals = torch.zeros(self._max_arrivals, dtype=torch.int32, device=device)
        return self._arrivals

    def _choose(self, kind: _LayerKind) -> _Runs:
        """What layers of a kind run; packages take steps whose lengths the host knows."""
        own, device = shape_of_layer(*kind[:-1], is_fixed=self._is_invariant), kind.device
        decodes, prompts = (chosen(name, own, device, self._choices) for name in (DECODES, PROMPTS))
        found = self._runs[kind] = _Runs(decodes, prompts, chosen(PROMPTS, own, device, DEFAULTS))
        return found


def shape_of_layer(
    shape: AttentionShape,
    has_sinks: bool,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    block_size: int,
    *,
    is_fixed: bool = False,
) -> Shape:
    """The shape of a layer's attention, for candidates."""
    return shape_of(
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        dtype=dtype,
        cache_dtype=cache_dtype,
        block_size=block_size,
        window=shape.sliding_window,
        softcap=shape.softcap,
        has_sinks=has_sinks,
        is_fixed=is_fixed,
    )


def kernels_of(shapes: Iterable[AttentionShape], needs: AttentionNeeds) -> list[Wanted]:
    """The operations with candidates that layers of these ``shapes`` run."""
    found: list[Wanted] = []
    for shape in shapes:
        own = shape_of_layer(shape, shape.sinks is not None, needs.dtype, needs.kv_cache_dtype, needs.block_size)
        found += [(DECODES, own), (PROMPTS, own)]
    return found


def why_not(needs: AttentionNeeds) -> str | None:
    """Return why this backend cannot be used, with the remedy; None if it can."""
    if needs.device_type == "cuda" and (largest := max(needs.head_dims)) > MAX_HEAD_DIM:
        return f"head_dim is {largest}; it takes at most {MAX_HEAD_DIM}: use attention_backend=torch"
    return why_no_triton(needs)


def why_no_triton(needs: AttentionNeeds) -> str | None:
    """Why no Triton kernel of attention can be used, with the remedy; None if one can."""
    if needs.device_type != "cuda":
        return f"it needs a CUDA device, not {needs.device_type}; use attention_backend=torch"
    if not has_triton():
        return "the triton package is not installed; `pip install triton`, or use attention_backend=torch"
    is_too_old = needs.capability is not None and needs.capability < MIN_FP8_CAPABILITY
    if needs.kv_cache_dtype == torch.float8_e4m3fn and is_too_old:
        return "kv_cache_dtype is fp8, which GPUs before compute capability 8.9 do not have; set kv_cache_dtype=int8"
    return needs.why_too_old(MIN_CAPABILITY)
