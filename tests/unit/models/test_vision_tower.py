"""What a tower needs of memory, and its pixels."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.image_models import image_config
from tp_engine.model_config import load_model_config
from tp_engine.model_config.vision import VisionSpec
from tp_engine.models.made_in import MadeIn
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


def contents(tower: VisionTower) -> dict[str, Any]:
    """The types of parameters, whose values are not set, and the values of buffers."""
    types = {name: (one.dtype, one.device) for name, one in tower.named_parameters()}
    return types | {name: (one.dtype, one.tolist()) for name, one in tower.named_buffers()}


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", TOWERS)
def test_the_default_type_of_torch_is_neither_read_nor_changed(
    name: str, dtype: torch.dtype, default: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the same tower under float32, and its buffers; a setter that refuses to be called meanwhile.  The default
    is that of all threads: others of a program under torchrun would compute in it."""

    def refuse(given: object) -> None:
        raise AssertionError(f"the default type was set to {given}")

    expected = contents(tower_of(tmp_path, name, dtype))
    assert all(found[0] is dtype for key, found in expected.items() if isinstance(found[1], torch.device)), name
    torch.set_default_dtype(default)
    try:
        with monkeypatch.context() as patched:
            patched.setattr(torch, "set_default_dtype", refuse)
            assert contents(tower_of(tmp_path, name, dtype)) == expected
    finally:
        torch.set_default_dtype(torch.float32)


def test_made_in_is_the_default_type_of_one_thread() -> None:
    """Oracle: torch under that default, bit by bit; a type that is named, or a tensor's, stays."""

    def made() -> list[torch.Tensor]:
        steps, half = torch.arange(0, 7), torch.ones(2, dtype=torch.float16)
        named = [
            torch.ones(2, dtype=torch.float32),
            steps.float(),
            steps.to(torch.float64),
            half / 3,
            steps,
            steps // 2,
        ]
        own = [
            torch.empty(0),
            torch.tensor([0.1]),
            torch.linspace(0, 1, 5),
            torch.full((2,), 0.1),
            torch.arange(0, 1, 0.3),
        ]
        return [*named, *own, steps / 3, 1.0 / (10000 ** (steps / 7)), steps.float() / 3, torch.from_numpy(np.ones(2))]

    for default, dtype in ((torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)):
        torch.set_default_dtype(dtype)
        try:
            expected = made()
            torch.set_default_dtype(default)
            with MadeIn(dtype):
                found = made()
        finally:
            torch.set_default_dtype(torch.float32)
        for one, other in zip(found, expected, strict=True):
            assert one.dtype is other.dtype and torch.equal(one, other)


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
