"""Files of a checkpoint that are no files, or say what no model says: refused at once, by name."""

from __future__ import annotations

import copy
import json
import os
import random
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.families import FAMILIES
from tests.tiny_models import make_config
from tp_engine.api.openai.chat.options import ChatOptions
from tp_engine.api.sampling_defaults import load_generation_defaults
from tp_engine.apps.batch.config import BatchConfig
from tp_engine.engine.tokenizer import load_tokenizer
from tp_engine.errors import ConfigError, WeightError
from tp_engine.model_config import load_model_config, read_model
from tp_engine.model_config.checkpoint_files import CheckpointHeaders
from tp_engine.model_config.patterns import compile_pattern
from tp_engine.options import load_tables
from tp_engine.server.config import ServerConfig
from tp_engine.system.files import MAX_JSON_BYTES, read_json
from tp_engine.weights.checkpoint import Checkpoint
from tp_engine.weights.fingerprint import checkpoint_fingerprint
from tp_engine.weights.lora import read_adapter

MAX_CPU_S = 1.0


def fifo(path: Path) -> None:
    os.mkfifo(path)


def unix_socket(path: Path) -> None:
    # Bound from its folder: the path of a socket has at most 107 characters.
    here = os.getcwd()
    os.chdir(path.parent)
    try:
        socket.socket(socket.AF_UNIX).bind(path.name)
    finally:
        os.chdir(here)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)  # without blocks on the disk


KINDS = {"a FIFO": fifo, "a socket": unix_socket, "a device": device, "bytes, more than": huge}


def config_of(family: str) -> dict[str, Any]:
    """The config.json of a tiny model."""
    values: dict[str, Any] = make_config(family).to_dict()
    return values | {"architectures": [FAMILIES[family].model]}


def model(folder: Path) -> Path:
    """A model's folder without weights."""
    (folder / "config.json").write_text(json.dumps(config_of("qwen3")))
    return folder


def adapter(folder: Path) -> Path:
    """An adapter's folder without weights."""
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def open_checkpoint(folder: Path) -> None:
    with Checkpoint(folder):
        pass


# Some readers see no file at all.
ABSENT = ("there is no such file", "a folder with a", "a folder without", "holds no *.safetensors")
# What is read -> the files of the folder that may be something else.
READERS: dict[str, tuple[Callable[[Path], Any], tuple[str, ...]]] = {
    "model": (
        lambda folder: load_model_config(str(model(folder))),
        ("generation_config.json", "hf_quant_config.json", "tokenizer.json", "chat_template.jinja", "vocab.txt"),
    ),
    "config": (lambda folder: load_model_config(str(folder)), ("config.json",)),
    "tokenizer": (
        lambda folder: load_tokenizer(str(model(folder))),
        ("tokenizer.json", "tokenizer_config.json", "tokenizer.model"),
    ),
    "weights": (open_checkpoint, ("model.safetensors", "model.safetensors.index.json")),
    "adapter": (
        lambda folder: read_adapter(adapter(folder), 8, max_bytes=1 << 20),
        ("adapter_model.safetensors",),
    ),
    "adapter_config": (lambda folder: read_adapter(folder, 8), ("adapter_config.json",)),
    "sampling": (lambda folder: load_generation_defaults("x", source=str(folder)), ("generation_config.json",)),
    "template": (lambda folder: ChatOptions(chat_template=str(folder / "t.jinja")).template_text, ("t.jinja",)),
    "options": (lambda folder: load_tables(str(folder / "c.toml"), {"server": ServerConfig}), ("c.toml",)),
}


@pytest.mark.parametrize("words", KINDS)
@pytest.mark.parametrize("reader", READERS)
def test_what_is_no_file_is_refused_by_name(reader: str, words: str, tmp_path: Path) -> None:
    """Oracle: a ``ConfigError`` or ``WeightError`` that says what it is; nothing waits, and no memory is taken."""
    read, names = READERS[reader]
    for number, name in enumerate(names):
        folder = tmp_path / str(number)
        folder.mkdir()
        KINDS[words](folder / name)
        with pytest.raises((ConfigError, WeightError)) as caught:
            read(folder)
        if (folder / name).is_file() and name.endswith(".safetensors") and reader == "weights":
            continue  # of any size; the library reads its header
        assert words in str(caught.value) or any(one in str(caught.value) for one in ABSENT), str(caught.value)


def test_weights_that_are_no_files_have_no_names(tmp_path: Path) -> None:
    """Oracle: no names from a FIFO, nor from a header of 2^63 bytes; a fingerprint of a device is an error."""
    fifo(tmp_path / "a.safetensors")
    assert not CheckpointHeaders(tmp_path).names
    with pytest.raises(OSError, match="a FIFO"):
        checkpoint_fingerprint(tmp_path)
    (tmp_path / "a.safetensors").unlink()
    (tmp_path / "a.safetensors").write_bytes((2**63).to_bytes(8, "little") + b"{}")
    assert not CheckpointHeaders(tmp_path).names


