"""What a checkpoint's tensors say of its model: output head, type, and which files count."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.tiny_models import make_checkpoint
from tests.unit.model_config.test_families import PUBLISHED
from tests.unit.model_config.test_model_config import llama
from tests.unit.model_config.test_unread_keys import config_of
from tp_engine.errors import ConfigError, WeightError
from tp_engine.model_config import load_model_config, read_model
from tp_engine.model_config.checkpoint_files import CheckpointHeaders, weight_files
from tp_engine.models.weight_sizes import local_weight_bytes
from tp_engine.weights.checkpoint import Checkpoint

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def store(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor], file: str = "model") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / f"{file}.safetensors")
    return folder


def is_tied(folder: Path) -> bool:
    return load_model_config(str(folder))[0].is_tied


SMALL = {"vocab_size": 8, "hidden_size": 4, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 2}
ROWS = torch.arange(32.0).view(8, 4)


@pytest.mark.parametrize(
    ("changed", "tied"),
    [
        ({HEAD: ROWS.clone()}, True),
        ({}, True),
        ({HEAD: ROWS + torch.eye(8, 4)}, False),
        ({HEAD: ROWS.clone().index_fill(0, torch.tensor(7), 1.0)}, False),
        ({HEAD: ROWS.bfloat16()}, False),
        ({HEAD: ROWS[:7].clone()}, False),
        ({"lm_head.weight_packed": torch.zeros(8, 2, dtype=torch.uint8)}, False),
        ({HEAD: ROWS.clone(), "lm_head.weight_scale": torch.ones(1)}, False),
    ],
    ids=["copy", "absent", "first row", "last row", "type", "shape", "packed", "scaled"],
)
def test_a_stored_head_is_used_whatever_config_json_says(changed: Any, tied: bool, tmp_path: Path) -> None:
    """Oracle: transformers' rule: both tensors are there and differ -> they are not tied."""
    folder = store(tmp_path, llama(tie_word_embeddings=True, **SMALL), {EMBEDDING: ROWS} | changed)
    assert is_tied(folder) is tied
    spec = load_model_config(str(folder))[0]
    assert any("output head" in note for note in spec.notes) is not tied
    by_config = read_model(llama(tie_word_embeddings=True, **SMALL))
    more = local_weight_bytes(spec, 2, dtype="float32") - local_weight_bytes(by_config, 2, dtype="float32")
    assert more == (0 if tied else 16 * 4 * 4)  # padded to 16 rows on each of 2 ranks


@pytest.mark.parametrize("outer", [None, False, True])
@pytest.mark.parametrize("inner", [None, False, True])
@pytest.mark.parametrize("family", ["qwen2-vl", "qwen2.5-vl", "qwen3-vl", "gemma3-vision", "mistral3-vision"])
@pytest.mark.parametrize("stored", ["none", "copy", "own"])
def test_wrappers_tie_as_in_transformers(
    family: str, outer: bool | None, inner: bool | None, stored: str, tmp_path: Path
) -> None:
    """Oracle: transformers' own class of the same config.json, and its rule for stored heads.

    Without a stored head transformers leaves an untied one random; here such a start is refused, unless the text part
    ties, as transformers 4 read it.
    """
    import transformers

    config = json.loads(json.dumps(config_of(family)))
    config.pop("tie_word_embeddings"), config["text_config"].pop("tie_word_embeddings", None)
    if outer is not None:
        config["tie_word_embeddings"] = outer
    if inner is not None:
        config["text_config"]["tie_word_embeddings"] = inner
    ties = bool(transformers.AutoConfig.for_model(**config).tie_word_embeddings)
    prefix = "language_model." if family in ("gemma3-vision", "mistral3-vision") else ""
    tensors = {f"{prefix}{EMBEDDING}": ROWS}
    if stored != "none":
        tensors[f"{prefix}{HEAD}"] = ROWS.clone() if stored == "copy" else ROWS + 1
    found = is_tied(store(tmp_path, config, tensors))
    if stored == "own" or (stored == "copy" and not (ties or inner)):
        assert not found
    else:
        assert found is (ties or bool(inner))


def test_wrappers_without_tensors_assume_what_released_files_have(tmp_path: Path) -> None:
    """Oracle: Mistral Small 3.1 says nothing and has a head, so its weights are counted with one; Qwen2.5-VL-3B says
    false for the whole and true for its text part, and has none."""
    assert not read_model(PUBLISHED["Mistral-Small-3.1"]).is_tied
    config = {**config_of("qwen2.5-vl"), "tie_word_embeddings": False}
    assert read_model({**config, "text_config": {**config["text_config"], "tie_word_embeddings": True}}).is_tied


def test_a_fine_tuned_mistral_3_that_transformers_saved(tmp_path: Path) -> None:
    """Oracle: the file that transformers writes: ``tie_word_embeddings`` true beside two different tensors."""
    folder = make_checkpoint(tmp_path / "saved", "mistral3-vision", tie=True)
    (path,) = folder.glob("*.safetensors")
    tensors = load_file(path)
    (embedding,) = (name for name in tensors if name.endswith("embed_tokens.weight"))
    head = embedding.replace("model.embed_tokens", "lm_head").replace("model.language_model.embed_tokens", "lm_head")
    assert is_tied(folder)
    save_file(tensors | {head: tensors[embedding] * 2}, path, {"format": "pt"})
    assert not is_tied(folder)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("key", [None, "torch_dtype", "dtype"])
