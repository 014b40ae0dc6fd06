"""What a process that reads images must know of the model and of the operator's limits.  No torch, no Pillow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tp_engine.config import EngineConfig
from tp_engine.errors import ConfigError
from tp_engine.images.rules import ImageRules, image_rules, read_processor
from tp_engine.model_config.vision import VisionSpec
from tp_engine.options.prompt_images import PromptImages

MOST_PIXELS = 178_956_970


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSettings:
    """How images of requests are read; crosses process borders, as its neighbours in ``ModelInfo``.

    ``family``, the tokens' ids and ``cell`` (patch size times merged patches of a side) are those of ``VisionSpec``;
    ``processor`` is the content of the checkpoint's file ``origin``, and ``overrides`` are those of
    ``--mm-processor-kwargs``.  A prompt has at most ``max_images``, an image at most ``max_pixels`` in its file, and
    the pixels of all requests take at most ``transport_bytes``.  ``allowed_domains`` and ``allowed_path`` are where
    images may be fetched from; none by default.
    """

    family: str
    image_token_id: int
    start_token_id: int | None
    end_token_id: int | None
    cell: int
    processor: dict[str, Any]
    origin: str
    overrides: dict[str, Any] = field(default_factory=dict)
    max_images: int = PromptImages().image
    max_pixels: int = MOST_PIXELS
    transport_bytes: int = 1 << 30
    allowed_domains: tuple[str, ...] = ()
    allowed_path: str | None = None

    def rules(self, asked: Mapping[str, Any] | None = None) -> ImageRules:
        """Return the rules of sizes; ``ConfigError`` for a processor's file that cannot be served.

        What is ``asked`` for one image goes before the operator's ``overrides``.
        """
        asked = asked or {}
        replaced = ("min_pixels", "max_pixels") if "size" in asked else ()  # older names of the same
        overrides = {name: value for name, value in self.overrides.items() if name not in replaced} | dict(asked)
        asked_by = "mm_processor_kwargs" if asked else "--mm-processor-kwargs"
        return image_rules(
            self.family, self.processor, cell=self.cell, overrides=overrides, origin=self.origin, asked_by=asked_by
        )


def image_settings(config: EngineConfig, vision: VisionSpec | None, folder: Path) -> ImageSettings | None:
    """Return how images are read for the model in ``folder``; None if it is served as text alone.

    Raises ``ConfigError`` for options and files that cannot be used.
    """
    max_images = config.limit_mm_per_prompt.image
    if vision is None or max_images == 0:
        return None
    if config.max_image_pixels > MOST_PIXELS:
        raise ConfigError(
            f"max_image_pixels is {config.max_image_pixels}; it must be at most {MOST_PIXELS}, the limit of Pillow"
        )
    from tp_engine.images.fetching import parse_domains  # ssl, which takes a while to import

    parse_domains(config.allowed_media_domains)
    processor, origin = read_processor(folder)
    return ImageSettings(
        family=vision.family,
        image_token_id=vision.image_token_id,
        start_token_id=vision.start_token_id,
        end_token_id=vision.end_token_id,
        cell=vision.patch * vision.merge,
        processor=processor,
        origin=origin,
        overrides=dict(config.mm_processor_kwargs or {}),
        max_images=max_images,
        max_pixels=config.max_image_pixels,
        transport_bytes=config.mm_transport_bytes,
        allowed_domains=config.allowed_media_domains,
        allowed_path=config.allowed_local_media_path,
    )
