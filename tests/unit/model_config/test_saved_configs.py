"""config.json as versions of transformers save it: keys of the text part twice, null, no architectures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.families import FAMILIES
from tests.tiny_models import make_config
from tests.unit.model_config.test_families import PUBLISHED
from tests.unit.model_config.test_model_config import llama
from tp_engine.errors import ConfigError
from tp_engine.model_config import load_model_config, read_model

WRAPPED = [name for name, family in FAMILIES.items() if family.vision is not None]


def tiny(family: str) -> dict[str, Any]:
    """config.json of a tiny model of the family, with all keys that transformers knows."""
    config = make_config(family)
    written = json.loads(config.to_json_string(use_diff=False))
    return {**written, "architectures": [FAMILIES[family].hub_name or FAMILIES[family].model]}


@pytest.mark.parametrize("family", WRAPPED)
def test_keys_of_the_text_part_beside_it_count_for_nothing(family: str) -> None:
    """Oracle: transformers' own reading, which is that of the inner object: with equal keys and with other ones outside
    (4.52 to 4.57 saved both), and with those of the vision part."""
    import transformers

    config = tiny(family)
    inner, expected = config["text_config"], read_model(config)
    kind = getattr(transformers, FAMILIES[family].config)
    theirs = kind.from_dict(config).get_text_config().to_dict()
    others = {**inner, "sliding_window": 3, "intermediate_size": 19, "hidden_act": "relu"}
    for outside in (inner, {name: value for name, value in others.items() if name in inner}):
        both = {**outside, **config}
        assert read_model(both) == expected
        assert kind.from_dict(json.loads(json.dumps(both))).get_text_config().to_dict() == theirs
    with pytest.raises(ConfigError, match="use_foo=1"):
        read_model({**inner, **config, "use_foo": 1})
    vision = {**config["vision_config"], "use_foo": 1}
    assert read_model({**vision, **inner, **config, "vision_config": vision}) == read_model(
        {**config, "vision_config": vision}
    )
    with pytest.raises(ConfigError, match="use_foo=2"):
        read_model({**vision, **inner, **config, "vision_config": vision, "use_foo": 2})


@pytest.mark.parametrize("family", WRAPPED)
def test_older_keys_beside_newer_ones_inside_count_for_nothing(family: str) -> None:
    """Oracle: transformers' own reading: it saves ``rope_parameters`` inside, and leaves what it finds outside."""
    import transformers

    config = tiny(family)
    older = {"rope_theta": 77.0, "rope_scaling": {"type": "mrope"}, "partial_rotary_factor": 0.3}
    if "per_layer_config" in config["text_config"]:
        older |= {"global_head_dim": 7, "num_global_key_value_heads": 3}
    both = {**older, **config}
    theirs = getattr(transformers, FAMILIES[family].config).from_dict(json.loads(json.dumps(both)))
    again = {**json.loads(theirs.to_json_string(use_diff=False)), "architectures": config["architectures"]}
    assert read_model(both) == read_model(config) == read_model(again)


def test_an_override_of_a_key_that_counts_for_nothing_is_refused(tmp_path: Path) -> None:
    """Oracle: the same change where it counts is obeyed, and null outside takes nothing away."""
    config = tiny("qwen2.5-vl")
    (tmp_path / "config.json").write_text(json.dumps({**config["text_config"], **config}))
    change = {"max_position_embeddings": 128}
    with pytest.raises(ConfigError, match=r'max_position_embeddings=128.*--hf-overrides .\{"text_config": ') as caught:
        load_model_config(str(tmp_path), hf_overrides=change)
    assert str(caught.value).count("--hf-overrides") == 1
    spec, _ = load_model_config(str(tmp_path), hf_overrides={"text_config": change})
    assert spec.max_position == 128
    spec, _ = load_model_config(str(tmp_path), hf_overrides={"max_position_embeddings": None})
    assert spec.max_position == 512


@pytest.mark.parametrize("family", FAMILIES)
def test_architectures_follow_from_the_type_of_the_model(family: str) -> None:
    """Oracle: transformers' tables of automatic classes."""
    from transformers.models.auto import modeling_auto

    config = tiny(family)
    names = {
        **modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        **modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    }
    kind = config["model_type"]
    expected = FAMILIES[family].model
    if "text_config" not in config:
        assert modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind, names[kind]) == expected
    else:
        assert names[kind] == expected
    without = {name: value for name, value in config.items() if name != "architectures"}
    for one in (without, {**without, "architectures": None}, {**without, "architectures": []}):
        assert read_model(one) == read_model(config)


