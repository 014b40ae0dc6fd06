"""A step cut in two: its decodes and its prefills, for one backend each (``attention_backend=PREFILL:DECODE``)."""

from __future__ import annotations

import torch

from tp_engine.attention.base import AttentionBackend, AttentionMetadata, AttentionShape
from tp_engine.kernels.kv_cache.layer_kv import KeyValue, LayerKv
from tp_engine.kernels.ops import op


class PairBackend:
    """``prefill`` and ``decode`` share the cache: K/V is stored once, then each attends to its part of a mixed step."""

    def __init__(self, prefill: AttentionBackend, decode: AttentionBackend) -> None:
        self.name = f"{prefill.name}:{decode.name}"
        self.can_capture_decodes = decode.can_capture_decodes
        self.can_capture_prompts = False
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
