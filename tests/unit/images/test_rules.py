"""The sizes to which images are resized, and the tokens that they take, per family.

Oracle of sizes, tokens and pixels: transformers' image processors that work with Pillow.  Kimi's needs torchvision: of
its module the function for sizes is run alone, and its pixels are computed here.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import math
import random
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma4.image_processing_pil_gemma4 import (
    Gemma4ImageProcessorPil,
    get_aspect_ratio_preserving_size,
)
from transformers.models.pixtral.image_processing_pil_pixtral import (
    PixtralImageProcessorPil,
    get_resize_output_image_size,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil, smart_resize

from tp_engine.errors import ConfigError, RequestError
from tp_engine.images.rules import ImageRules, has_processor, image_rules, read_processor

HALF = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
# family -> the file's settings as the Hub has them, the side of a cell, transformers' class.
FAMILIES: dict[str, tuple[dict[str, Any], int, type[Any] | None]] = {
    "qwen2_5_vl": ({"min_pixels": 3136, "max_pixels": 12845056}, 28, Qwen2VLImageProcessorPil),
    "qwen3_5": (
        {"size": {"shortest_edge": 65536, "longest_edge": 16777216}, "patch_size": 16, "merge_size": 2, **HALF},
        32,
        Qwen2VLImageProcessorPil,
    ),
    "gemma3": ({"size": {"height": 896, "width": 896}, "do_pan_and_scan": None}, 56, Gemma3ImageProcessorPil),
    "gemma4": ({"max_soft_tokens": 280, "do_normalize": False}, 48, Gemma4ImageProcessorPil),
    "mistral3": (
        {"size": {"longest_edge": 1540}, "patch_size": {"height": 28, "width": 28}},
        28,
        PixtralImageProcessorPil,
    ),
    "kimi_k25": ({"media_proc_cfg": {"in_patch_limit": 16384, "patch_limit_on_one_side": 512, **HALF}}, 28, None),
}
# (height, width) -> tokens, as measured with the processors of six families.
TOKENS = {
    "qwen2_5_vl": [4, 28, 391, 2691, 4, 4, 13, 15301],
    "qwen3_5": [64, 72, 300, 2040, 64, 64, 102, 11750],
    "gemma3": [256] * 8,
    "gemma4": [256, 253, 266, 264, 256, 256, 210, 266],
    "mistral3": [12, 36, 432, 1736, 6, 2, 16, 2365],
    "kimi_k25": [9, 32, 414, 2691, 4, 1, 15, 4200],
}
SHAPES = [(64, 64), (100, 200), (480, 640), (1080, 1920), (33, 33), (1, 1), (10, 400), (4000, 3000)]


def rules_of(family: str) -> ImageRules:
    settings, cell, _ = FAMILIES[family]
    return image_rules(family, settings, cell=cell)


def expected_size(family: str, height: int, width: int) -> Any:
    """What transformers' function for sizes says; one size for Gemma 3."""
    settings, cell, _ = FAMILIES[family]
    if family.startswith("qwen"):
        size = settings.get("size", {"shortest_edge": 3136, "longest_edge": 12845056})
        return smart_resize(height, width, cell, size["shortest_edge"], size["longest_edge"])
    if family == "kimi_k25":
        return kimi_sizes()(height, width, 14, 2, 16384, 512)[1]
    if family == "gemma4":
        return get_aspect_ratio_preserving_size(height, width, 16, 280 * 9, 3)
    if family == "mistral3":
        # an image that takes no memory: all its pixels are one
        image = np.broadcast_to(np.zeros(1, np.uint8), (3, height, width))
        return get_resize_output_image_size(image, 1540, 28, "channels_first")
    return 896, 896


@cache
def kimi_sizes() -> Any:
    """transformers' function from a size and the limits to that of the scaled image, and with black."""
    found = importlib.util.find_spec("transformers.models.kimi_k25.image_processing_kimi_k25")
    assert found is not None and found.origin is not None
    tree = ast.parse(Path(found.origin).read_text(encoding="utf-8"))
    own: list[ast.stmt] = [one for one in tree.body if isinstance(one, ast.FunctionDef) and one.name == "navit_resize"]
    names: dict[str, Any] = {"math": math}
    exec(compile(ast.Module(own, []), "navit_resize", "exec"), names)
    return names["navit_resize"]


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_of_shapes_are_those_that_were_measured(family: str) -> None:
    """Oracle: numbers that transformers' processors gave, written here."""
    rules = rules_of(family)
    assert [rules.num_tokens(*rules.resized(*shape)) for shape in SHAPES] == TOKENS[family]