def test_a_type_that_is_not_run_is_named() -> None:
    """Oracle: by hand: its relatives, as for an architecture; without either the file is not a whole model's."""
    config = llama()
    del config["architectures"]
    with pytest.raises(ConfigError, match=r"no architectures, and model_type is 'glm5_next'.* Glm4MoeForCausalLM"):
        read_model({**config, "model_type": "glm5_next"})
    kinds: list[Any] = [None, 3, [], {}]
    for kind in kinds:
        with pytest.raises(ConfigError, match="has no architectures"):
            read_model({**config, "model_type": kind})


def test_null_is_no_cap() -> None:
    """Oracle: transformers' class keeps None, and its layers cap nothing."""
    spec = read_model({**PUBLISHED["gemma-2-2b"], "attn_logit_softcapping": None, "final_logit_softcapping": None})
    assert spec.logit_softcap is None and {one.softcap for one in spec.attentions} == {None}
    with pytest.raises(ConfigError, match="above 0, or null for none"):
        read_model({**PUBLISHED["gemma-2-2b"], "attn_logit_softcapping": 0.0})


@pytest.mark.parametrize(
    ("family", "key"),
    [
        ("gemma4", "num_global_key_value_heads"),
        ("glm4-moe", "partial_rotary_factor"),
        ("hyperclovax", "attention_multiplier"),
    ],
)
def test_null_that_transformers_takes_for_absence(family: str, key: str) -> None:
    """Oracle: the same file without the key, as transformers' class reads null there."""
    config = tiny(family)
    config.pop("per_layer_config", None), config.pop(key, None)
    assert read_model({**config, key: None}) == read_model(config)


@pytest.mark.parametrize(
    ("family", "key"),
    [
        ("cohere2", "logit_scale"), ("llama", "rope_theta"), ("granite-moe", "residual_multiplier"),
        ("deepseek-v3", "num_experts_per_tok"), ("gpt-oss", "num_experts_per_tok"),
        ("gemma2", "query_pre_attn_scalar"), ("deepseek-v3", "n_group"),
    ],
)  # fmt: skip
def test_null_that_is_no_number_is_refused(family: str, key: str) -> None:
    """Oracle: transformers has no number for it either; the default's would say other tokens silently."""
    config = tiny(family)
    if key == "rope_theta":
        del config["rope_parameters"]
    with pytest.raises(ConfigError, match=rf"{key} is None.*write a number, or leave the key out"):
        read_model({**config, key: None})


def test_null_is_an_equal_share_of_the_hidden_size() -> None:
    """Oracle: transformers' class: of Seed-OSS 128 is the size of heads where the key is absent, and not for null."""
    config = tiny("seed-oss")
    assert read_model({**config, "head_dim": None}).attentions[0].head_dim == 64 // 8
    del config["head_dim"]
    assert read_model(config).attentions[0].head_dim == 128


def test_granite_moe_names_its_rotation() -> None:
    """Oracle: a file that transformers 4.57 saved: "rope" is what the model does; another value is another model."""
    config = tiny("granite-moe")
    assert read_model({**config, "position_embedding_type": "rope"}) == read_model(config)
    with pytest.raises(ConfigError, match="position_embedding_type"):
        read_model({**config, "position_embedding_type": "nope"})


def test_a_share_that_transformers_does_not_read_is_refused() -> None:
    """Oracle: transformers' rotation of Gemma 4's full layers without a type, which turns whole heads."""
    config = tiny("gemma4")
    full = config["rope_parameters"]["full_attention"]
    assert full.pop("rope_type") == "proportional" and full["partial_rotary_factor"] == 0.25
    with pytest.raises(ConfigError, match=r"full_attention: partial_rotary_factor is 0.25"):
        read_model(config)
    del full["partial_rotary_factor"]
    assert {one.kind for one in read_model(config).ropes} == {"default"}


@pytest.mark.parametrize("changes", [{"per_layer_config": {}}, {"per_layer_config": None}])
def test_no_changes_by_layer_are_none(changes: dict[str, Any]) -> None:
    """Oracle: transformers' own layers, which it writes of a model whose full layers are like the others."""
    from transformers import Gemma4TextConfig

    config = {**tiny("gemma4"), "global_head_dim": 24, **changes}
    theirs = [layer.head_dim for layer in Gemma4TextConfig.from_dict(json.loads(json.dumps(config))).per_layer_config]
    assert [one.head_dim for one in read_model(config).attentions] == theirs and set(theirs) == {8}