def test_without_a_dtype_the_tensors_decide(dtype: str, key: str | None, tmp_path: Path) -> None:
    """Oracle: transformers with dtype="auto"."""
    from transformers import AutoModelForCausalLM

    folder = make_checkpoint(tmp_path, "qwen3", dtype=dtype, vocab_size=16)
    config = json.loads((folder / "config.json").read_text())
    config.pop("dtype")
    if key is not None:
        config[key] = "float32"
    (folder / "config.json").write_text(json.dumps(config))
    spec = load_model_config(str(folder))[0]
    assert spec.dtype == str(AutoModelForCausalLM.from_pretrained(folder, dtype="auto").dtype).removeprefix("torch.")
    assert any("names no dtype" in note for note in spec.notes) is (key is None)


def test_codes_and_missing_tensors_say_no_type(tmp_path: Path) -> None:
    """Oracle: the first floating tensor that a model may be of; without one the type of nearly all releases."""
    codes = {"a": torch.zeros(2, dtype=torch.uint8), "b": torch.zeros(2).to(torch.float8_e4m3fn)}
    folder = store(tmp_path / "codes", llama(), codes | {"c": torch.zeros(2, dtype=torch.float16)})
    assert load_model_config(str(folder))[0].dtype == "float16"
    for tensors in (codes, None):
        folder = store(tmp_path / "other", llama(), tensors or codes)
        if tensors is None:
            (folder / "model.safetensors").unlink()
        spec = load_model_config(str(folder))[0]
        assert spec.dtype == "bfloat16" and "by assumption" in spec.notes[0]


def test_copies_of_the_weights_do_not_count(tmp_path: Path) -> None:
    """Oracle: transformers: the index, else model.safetensors alone."""
    whole, other = {EMBEDDING: ROWS}, {"tok_embeddings.weight": ROWS}
    folder = store(tmp_path, llama(), whole)
    for name in ("consolidated", "adapter_model", "copy", "consolidated.00", "model.fp16"):
        store(folder, llama(), other, name)
    assert [path.name for path in weight_files(folder)] == ["model.safetensors"]
    assert CheckpointHeaders(folder).names == whole.keys()
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    names = {path.name for path in weight_files(folder)}
    assert names == {"model-00001-of-00001.safetensors", "copy.safetensors", "model.fp16.safetensors"}
    index = {"weight_map": {EMBEDDING: "model-00001-of-00001.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert [path.name for path in weight_files(folder)] == ["model-00001-of-00001.safetensors"]
    assert CheckpointHeaders(folder).names == whole.keys()


def test_a_folder_of_others_weights_alone_is_named(tmp_path: Path) -> None:
    """Oracle: the message names the file that is there."""
    store(tmp_path, llama(), {EMBEDDING: ROWS}, "consolidated")
    with pytest.raises(ConfigError, match=r"holds no \*\.safetensors of a whole model.*consolidated\.safetensors"):
        weight_files(tmp_path)


@pytest.mark.parametrize("file", ["/etc/hostname", "../other/model.safetensors", 3, None, ["a"]])
def test_an_index_stays_in_its_folder(file: Any, tmp_path: Path) -> None:
    """Oracle: the error names the index; nothing outside of the folder is opened."""
    store(tmp_path, llama(), {EMBEDDING: ROWS}, "other")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {EMBEDDING: file}}))
    with pytest.raises(WeightError, match="is not an index"):
        weight_files(tmp_path)
    assert not CheckpointHeaders(tmp_path).names


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff" * 8,
        (1 << 40).to_bytes(8, "little") + b"{}",
        b"\x02\0\0\0\0\0\0\0[]",
        b"\x02\0\0\0\0\0\0\0{x",
        (200_000).to_bytes(8, "little") + b"[" * 200_000,
        (40).to_bytes(8, "little") + b'{"a":{"dtype":"F32","shape":[1]}}       ',
        (70).to_bytes(8, "little")
        + json.dumps({"a": {"dtype": "F32", "shape": [1], "data_offsets": "xy"}}).encode().ljust(70),
    ],
    ids=range(8),
)
def test_broken_files_have_no_headers(content: bytes, tmp_path: Path) -> None:
    """Oracle: no error here, and quickly; the loader refuses the file."""
    folder = store(tmp_path, llama(tie_word_embeddings=True, **SMALL), {})
    (folder / "model.safetensors").write_bytes(content)
    assert not CheckpointHeaders(folder).names and is_tied(folder)


def test_pipes_are_not_opened(tmp_path: Path) -> None:
    """Oracle: opening a named pipe would wait for ever; the loader refuses it."""
    folder = store(tmp_path, llama(), {})
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "model.safetensors")
    assert not CheckpointHeaders(folder).names
    with pytest.raises(WeightError, match="a FIFO"), Checkpoint(folder):
        pass


def test_truncated_tensors_compare_without_an_error(tmp_path: Path) -> None:
    """Oracle: the loader refuses the file."""
    folder = store(tmp_path, llama(tie_word_embeddings=True, **SMALL), {EMBEDDING: ROWS, HEAD: ROWS + 1})
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-70])
    load_model_config(str(folder))
    shutil.rmtree(folder)