@pytest.mark.parametrize("family", FAMILIES)
def test_sizes_are_those_of_transformers(family: str) -> None:
    """Oracle: transformers' functions, for 600 shapes: of any ratio, and near each limit."""
    rules = rules_of(family)
    draw = random.Random(family)
    limits = [1, 2, 27, 28, 29, 31, 32, 33, 47, 48, 49, 255, 256, 257, 1539, 1540, 1541, 3584, 4095, 4096, 4097]
    for _ in range(600):
        height, width = (
            draw.choice(limits) if draw.random() < 0.3 else int(2 ** draw.uniform(0, 13)) for _ in range(2)
        )
        if family.startswith("qwen") and max(height, width) / min(height, width) > 200:
            with pytest.raises(RequestError, match=f"{width} x {height} pixels.*200 times"):
                rules.resized(height, width)
            continue
        if family == "mistral3" and max(height, width) > 1540 * min(height, width):
            continue  # transformers would make a side of 0 pixels
        resized = rules.resized(height, width)
        assert resized == expected_size(family, height, width), (height, width)
        rows, columns = rules.grid(*resized)
        largest_rows, largest_columns = rules.grid(*rules.largest)
        assert 1 <= rows * columns <= largest_rows * largest_columns


@pytest.mark.parametrize("family", [name for name, (_, _, kind) in FAMILIES.items() if kind is not None])
def test_pixels_have_the_bits_of_transformers(family: str) -> None:
    """Oracle: the processor's own float32 pixels, for images of any shape, and a form that is resized to itself."""
    settings, _, kind = FAMILIES[family]
    assert kind is not None
    rules = rules_of(family)
    processor = kind(**settings)
    noise = np.random.default_rng(3)
    for height, width in [(64, 64), (1, 1), (200, 1), (37, 411), (333, 500), rules.resized(500, 333)]:
        image = Image.fromarray(noise.integers(0, 256, (height, width, 3), np.uint8))
        rows, columns = rules.resized(height, width)
        pixels = np.asarray(image.resize((columns, rows), rules.resample))
        own = ((pixels * (1 / 255)).astype(np.float32) - np.array(rules.mean, np.float32)) / np.array(
            rules.std, np.float32
        )
        theirs = np.asarray(processor(image)["pixel_values"])
        assert np.array_equal(in_patches(family, own.transpose(2, 0, 1)), theirs.reshape(-1)[: own.size * 2])


