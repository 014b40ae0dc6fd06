"""``hf_overrides``: keys of config.json that the user changes or removes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.unit.model_config.test_families import PUBLISHED
from tests.unit.model_config.test_model_config import LLAMA3_ROPE, llama
from tp_engine.config import EngineConfig
from tp_engine.errors import ConfigError
from tp_engine.model_config import load_model_config
from tp_engine.model_config.spec import ModelSpec
from tp_engine.options.hf_overrides import overridden

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


def load(tmp_path: Path, config: dict[str, Any], changes: dict[str, Any] | None = None) -> ModelSpec:
    (tmp_path / "config.json").write_text(json.dumps(config))
    return load_model_config(str(tmp_path), hf_overrides=changes)[0]


def test_keys_are_changed_added_and_removed(tmp_path: Path) -> None:
    """Oracle: the same file, edited by hand."""
    file = llama(use_foo=1, rope_scaling=LLAMA3_ROPE)
    changes = {"use_foo": None, "eos_token_id": [7, 8], "rope_scaling": {"factor": 16.0}, "sliding_window": None}
    edited = llama(eos_token_id=[7, 8], rope_scaling={**LLAMA3_ROPE, "factor": 16.0})
    assert load(tmp_path, file, changes) == load(tmp_path, edited)
    wrapped = PUBLISHED["gemma-3-4b"]
    found = load(tmp_path, wrapped, {"text_config": {"sliding_window": 512, "vocab_size": 262144}})
    assert found.attentions[0].window == 512 and found.vocab_size == 262144 and found.hidden_size == 2560


@pytest.mark.parametrize("spelling", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("kind", ["type", "rope_type"])
@pytest.mark.parametrize(
    "file",
    [
        {"rope_theta": 5e6},
        {"rope_theta": 5e6, "rope_scaling": None},
        {"rope_theta": 5e6, "rope_scaling": {"type": "default"}},
        {"rope_parameters": {"rope_theta": 5e6, "rope_type": "default"}},
    ],
)
def test_yarn_keeps_the_base_in_every_spelling(tmp_path: Path, file: dict[str, Any], spelling: str, kind: str) -> None:
    """Oracle: the base of the file; positions are the factor times the original ones, as in vLLM."""
    config = {**llama(max_position_embeddings=40960), **file}
    if "rope_parameters" in file:
        del config["rope_theta"]
    yarn = {kind: "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    spec = load(tmp_path, config, {spelling: yarn})
    (rope,) = spec.ropes
    assert (rope.kind, rope.theta, rope.factor, rope.original_max_position) == ("yarn", 5e6, 4.0, 32768)
    assert spec.max_position == 131072 and "yarn" in spec.max_position_key


def test_a_base_beside_the_rotation_takes_effect(tmp_path: Path) -> None:
    """Oracle: the base that the user gave, wherever the file keeps its own."""
    new = {**llama(rope_parameters={"rope_theta": 5e5, "rope_type": "default"}), "rope_theta": None}
    for file in (llama(rope_theta=5e5), new):
        assert load(tmp_path, file, {"rope_theta": 1e6}).ropes[0].theta == 1e6


def test_the_type_has_two_spellings(tmp_path: Path) -> None:
    """Oracle: the type that the user gave."""
    for given in ("dtype", "torch_dtype"):
        for own in ("dtype", "torch_dtype"):
            assert load(tmp_path, llama(**{own: "bfloat16"}), {given: "float16"}).dtype == "float16"


@pytest.mark.parametrize(
    ("config", "changes", "named"),
    [
        (llama(), {"use_foo": 3}, "use_foo=3"),
        (llama(), {"hidden_size": "wide"}, "hidden_size is 'wide'"),
        (llama(rope_parameters={"rope_theta": 1e6}), {"rope_scaling": None}, "rope_parameters, which holds rope_theta"),
        (PUBLISHED["gemma-3-4b"], {"rope_scaling": YARN}, "rope_scaling="),
        (PUBLISHED["gemma-4-26B-A4B-text"], {"rope_scaling": YARN}, "rope_scaling"),
        (PUBLISHED["gemma-3-1b"], {"rope_parameters": YARN}, "rope_type=.yarn"),
    ],
)
def test_an_override_without_an_effect_is_refused(
    tmp_path: Path, config: dict[str, Any], changes: dict[str, Any], named: str
) -> None:
    """Oracle: the keys of a model's parts, and of layers of a kind, must be given where they stand."""
    with pytest.raises(ConfigError, match=named):
        load(tmp_path, config, changes)


@pytest.mark.parametrize("text", ["{", "[1]", "3", '"a"', "[" * 100_000])
def test_the_option_must_be_an_object(text: str) -> None:
    """Oracle: refused with the configuration, before a file is opened."""
    with pytest.raises(ConfigError, match="hf_overrides"):
        EngineConfig(**dict[str, Any](hf_overrides=text))


def test_the_file_is_not_changed() -> None:
    """Oracle: the arguments before the call."""
    values, changes = {"a": {"b": 1}}, {"a": {"c": 2}}
    assert overridden(values, changes) == {"a": {"b": 1, "c": 2}}
    assert (values, changes) == ({"a": {"b": 1}}, {"a": {"c": 2}})


def test_every_refusal_names_the_option(tmp_path: Path) -> None:
    """Oracle: the option's name, once, whatever is wrong."""
    for wrong in ({"use_foo": 1}, {"hidden_act": "gelu"}, {"num_attention_heads": "8"}, {"architectures": ["X"]}):
        with pytest.raises(ConfigError) as caught:
            load(tmp_path, llama(**wrong))
        assert str(caught.value).count("--hf-overrides") == 1
