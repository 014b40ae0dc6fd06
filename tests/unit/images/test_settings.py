"""The operator's options for images, and what they make of a checkpoint's files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tp_engine.config import EngineConfig
from tp_engine.errors import ConfigError
from tp_engine.images.settings import ImageSettings, image_settings
from tp_engine.model_config.vision import VisionSpec

VISION = VisionSpec(family="qwen3_5", image_token_id=300, hidden_size=64, patch=16, merge=2, start_token_id=302)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    size = {"shortest_edge": 65536, "longest_edge": 16777216}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"size": size, "image_mean": 0.5, "image_std": 0.5}))
    return tmp_path


def settings(folder: Path, vision: VisionSpec | None = VISION, **options: Any) -> ImageSettings | None:
    return image_settings(EngineConfig(**options), vision, folder)


def test_options_reach_the_reader(folder: Path) -> None:
    """Oracle: the values that were given, in each form that vLLM takes, and the defaults."""
    plain = settings(folder)
    assert plain is not None
    assert (plain.family, plain.cell, plain.image_token_id, plain.max_images) == ("qwen3_5", 32, 300, 32)
    assert plain.rules().largest == (4096, 4096) and plain.rules().mean == (0.5, 0.5, 0.5)
    assert plain.allowed_domains == () and plain.allowed_path is None
    given = settings(
        folder,
        limit_mm_per_prompt={"image": {"count": 3, "width": 512, "height": 512}, "video": 0},
        mm_processor_kwargs={"max_pixels": 1 << 20},
        max_image_pixels=1000,
        mm_transport_bytes="2GiB",
        allowed_media_domains="images.example.com",
        allowed_local_media_path="/data",
    )
    assert given is not None
    assert given.rules().largest == (1024, 1024)
    assert (given.max_images, given.max_pixels, given.transport_bytes) == (3, 1000, 2 << 30)
    assert (given.allowed_domains, given.allowed_path) == (("images.example.com",), "/data")


def test_text_alone_needs_no_file(tmp_path: Path) -> None:
    """Oracle: None for a limit of 0, in both spellings, and for a model without a vision part."""
    assert settings(tmp_path, limit_mm_per_prompt='{"image": 0}') is None
    assert settings(tmp_path, None) is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"limit_mm_per_prompt": '{"image": -1}'}, "has image -1; it must be a whole number from 0"),
        ({"limit_mm_per_prompt": '{"image": true}'}, "has image True"),
        ({"limit_mm_per_prompt": '{"images": 1}'}, "limit_mm_per_prompt names 'images'; it can set image"),
        ({"limit_mm_per_prompt": "4"}, "it must be a JSON object"),
        ({"mm_processor_kwargs": '{"longest_edge": 1}'}, "--mm-processor-kwargs has 'longest_edge'; it may have size"),
        ({"max_image_pixels": 1 << 30}, "must be at most 178956970, the limit of Pillow"),
        ({"max_image_pixels": 0}, "max_image_pixels is 0; it must be positive"),
        ({"allowed_media_domains": "*"}, r"allowed_media_domains has '\*'"),
    ],
)
def test_options_that_can_not_be_used_are_refused_by_name(folder: Path, options: dict[str, Any], message: str) -> None:
    """Oracle: the message has the option, the value and the rule."""
    with pytest.raises(ConfigError, match=message):
        found = settings(folder, **options)
        assert found is not None
        found.rules()


def test_a_checkpoint_without_the_processors_file_says_so(tmp_path: Path) -> None:
    """Oracle: the message has the remedy."""
    with pytest.raises(ConfigError, match=r"has no preprocessor_config\.json.*--limit-mm-per-prompt"):
        settings(tmp_path)
