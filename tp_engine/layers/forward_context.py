"""The one ambient state of a forward pass: this step's attention metadata, which only attention layers read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from tp_engine.attention.base import AttentionMetadata

_metadata: ContextVar[AttentionMetadata] = ContextVar("attention_metadata")


@contextmanager
def forward_context(metadata: AttentionMetadata) -> Iterator[None]:
    """Run a model's forward pass inside of this block."""
    token = _metadata.set(metadata)
    try:
        yield
    finally:
        _metadata.reset(token)


def current_metadata() -> AttentionMetadata:
    """This step's metadata; an assertion outside of ``forward_context``."""
    metadata = _metadata.get(None)
    assert metadata is not None, "the model was called outside of forward_context"
    return metadata
