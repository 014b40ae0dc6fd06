"""The images of a step: rows that replace the embeddings of their tokens, and their rotary positions."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch

from tp_engine.attention.tiles import ImageSpan


@dataclass(frozen=True, slots=True, kw_only=True)
class StepImages:
    """``rows`` (n, (1 + D) * hidden) for the step's tokens ``places`` (n,) int64: their embeddings, then what is added
    after each of the first D layers (DeepStack).

    ``rotary_positions`` (3, N) int64 are those of all tokens of the step: time, row and column; None: each token
    has one.  ``spans`` are the images whose tokens see all of the image.
    """

    places: torch.Tensor
    rows: torch.Tensor
    rotary_positions: torch.Tensor | None = None
    spans: tuple[ImageSpan, ...] = ()

    def put_into(self, embeddings: torch.Tensor) -> None:
        """Replace the images' rows of ``embeddings`` (N, hidden), unscaled."""
        embeddings.index_copy_(0, self.places, self.rows[:, : embeddings.shape[1]])

    def add_behind(self, layer: int, stream: torch.Tensor) -> None:
        """Add what follows ``layer`` to ``stream`` (N, hidden)."""
        size = stream.shape[1]
        first = (1 + layer) * size
        if first < self.rows.shape[1]:
            stream.index_add_(0, self.places, self.rows[:, first : first + size])


_step: ContextVar[StepImages | None] = ContextVar("step_images", default=None)


@contextmanager
def seeing(step: StepImages | None) -> Iterator[None]:
    """Run a model's forward pass, or a draft head's, inside of this block; None: the step has no images."""
    token = _step.set(step)
    try:
        yield
    finally:
        _step.reset(token)


def images_of_step() -> StepImages | None:
    """The images of this step; None if it has none."""
    return _step.get()
