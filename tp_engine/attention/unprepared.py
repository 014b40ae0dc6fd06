"""The seam for heads: what a backend offers that prepares them itself, in the launch that attends."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch

from tp_engine.attention.base import AttentionMetadata, AttentionShape
from tp_engine.kernels.attention.heads import UnpreparedHeads
from tp_engine.kernels.kv_cache.layer_kv import LayerKv


@runtime_checkable
class PreparesHeads(Protocol):
    """A backend that may prepare heads itself."""

    def attend_unprepared(
        self, new: UnpreparedHeads, kv: LayerKv, metadata: AttentionMetadata, shape: AttentionShape
    ) -> torch.Tensor | None:
        """Prepare, store and attend; None, and nothing is done, if ``forward`` must get this step's heads prepared."""
