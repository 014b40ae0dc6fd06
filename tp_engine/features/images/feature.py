"""Images in prompts: scheduling and encoding (docs/images.md)."""

from dataclasses import dataclass

from tp_engine.features.extension import Extension
from tp_engine.features.metric import counter, gauge
from tp_engine.features.registry import Feature


@dataclass(slots=True)
class ImageCounters:
    """Since the start: images that chunks needed, those of them that were in the encoder cache, and rows in use."""

    num_queries: int = 0
    num_hits: int = 0
    num_encoded: int = 0
    num_rows_used: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageLimits:
    """How images are encoded: ``num_rows`` of the encoder cache, on each of ``num_ranks``.  ``token_id`` is the model's
    placeholder.  ``is_bidirectional``: tokens of an image see all of it, so that no chunk cuts it.  A draft
    head reads ``num_ahead`` tokens after a chunk, images too.

    The tower has ``num_layers``.  One of them over an image of n rows takes a rank as long as ``n * row_work + n * n *
    pair_work`` tokens of a prompt do.
    """

    num_rows: int
    token_id: int
    num_ranks: int = 1
    num_layers: int = 1
    row_work: float = 1.0
    pair_work: float = 0.0
    is_bidirectional: bool = False
    num_ahead: int = 0

    def layer_work(self, num_rows: int) -> float:
        """Return the work of a layer over an image of ``num_rows``, in tokens of a prompt."""
        return num_rows * (self.row_work + num_rows * self.pair_work)


COUNTERS = Extension("images", ImageCounters)
LIMITS = Extension("images", ImageLimits)

FEATURE = Feature(
    name="images",
    engine="tp_engine.features.images.engine:open_tower",
    scheduler="tp_engine.features.images.scheduling:make",
    stats=COUNTERS,
    metrics=(
        counter("mm_cache_queries", "images that chunks needed, looked up in the encoder cache", "num_queries"),
        counter("mm_cache_hits", "images found in the encoder cache", "num_hits"),
        counter("images_encoded", "images that a rank's tower has encoded", "num_encoded"),
        gauge("mm_cache_rows_used", "rows of the encoder cache that hold an image", "num_rows_used"),
    ),
)
