"""Images in prompts: scheduling and encoding (docs/images.md)."""

from tp_engine.features.extension import Extension
from tp_engine.features.metric import counter, gauge
from tp_engine.features.registry import Feature
from tp_engine.sched.images import ImageCounters

COUNTERS = Extension("images", ImageCounters)

FEATURE = Feature(
    name="images",
    scheduler="tp_engine.sched.images:make",
    stats=COUNTERS,
    metrics=(
        counter("mm_cache_queries", "images that chunks needed, looked up in the encoder cache", "num_queries"),
        counter("mm_cache_hits", "images found in the encoder cache", "num_hits"),
        counter("images_encoded", "images that a rank's tower has encoded", "num_encoded"),
        gauge("mm_cache_rows_used", "rows of the encoder cache that hold an image", "num_rows_used"),
    ),
)
