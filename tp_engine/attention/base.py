"""The interface of attention: what a step and a layer tell a backend, what it must do, what a configuration needs."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import torch

from tp_engine.attention.selection import Chooser
from tp_engine.kernels.kv_cache.layer_kv import KeyValue, LayerKv
from tp_engine.plan import NO_IDS, IntArray


@dataclass(slots=True, kw_only=True)
class AttentionMetadata:
    """One step's batch, as attention sees it.  Batch order: ``num_decodes`` requests of one token, then the prefills.

    With N tokens in B requests, on the device: ``slot_mapping`` (N,) int64, -1 for padding; ``block_table`` (B, M)
    int32; ``seq_lens`` (B,) int32, computed tokens including this step's; ``query_start`` (B + 1,) int32.
    On the host: ``host_query_lens`` and ``host_seq_lens`` (B,) int32; backends plan from them without a
    synchronisation.  Padding requests of a CUDA graph have ``seq_lens`` 0.  If ``is_padded`` is False there is no
    padding, and the device is not asked.  ``slot_mapping`` and ``block_table`` belong to one group of layers
    (``kv_layout``); everything else is the same for all groups.

    Layers with a recurrent state find it by rows of the persistent batch: ``decode_rows`` (num_decodes,) int32 on the
    device, -1 for padding, and on the host ``prefill_rows`` (B - num_decodes,), -1 for requests whose state is not
    kept.  A prompt's first chunk begins with a state of zeros.  ``draft_runs`` (num_decodes, 2) int32 on the device
    says which decodes are draft rows that continue others (``kernels/gated_delta_net.py``); None if none is.
    """

    num_decodes: int
    slot_mapping: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    query_start: torch.Tensor
    host_query_lens: IntArray
    host_seq_lens: IntArray
    is_padded: bool = True
    decode_rows: torch.Tensor | None = None
    draft_runs: torch.Tensor | None = None
    prefill_rows: IntArray = field(default_factory=lambda: NO_IDS)

    @property
    def num_requests(self) -> int:
        """B, padding included."""
        return len(self.host_seq_lens)


class LatentMaps(Protocol):
    """How the heads of a layer with latent attention read the cached rows (``model_config/mla.py``)."""

    query_dim: int
    value_dim: int

    def absorb(self, query: torch.Tensor) -> torch.Tensor:
        """Queries (n, heads, query_dim) as queries of the cached rows, (n, heads, row_dim)."""

    def values(self, attended: torch.Tensor) -> torch.Tensor:
        """Means of latents (n, heads, rank) as means of values (n, heads, value_dim)."""

    def expand(self, latents: torch.Tensor, heads: slice) -> torch.Tensor:
        """Latents (n, rank) as [ key without rotation | value ] of ``heads``: (n, heads, nope_dim + value_dim),
        contiguous."""

    def up_project(self, latents: torch.Tensor, first_head: int) -> torch.Tensor:
        """``expand`` of up to ``HEADS_TOGETHER`` heads, from ``first_head`` on, which is a multiple of it.  CPUs
        only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """The constants of one attention layer on this rank.  ``sliding_window`` counts the visible keys, self included.

    ``softcap`` bounds the scores; ``sinks`` (heads,) float32 are extra scores, one per head, without values
    (kernels/attention/plain_attention.py has the formulas).  With ``value_dim`` the cache has one part: values are the
    first elements of its keys.  ``latent`` is for ``attention/mla.py``, which wraps another backend, and so is
    ``chooser``, which chooses the keys that queries attend to.  With ``sees_whole_images`` the outputs of images'
    tokens are computed again after the backend (``tiles.py``).
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    sliding_window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = field(default=None, compare=False)
    value_dim: int | None = None
    latent: LatentMaps | None = field(default=None, compare=False)
    chooser: Chooser | None = field(default=None, compare=False)
    sees_whole_images: bool = False


class AttentionBackend(Protocol):
    """Causal attention over the paged KV cache.

    ``can_capture_decodes`` says that a step of decodes can be recorded, in a CUDA graph or on a tape: ``forward`` then
    launches the same kernels for all lengths, and the kernels read the lengths.  ``can_capture_prompts`` says the same
    of steps with prompts, whose launches then depend only on the numbers of decodes, requests and tokens; the host's
    lengths are then one chunk with the tokens of all, padding included, which gets zeros.
    """

    name: str
    can_capture_decodes: bool
    can_capture_prompts: bool

    def prepare(self, metadata: AttentionMetadata) -> None:
        """Prepare what all layers share; called once per step, before the first layer."""

    def forward(
        self, query: torch.Tensor, new: KeyValue | None, kv: LayerKv, metadata: AttentionMetadata, shape: AttentionShape
    ) -> torch.Tensor:
        """Store this step's keys and values, then attend: a request may share a prefix that this step computes.

        ``query`` (N, heads, head_dim); ``new`` is None if they are stored already; returns (N, heads, head_dim), zeros
        for tokens without a request.
        """


Backends: TypeAlias = Sequence[AttentionBackend]
"""One backend for each group of layers (``kv_layout``), because a backend keeps the plan of one group's step."""


def prepare_groups(backends: Backends, metadata: Sequence[AttentionMetadata]) -> None:
    """``prepare`` of each group's backend."""
    for backend, own in zip(backends, metadata, strict=True):
        backend.prepare(own)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionNeeds:
    """What a configuration asks of a backend, known before any device is touched.

    ``dtype`` is that of queries, ``kv_cache_dtype`` that of the cache.  ``head_dims`` are those of the model's layers,
    each once.  ``has_sinks``: some layer has attention sinks.
    ``has_latents``: the layers have latent attention; with ``index_topk`` a query attends to that many keys at most.
    ``is_invariant``: a request's result must not depend on the size of the batch.  ``capability`` is the GPU's compute
    capability, such as (9, 0); None without a GPU, or if it is unknown.
    """

    device_type: str
    dtype: torch.dtype
    kv_cache_dtype: torch.dtype
    block_size: int
    head_dims: tuple[int, ...]
    has_sinks: bool = False
    has_latents: bool = False
    index_topk: int | None = None
    is_invariant: bool = False
    capability: tuple[int, int] | None = None

    def why_no_sinks(self) -> str | None:
        """Why a backend without attention sinks cannot be used; None if the model has no sinks."""
        if not self.has_sinks:
            return None
        return "the model has attention sinks, which it does not; use attention_backend=torch, native or triton"

    def why_too_old(self, least: tuple[int, int]) -> str | None:
        """Why the GPU is too old, if its compute capability is below ``least``; None if not, or if it is unknown."""
        if self.capability is None or self.capability >= least:
            return None
        (major, minor), (own_major, own_minor) = least, self.capability
        return (
            f"it needs a GPU of compute capability {major}.{minor}, and this one is of {own_major}.{own_minor}; use "
            "attention_backend=torch"
        )
