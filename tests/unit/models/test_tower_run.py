"""An image that goes through a tower some layers at a time."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.model_config.test_model_config import llama
from tests.unit.models.test_vision_tower import TOWERS, tower_of
from tp_engine.model_config import read_model
from tp_engine.models.tower_run import TowerRun
from tp_engine.models.vision_tower import VisionTower
from tp_engine.models.weight_sizes import layer_parameters
from tp_engine.worker.memory.live_bytes import LiveBytes


def drawn_tower(folder: Path, name: str, dtype: torch.dtype) -> VisionTower:
    """A tower with weights that make other rows of every layer."""
    tower = tower_of(folder, name, dtype)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in tower.parameters():
            parameter.normal_(0, 0.2)
    return tower


@contextmanager
def counted_layers(tower: VisionTower) -> Iterator[list[int]]:
    """The number of each layer that runs, in order."""
    found: list[int] = []
    parts: list[Any] = [getattr(layer, "mlp", None) or layer.feed_forward for layer in tower.stack]
    hooks = [part.register_forward_hook(lambda *_, one=number: found.append(one)) for number, part in enumerate(parts)]
    yield found
    for hook in hooks:
        hook.remove()


# Gemma 3's only size has 4,096 patches.
NAMES = [pytest.param(name, marks=pytest.mark.slow if name == "gemma3-vision" else ()) for name in TOWERS]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *(pytest.param(*one.values, torch.float32, marks=one.marks) for one in NAMES),
        ("qwen3-vl", torch.bfloat16),
        ("kimi-k2.5-vision", torch.bfloat16),
    ],
)
@torch.inference_mode()
def test_a_cut_run_has_the_bits_of_a_whole_one(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    """Oracle: one call of the tower; each layer runs once, and no more in a step than it has; two images take turns,
    and the tower is as it was."""
    tower = drawn_tower(tmp_path, name, dtype)
    side = 6 * tower.spec.cell if name != "gemma3-vision" else tower.spec.largest[0]
    first, second = (torch.randint(0, 256, (side, side, 3), dtype=torch.uint8) for _ in range(2))
    whole = [tower(first), tower(second)]
    num_layers = len(tower.stack)
    for counts in ([1] * num_layers, [num_layers], [2, num_layers - 2], [num_layers - 1, 1]):
        runs = TowerRun(tower, first), TowerRun(tower, second)
        done = 0
        for count in counts:
            with counted_layers(tower) as ran:
                rows = [run.advance(count) for run in runs]
            assert ran == [*range(done, done + count)] * 2
            done += count
            assert all((one is None) == (done < num_layers) for one in rows)
        for found, expected in zip(rows, whole, strict=True):
            assert found is not None and torch.equal(found, expected)
    assert not any("forward" in vars(module) for module in tower.modules())


@pytest.mark.parametrize("name", NAMES)
@torch.inference_mode()
def test_memory_of_an_image_between_two_steps_is_foreseen(tmp_path: Path, name: str) -> None:
    """Oracle: the bytes that live behind each step of the largest image, with its pixels; nothing behind the run."""
    tower = drawn_tower(tmp_path, name, torch.float32)
    if name != "gemma3-vision":
        tower.spec = dataclasses.replace(tower.spec, largest=(8 * tower.spec.cell, 6 * tower.spec.cell))
    pixels = torch.zeros((*tower.spec.largest, 3), dtype=torch.uint8)
    run = TowerRun(tower, pixels)
    most = 0
    with LiveBytes() as live:
        for _ in range(len(tower.stack) - 1):
            assert run.advance(1) is None
            most = max(most, live.now + pixels.nbytes)
        assert 0.5 * tower.unfinished_bytes < most <= tower.unfinished_bytes + 1024
        del run
        assert live.now == 0


def test_the_work_of_a_layer_by_hand(tmp_path: Path) -> None:
    """Oracle: the products of numbers of a layer of 96 and 384 elements, for the 4 patches of a row, and for pairs of
    these; and the weights of a decoder's layers, without its vocabulary's, on one rank and on two."""
    tower = tower_of(tmp_path, "qwen3-vl", torch.float32)
    assert tower.layer_work() == (4 * (4 * 96 * 96 + 2 * 96 * 384), 16 * 2 * 96)
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2, "vocab_size": 50}
    text = read_model(llama(hidden_size=16, intermediate_size=24, **sizes))
    of_layer = 16 * (16 + 2 * 8 + 16) + 3 * 16 * 24
    for world_size in (1, 2):
        assert 0 <= layer_parameters(text, world_size) - 2 * of_layer // world_size <= 5 * 16  # norms


@torch.inference_mode()
def test_what_fails_in_a_layer_leaves_the_tower_as_it_was(tmp_path: Path) -> None:
    """Oracle: the error, and the same rows as before it."""
    tower = drawn_tower(tmp_path, "qwen3-vl", torch.float32)
    pixels = torch.zeros((64, 64, 3), dtype=torch.uint8)
    before = tower(pixels)
    hook = tower.stack[1].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        TowerRun(tower, pixels).advance(2)
    hook.remove()
    assert torch.equal(tower(pixels), before)
