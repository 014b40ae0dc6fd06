"""What a tower needs of memory, and its pixels."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.image_models import image_config
from tp_engine.model_config import load_model_config
from tp_engine.model_config.vision import VisionSpec
from tp_engine.models.vision_tower import VisionTower, build_tower, normalised
from tp_engine.worker.memory.live_bytes import LiveBytes, largest_image_bytes

CPU = torch.device("cpu")
WIDE: dict[str, Any] = {"hidden_size": 96, "intermediate_size": 384}
LAYERS: dict[str, Any] = {**WIDE, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 4}
# By family: the vision part, other options, the rows and columns of its largest image.
TOWERS: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[int, int]]] = {
    "qwen2.5-vl": ({**WIDE, "num_heads": 4, "out_hidden_size": 128}, {}, (30, 34)),
    "qwen3-vl": ({**WIDE, "num_heads": 4, "out_hidden_size": 384, "deepstack_visual_indexes": [1, 2, 3]}, {}, (30, 34)),
    "qwen3.5-vision": ({**WIDE, "num_heads": 4, "out_hidden_size": 384}, {}, (30, 34)),
    "mistral3-vision": ({**LAYERS, "head_dim": 24, "image_size": 1540}, {}, (30, 34)),
    "gemma3-vision": ({**LAYERS, "image_size": 896}, {"mm_tokens_per_image": 256}, (16, 16)),
    "gemma4-vision": ({**LAYERS, "head_dim": 24}, {}, (20, 35)),
    "kimi-k2.5-vision": (LAYERS, {"projection_hidden_size": 96}, (30, 34)),
}


def tower_of(folder: Path, name: str, dtype: torch.dtype) -> VisionTower:
    """A tower of 3 or 4 layers, with weights of zero."""
    vision, whole, (rows, columns) = TOWERS[name]
    image_config(name, whole, vision, hidden_size=vision.get("out_hidden_size", 64)).save_pretrained(folder)
    spec = load_model_config(str(folder))[0].vision
    assert spec is not None
    tower = build_tower(
        dataclasses.replace(spec, largest=(rows * spec.cell, columns * spec.cell)), dtype=dtype, device=CPU
    )
    with torch.no_grad():
        for parameter in tower.parameters():
            parameter.zero_()
    return tower


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name == "qwen2.5-vl" else ()) for name in TOWERS]
)
@torch.inference_mode()
def test_memory_of_the_largest_image_is_foreseen(tmp_path: Path, name: str) -> None:
    """Oracle: the bytes that live at once while all layers encode the largest image: never more, and at most 3 % less
    than a smaller image and fewer layers foretell; the tower is whole again afterwards."""
    tower = tower_of(tmp_path, name, torch.float32)
    foreseen = largest_image_bytes(tower)
    height, width = tower.spec.largest
    with LiveBytes() as live:
        rows = tower(torch.zeros((height, width, 3), dtype=torch.uint8))
    assert rows.shape == (tower.spec.most_rows, tower.width)
    assert live.peak <= foreseen <= 1.03 * live.peak
    del rows
    assert live.now == 0


def test_live_bytes_are_those_of_tensors_by_hand() -> None:
    """Oracle: by hand: views and results in place are no new memory, and what nobody holds is free."""
    given = torch.zeros(100, dtype=torch.float32)
    with LiveBytes() as live:
        one = given + 1
        one.mul_(2)
        two = torch.cat((one.view(10, 10)[:5], one.view(10, 10)))
        assert (live.now, live.peak) == (1000, 1000)
        del one
        assert two.split(5)[0].numel() == 50
        assert (live.now, live.peak) == (600, 1000)
        del two
    assert (live.now, live.peak) == (0, 1000)


def test_normalised_pixels_are_those_of_the_formula() -> None:
    """Oracle: transformers' order of operations: float64 / 255, then float32; all levels of all colours, equal bits."""
    mean, std = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
    spec = VisionSpec(family="qwen2_5_vl", image_token_id=1, hidden_size=8, patch=14, merge=2, mean=mean, std=std)
    pixels = torch.stack([torch.arange(256, dtype=torch.uint8).roll(shift).view(8, 32) for shift in (0, 5, 99)], 2)
    scaled = (pixels.double() * (1 / 255)).float()
    expected = ((scaled - torch.tensor(mean)) / torch.tensor(std)).permute(2, 0, 1)
    assert torch.equal(normalised(pixels, spec), expected)
