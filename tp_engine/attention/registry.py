"""Which attention backend runs: ``auto`` is resolved and a named one is checked before any device is touched.

``PREFILL:DECODE`` names two backends, one for prompt chunks and one for decodes, that share the cache.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from tp_engine.attention import flash_attn, flashinfer, native_backend, torch_varlen, triton_backend
from tp_engine.attention.base import AttentionBackend, AttentionMetadata, AttentionNeeds, AttentionShape
from tp_engine.attention.flashinfer import FlashInferBackend
from tp_engine.attention.native_backend import NativeBackend
from tp_engine.attention.torch_backend import TorchBackend
from tp_engine.attention.torch_varlen import TorchVarlenBackend
from tp_engine.attention.triton_backend import TritonBackend
from tp_engine.errors import ConfigError
from tp_engine.kernels.layer_kv import KeyValue, LayerKv
from tp_engine.kernels.native.block_codes import lanes_of
from tp_engine.kernels.native.library import native_library
from tp_engine.kernels.ops import op
from tp_engine.log import get_logger

_logger = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Kind:
    """Why a backend can not be used, with the remedy, or None; and how to make one.

    ``has_own_order``: what it stores in a block only it can read.
    """

    why_not: Callable[[AttentionNeeds], str | None]
    make: Callable[[AttentionNeeds], AttentionBackend]
    has_own_order: bool = False


# In the order in which ``auto`` tries them.  On GPUs our own kernels come before those of packages, because this
# project's tests run them; torch runs everywhere and is last.
_KINDS: dict[str, _Kind] = {
    "triton": _Kind(triton_backend.why_not, lambda needs: TritonBackend()),
    "flash_attn": _Kind(flash_attn.why_not, flash_attn.make_backend),
    "flashinfer": _Kind(flashinfer.why_not, lambda needs: FlashInferBackend()),
    "torch_varlen": _Kind(torch_varlen.why_not, lambda needs: TorchVarlenBackend()),
    "native": _Kind(native_backend.why_not, lambda needs: NativeBackend(), has_own_order=True),
    "torch": _Kind(lambda needs: None, lambda needs: TorchBackend()),
}


def check_backend(name: str, needs: AttentionNeeds) -> str:
    """The name of the backend to use: ``name``, or for ``auto`` the first usable one in its order.

    Raises ``ConfigError`` if a named backend, or one of a pair, can not be used, or if a pair can not share the cache.
    """
    if name == "auto":
        return _choose(needs)
    parts = name.split(":", 1)
    for part in parts:
        if part not in _KINDS:
            raise ConfigError(
                f"attention_backend is {name!r}; choose auto or one of {', '.join(_KINDS)}, or two of them as "
                f"PREFILL:DECODE"
            )
        obstacle = _KINDS[part].why_not(needs)
        if obstacle is not None:
            raise ConfigError(f"attention_backend is {part}: {obstacle}")
    alone = next((part for part in parts if _KINDS[part].has_own_order), None)
    if alone is not None and len(set(parts)) > 1:
        raise ConfigError(
            f"attention_backend is {name}: {alone} keeps the tokens of a block in an order of its own, which the other "
            f"one of the pair can not read; use one of them alone, such as attention_backend={alone}"
        )
    return name


def obstacles(needs: AttentionNeeds) -> dict[str, str | None]:
    """Each backend, in the order in which ``auto`` tries them, with the reason why it can not be used, or None."""
    return {name: kind.why_not(needs) for name, kind in _KINDS.items()}


def _choose(needs: AttentionNeeds) -> str:
    """The first usable backend; the log says why earlier ones can not be used, and which later ones can, if named."""
    found = obstacles(needs)
    chosen = next(name for name, obstacle in found.items() if obstacle is None)  # torch, if no other
    before = list(found)[: list(found).index(chosen)]
    reason = "; ".join(f"{name}: {found[name]}" for name in before) or "the first choice, and all its rules hold"
    others = [name for name, obstacle in found.items() if obstacle is None and name not in (chosen, "torch")]
    if others:
        reason += f"; usable too, but only where attention_backend names it: {', '.join(others)}"
    _logger.info("attention backend: %s (%s)", chosen, reason)
    return chosen


def select_backend(name: str, needs: AttentionNeeds) -> AttentionBackend:
    """A new backend of the kind that ``check_backend`` returns for the same arguments."""
    prefill, _, decode = check_backend(name, needs).partition(":")
    if not decode or decode == prefill:
        return _KINDS[prefill].make(needs)
    return PairBackend(_KINDS[prefill].make(needs), _KINDS[decode].make(needs))


def key_lanes(backend: AttentionBackend, block_size: int) -> int:
    """Tokens whose keys lie side by side as columns in a block that ``backend`` keeps; 0 if keys are rows."""
    library = native_library()
    if not isinstance(backend, NativeBackend) or library is None:
        return 0
    return lanes_of(library, block_size)


class PairBackend:
    """``prefill`` and ``decode`` share the cache: K/V is stored once, then each attends to its part of a mixed step."""

    def __init__(self, prefill: AttentionBackend, decode: AttentionBackend) -> None:
        self.name = f"{prefill.name}:{decode.name}"
        self.can_capture_decodes = decode.can_capture_decodes
        self._prefill, self._decode = prefill, decode
        self._parts: tuple[AttentionMetadata, AttentionMetadata] | None = None

    def prepare(self, metadata: AttentionMetadata) -> None:
        """Cut a mixed step in two; see ``AttentionBackend``."""
        self._parts = None
        if 0 < metadata.num_decodes < metadata.num_requests:
            self._parts = split_step(metadata)
            self._decode.prepare(self._parts[0])
            self._prefill.prepare(self._parts[1])
        else:
            self._only(metadata).prepare(metadata)

    def forward(
        self,
        query: torch.Tensor,
        new: KeyValue | None,
        kv: LayerKv,
        metadata: AttentionMetadata,
        shape: AttentionShape,
    ) -> torch.Tensor:
        """Store, then attend; see ``AttentionBackend``.  Tokens without a request get zeros."""
        if self._parts is None:
            return self._only(metadata).forward(query, new, kv, metadata, shape)
        if new is not None:
            op("store_kv", query.device.type)(new, kv, metadata.slot_mapping)
        first = metadata.num_decodes
        decodes, prefills = self._parts
        return torch.cat(
            (
                self._decode.forward(query[:first], None, kv, decodes, shape),
                self._prefill.forward(query[first:], None, kv, prefills, shape),
            )
        )

    def _only(self, metadata: AttentionMetadata) -> AttentionBackend:
        """The backend of a step that is not mixed."""
        return self._decode if metadata.num_decodes else self._prefill


def split_step(metadata: AttentionMetadata) -> tuple[AttentionMetadata, AttentionMetadata]:
    """A mixed step's decodes, and its prefills with the padding tokens after them, each as a separate step."""
    first = metadata.num_decodes
    decodes = AttentionMetadata(
        num_decodes=first,
        slot_mapping=metadata.slot_mapping[:first],
        block_table=metadata.block_table[:first],
        seq_lens=metadata.seq_lens[:first],
        query_start=metadata.query_start[: first + 1],
        host_query_lens=metadata.host_query_lens[:first],
        host_seq_lens=metadata.host_seq_lens[:first],
        is_padded=metadata.is_padded,
    )
    prefills = AttentionMetadata(
        num_decodes=0,
        slot_mapping=metadata.slot_mapping[first:],
        block_table=metadata.block_table[first:],
        seq_lens=metadata.seq_lens[first:],
        query_start=metadata.query_start[first:] - first,
        host_query_lens=metadata.host_query_lens[first:],
        host_seq_lens=metadata.host_seq_lens[first:],
        is_padded=metadata.is_padded,
    )
    return decodes, prefills