def test_a_batch_reads_pipes_and_no_devices(tmp_path: Path) -> None:
    """Oracle: a user's own pipe is input; a device never ends."""
    fifo(tmp_path / "pipe")
    unix_socket(tmp_path / "socket")
    BatchConfig(input_file=str(tmp_path / "pipe"), output_file=str(tmp_path / "out"))
    for name in ("/dev/zero", str(tmp_path / "socket")):
        with pytest.raises(ConfigError, match="a device or a socket"):
            BatchConfig(input_file=name, output_file=str(tmp_path / "out"))


def test_an_adapter_larger_than_its_slots_is_not_read(tmp_path: Path) -> None:
    """Oracle: the limit that the caller gives."""
    save_file(
        {"base_model.model.x.lora_A.weight": torch.zeros(4, 1000)}, adapter(tmp_path) / "adapter_model.safetensors"
    )
    with pytest.raises(ConfigError, match="more than 10,000"):
        read_adapter(tmp_path, 8, max_bytes=10_000)


def test_json_is_bounded(tmp_path: Path) -> None:
    """Oracle: depth and size are errors of the content."""
    path = tmp_path / "x.json"
    path.write_text("[" * 100_000)
    with pytest.raises(ValueError, match="too deeply"):
        read_json(path)
    path.write_text(" " * MAX_JSON_BYTES + "0")
    with pytest.raises(OSError, match="more than"):
        read_json(path)
    path.write_bytes(b"\xff")
    with pytest.raises(ValueError, match="utf-8"):
        read_json(path)


@pytest.mark.parametrize(
    ("pattern", "is_fine"),
    [
        (r".*mlp\.(gate|up|gate_up|down)_proj.*", True),
        (r"model\.layers\.(\d+)\..*self_attn.*", True),
        (r"^(?!.*\.experts\.).*$", True),
        (r"[*+{(]{2}x", True),
        (r"(a+)+b", False),
        (r"(a|a)*b", False),
        (r"(a){5}", False),
        (".*.*.*.*.*.*b", False),
        ("a?" * 40 + "a" * 40, False),
        ("(a|a)" * 40 + "b", False),
        ("x" * 5000, False),
        ("re(", False),
    ],
)
def test_patterns_match_in_bounded_time(pattern: str, is_fine: bool) -> None:
    """Oracle: by hand: expressions of real checkpoints, and those that take for ever."""
    if is_fine:
        assert compile_pattern(pattern, "x").pattern == pattern
        compile_pattern(pattern, "x").match("model.layers.1.mlp.experts." * 4)
    else:
        with pytest.raises(ConfigError, match=r"pattern|expression"):
            compile_pattern(pattern, "x")


NUM_MUTATIONS = 2000
STRANGE: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 3, 64, 2**31, 2**63, 10**400, 1e308, 0.5, -0.5, float("nan"), float("inf"), "", "x",
    "yarn", "re:(", [], [[]], [None], [0], [1, 2], ["a"], {}, {"x": 1}, {"x": {}}, [{"a": 1}], [float("nan")],
    {"0": []}, [2**31] * 3, ["sliding_attention"] * 3,
)  # fmt: skip


def places(value: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The keys and indices that lead to each value within ``value``."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in inner:
        yield (*above, key)
        yield from places(one, (*above, key))


def mutated(values: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """``values`` with one to three strange or missing values, at any depth."""
    values = copy.deepcopy(values)
    for _ in range(rng.choice((1, 1, 2, 3))):
        *above, last = rng.choice(list(places(values)))
        inside: Any = values
        for key in above:
            inside = inside[key]
        if rng.random() < 0.15:
            del inside[last]
        else:
            inside[last] = copy.deepcopy(rng.choice(STRANGE))
        if not values:
            break
    return values


def test_strange_configurations_are_configuration_errors() -> None:
    """Oracle: a model, or ``ConfigError``: no other error, within a second of the processor each, of every family."""
    rng, originals = random.Random(5), [config_of(name) for name in FAMILIES]
    for values in originals:
        read_model(values)
    for number in range(NUM_MUTATIONS):
        values = mutated(originals[number % len(originals)], rng)
        began_s = time.process_time()
        try:
            read_model(values)
        except ConfigError as error:
            assert len(str(error)) < 20_000
        except Exception as error:
            raise AssertionError(f"{type(error).__name__}: {error}, for {values}") from error
        assert time.process_time() - began_s < MAX_CPU_S, values


@pytest.mark.parametrize("text", ["0", "null", "[1]", '"x"', "", "{", '{"architectures": [[]]}', "{}", "NaN"])
def test_a_config_that_is_no_object_is_refused(text: str, tmp_path: Path) -> None:
    """Oracle: ``ConfigError``."""
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.json"):
        load_model_config(str(tmp_path))