def in_patches(family: str, pixels: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Pixels (3, height, width) in the order of the family's processor, flat."""
    _, height, width = pixels.shape
    if family.startswith("qwen"):
        patch = FAMILIES[family][1] // 2
        blocks = pixels.reshape(3, height // patch // 2, 2, patch, width // patch // 2, 2, patch)
        return np.stack([blocks.transpose(1, 4, 2, 5, 0, 3, 6)] * 2, axis=5).reshape(-1)
    if family == "gemma4":
        patches = pixels.reshape(3, height // 16, 16, width // 16, 16).transpose(1, 3, 2, 4, 0).reshape(-1, 768)
        return np.pad(patches, ((0, 280 * 9 - len(patches)), (0, 0))).reshape(-1)[: pixels.size * 2]
    return pixels.reshape(-1)


def test_largest_is_kept_as_it_is() -> None:
    """Oracle: an image of the largest size takes the most tokens, and is not resized."""
    for family, tokens in {"qwen2_5_vl": 16384, "qwen3_5": 16384, "gemma4": 280, "mistral3": 55 * 56}.items():
        rules = rules_of(family)
        assert rules.resized(*rules.largest) == rules.largest
        assert rules.num_tokens(*rules.largest) == tokens


@pytest.mark.parametrize(("most", "side"), [(16384, 512), (16384, 128), (64, 8), (5, 3), (100, 1000), (1, 1)])
def test_kimis_padding_makes_no_more_than_the_largest(most: int, side: int) -> None:
    """Oracle: transformers' function, for shapes whose patches are cut just before they count; the default's largest
    image exists: 34 x 505 patches are scaled to 477 x 6,918 pixels."""
    limits = {"in_patch_limit": most, "patch_limit_on_one_side": side, "patch_size": 14, "merge_kernel_size": 2}
    rules = image_rules("kimi_k25", {"media_proc_cfg": {**limits, **HALF}}, cell=28)
    draw, limit = random.Random(most), math.prod(rules.grid(*rules.largest))
    shapes = [(14 * 34 + 13, 14 * 505 + 13)]
    for _ in range(2000):
        rows = draw.randint(1, 2 * side)
        shapes.append((14 * rows + 13, 14 * max(1, int(most / rows * draw.uniform(0.9, 1.5))) + 13))
    found = list[int]()
    for shape in shapes:
        assert (rules.filled(*shape), rules.resized(*shape)) == kimi_sizes()(*shape, 14, 2, most, side), shape
        found.append(rules.num_tokens(*rules.resized(*shape)))
    assert max(found) <= limit
    if (most, side) == (16384, 512):
        assert found[0] == limit == 18 * 248


def test_overrides_stand_for_the_file() -> None:
    """Oracle: sizes computed by hand."""
    settings, cell, _ = FAMILIES["qwen2_5_vl"]
    size = {"size": {"shortest_edge": 784, "longest_edge": 7840}}
    assert image_rules("qwen2_5_vl", settings, cell=cell, overrides=size).resized(280, 280) == (84, 84)
    assert image_rules("qwen2_5_vl", settings, cell=cell, overrides={"max_pixels": 7840}).resized(280, 280) == (84, 84)
    gemma = image_rules("gemma4", {}, cell=48, overrides={"max_soft_tokens": 70})
    assert gemma.num_tokens(*gemma.resized(480, 480)) == 64
    kimi = image_rules("kimi_k25", FAMILIES["kimi_k25"][0], cell=28, overrides={"max_patches": 64})
    assert kimi.resized(392, 392) == (112, 112)
    size = {"size": {"max_height": 4, "max_width": 4}}
    assert image_rules("kimi_k25", {}, cell=28, overrides=size).resized(100, 50) == (56, 28)
    with pytest.raises(ConfigError, match=r"'max_pixels'; it may have size, max_patches, for kimi_k25"):
        image_rules("kimi_k25", {}, cell=28, overrides={"max_pixels": 64})
    with pytest.raises(ConfigError, match=r"'max_pixel'.*did you mean max_pixels"):
        image_rules("qwen2_5_vl", settings, cell=cell, overrides={"max_pixel": 7840})
    with pytest.raises(ConfigError, match=r"--mm-processor-kwargs: max_pixels is -1; it must be a whole number"):
        image_rules("qwen2_5_vl", settings, cell=cell, overrides={"max_pixels": -1})


@pytest.mark.parametrize(
    ("family", "settings", "message"),
    [
        ("llama", {}, "images of llama have no rules"),
        ("gemma3", {"do_pan_and_scan": True}, "do_pan_and_scan is True; it must be False"),
        ("qwen3_5", {"do_resize": False}, "do_resize is False; it must be True"),
        ("qwen3_5", {"rescale_factor": 0.5}, "rescale_factor is 0.5"),
        ("qwen3_5", {"image_std": [1, 1, 0]}, "image_std is .* three numbers"),
        ("qwen3_5", {"size": {"shortest_edge": 1 << 40}}, "shortest_edge is 1099511627776"),
        ("qwen3_5", {"size": {"shortest_edge": 9999, "longest_edge": 1024}}, "min <= max"),
        ("gemma3", {"size": {"height": 900, "width": 896}}, "multiples of 32"),
        ("gemma4", {"max_soft_tokens": 100}, "one of"),
        ("mistral3", {"size": {"height": 10, "width": 20}}, "one length for both sides"),
        ("qwen3_5", {"resample": "bicubic"}, "resample is 'bicubic'"),
        ("kimi_k25", {"size": {"max_height": 8, "max_width": 9}}, "one number for both sides"),
        ("kimi_k25", {"patch_size": 14}, "merge_size is 2; it must be such that"),
        ("kimi_k25", {"media_proc_cfg": {"fixed_output_tokens": 64}}, "fixed_output_tokens is 64; it must be null"),
        ("kimi_k25", {"media_proc_cfg": {"in_patch_limit": 0}}, "max_patches is 0"),
        ("kimi_k25", {"media_proc_cfg": {"patch_limit_on_one_side": "x"}}, "max_height is 'x'"),
    ],
)
def test_settings_that_no_tower_takes_are_refused_by_name(family: str, settings: dict[str, Any], message: str) -> None:
    """Oracle: the message names the setting, its value and the rule."""
    with pytest.raises(ConfigError, match=message):
        image_rules(family, settings, cell=32)


def test_mistrals_tokenizer_says_the_size_where_no_processor_does(tmp_path: Path) -> None:
    """Oracle: the number in its file, under both names that mistral-common reads; a tokenizer of text says none."""
    for name in ("image", "multimodal"):
        own = {"image_patch_size": 14, "max_image_size": 1540, "spatial_merge_size": 2}
        (tmp_path / "tekken.json").write_text(json.dumps({"config": {}, name: own}))
        processor, origin = read_processor(tmp_path)
        assert origin == "tekken.json" and has_processor(tmp_path)
        assert image_rules("mistral3", processor, cell=28, origin=origin).largest == (1540, 1540)
    texts: tuple[Any, ...] = ({"config": {}}, {"image": None}, [])
    for text in texts:
        (tmp_path / "tekken.json").write_text(json.dumps(text))
        assert not has_processor(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text("{}")
    assert has_processor(tmp_path)


def test_both_files_of_a_folder_are_read(tmp_path: Path) -> None:
    """Oracle: the newer file, which has the older one's content below a key, goes first, as in transformers."""
    with pytest.raises(ConfigError, match=r"has no preprocessor_config\.json"):
        read_processor(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"min_pixels": 1}))
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_token": "[IMG]"}))
    assert read_processor(tmp_path) == ({"min_pixels": 1}, "preprocessor_config.json")
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": {"min_pixels": 2}}))
    assert read_processor(tmp_path) == ({"min_pixels": 2}, "processor_config.json")
    (tmp_path / "processor_config.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_processor(tmp_path)
