"""What a configuration asks of an attention backend."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionNeeds:
    """Known before any device is touched.  ``dtype`` is that of queries, ``kv_cache_dtype`` that of the cache.

    ``head_dims`` are those of the model's layers, each once.  ``has_softcap``: some layer caps its scores;
    ``has_sinks``: some layer has attention sinks.

    ``capability`` is the GPU's compute capability, such as (9, 0); None where there is no GPU or nobody has asked.
    """

    device_type: str
    dtype: torch.dtype
    kv_cache_dtype: torch.dtype
    block_size: int
    head_dims: tuple[int, ...]
    has_softcap: bool = False
    has_sinks: bool = False
    capability: tuple[int, int] | None = None

    def why_no_sinks(self) -> str | None:
        """What a backend without attention sinks says of a model with them; None of others."""
        if not self.has_sinks:
            return None
        return "the model has attention sinks, which it does not; use attention_backend=torch, native or triton"

    def why_too_old(self, least: tuple[int, int]) -> str | None:
        """What to say of a GPU below the compute capability ``least``; None of others, and where it is not known."""
        if self.capability is None or self.capability >= least:
            return None
        (major, minor), (own_major, own_minor) = least, self.capability
        return (
            f"it needs a GPU of compute capability {major}.{minor}, and this one is of {own_major}.{own_minor}; use "
            "attention_backend=torch"
        )
