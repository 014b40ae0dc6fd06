"""Kimi K2.5's tower from the hub's names.

Oracle: transformers, which reads the same tensors by rules of its own.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Kimi_K25ForConditionalGeneration

from tests.image_models import KimiProcessor, make_image_model, write_hub_form_of_kimi
from tp_engine.errors import ConfigError
from tp_engine.job.topology import RankInfo
from tp_engine.model_config import load_model_config, read_model
from tp_engine.models.vision_tower import VisionTower, build_tower
from tp_engine.weights.loader import load_weights


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model with transformers' names, and in the hub's form."""
    ours = make_image_model(tmp_path_factory.mktemp("kimi"), "kimi-k2.5-vision")
    return ours, write_hub_form_of_kimi(ours, ours / "hub")


def loaded(folder: Path, work: Path) -> VisionTower:
    """The tower of a checkpoint, of which the vision part alone is read."""
    spec = load_model_config(str(folder))[0]
    assert spec.vision is not None
    tower = build_tower(spec.vision, dtype=torch.float32, device=torch.device("cpu"))
    tensors = load_file(folder / "model.safetensors")
    work.mkdir()
    seen = {name: one for name, one in tensors.items() if "vision" in name or "mm_projector" in name}
    save_file(seen, work / "model.safetensors")
    load_weights(dict(tower.named_parameters()), spec, work, info=RankInfo())
    return tower


def test_both_forms_are_read(folders: tuple[Path, Path], tmp_path: Path) -> None:
    """Oracle: the image features of transformers' model of the hub's tensors, within 1e-5; both forms give the same
    bits, and so does an image beside others."""
    towers = [loaded(folder, tmp_path / str(number)) for number, folder in enumerate(folders)]
    copy = tmp_path / "copy"
    copy.mkdir()
    (copy / "config.json").write_text((folders[0] / "config.json").read_text())  # transformers takes no vt_hidden_size
    (copy / "model.safetensors").symlink_to(folders[1] / "model.safetensors")
    oracle: Any = Kimi_K25ForConditionalGeneration.from_pretrained(copy, dtype=torch.float32).eval()
    draw = np.random.default_rng(1)
    images = [draw.integers(0, 256, (*size, 3), dtype=np.uint8) for size in ((28, 28), (84, 140), (168, 56))]
    with torch.inference_mode():
        expected = oracle.model.get_image_features(**KimiProcessor()(images)).pooler_output
        for image, rows in zip(images, expected, strict=True):
            ours, hubs = (tower(torch.from_numpy(image)) for tower in towers)
            torch.testing.assert_close(ours, rows, atol=1e-5, rtol=1e-5)
            assert torch.equal(ours, hubs)


def test_the_hubs_keys_are_those_of_transformers(folders: tuple[Path, Path]) -> None:
    """Oracle: the specification of the model with transformers' keys."""
    first, second = (load_model_config(str(folder))[0].vision for folder in folders)
    assert first is not None and second is not None
    assert dataclasses.replace(second, config=first.config) == first
    common = {name: value for name, value in first.config.items() if name in second.config and name != "model_type"}
    assert common.items() <= second.config.items() and len(common) >= 8
    assert second.whole["projection_hidden_size"] == 32


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"merge_type": "sd2"}, "vision_config: merge_type is 'sd2'"),
        ({"mm_projector_type": "patchmergerv2"}, "mm_projector_type is 'patchmergerv2'"),
        ({"merge_kernel_size": [2, 1]}, r"merge_kernel_size is \[2, 1\]; both must be equal"),
        ({"vt_hidden_size": "wide"}, "vt_hidden_size is 'wide'; it must be a whole number from 1 to 65,536"),
    ],
)
def test_other_towers_are_refused(folders: tuple[Path, Path], changes: dict[str, Any], message: str) -> None:
    """Oracle: the message names the key, its value and the rule."""
    config = json.loads((folders[1] / "config.json").read_text())
    with pytest.raises(ConfigError, match=message):
        read_model({**config, "vision_config": {**config["vision_config"], **changes}})


def test_a_table_of_places_must_be_square(folders: tuple[Path, Path]) -> None:
    """Oracle: transformers' class reads one side alone; the error names the remedy."""
    vision = load_model_config(str(folders[1]))[0].vision
    assert vision is not None
    wrong = dataclasses.replace(vision, config={**vision.config, "pos_emb_width": 4})
    with pytest.raises(ConfigError, match=r"pos_emb_height must be pos_emb_width.*limit-mm-per-prompt"):
        build_tower(wrong, dtype=torch.float32, device=torch.device("meta"))
