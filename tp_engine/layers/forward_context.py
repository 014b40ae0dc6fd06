"""The one ambient state of a forward pass: what attention sees of this step, which only attention layers read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

from tp_engine.attention.base import AttentionMetadata

_metadata: ContextVar[Sequence[AttentionMetadata]] = ContextVar("attention_metadata")


@contextmanager
def forward_context(metadata: Sequence[AttentionMetadata]) -> Iterator[None]:
    """Run a model's forward pass inside of this block; one entry for each group of layers (``kv_layout``)."""
    token = _metadata.set(metadata)
    try:
        yield
    finally:
        _metadata.reset(token)


def current_metadata(group: int = 0) -> AttentionMetadata:
    """This step's metadata for a group of layers; an assertion outside of ``forward_context``."""
    metadata = _metadata.get(None)
    assert metadata is not None, "the model was called outside of forward_context"
    return metadata[group]
