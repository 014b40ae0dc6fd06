"""Heads of classifiers and reward models in config.json: labels, activations, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.unit.model_config.test_families import PUBLISHED
from tests.unit.model_config.test_model_config import llama
from tp_engine.errors import ConfigError
from tp_engine.model_config import load_model_config
from tp_engine.model_config.classifier import YES_OR_NO, ClassifierSpec, HeadLinear
from tp_engine.model_config.pooling import pooled, read_pooling

SCORES = "LlamaForSequenceClassification"


def read(tmp_path: Path, config: dict[str, Any], changes: dict[str, Any] | None = None) -> ClassifierSpec:
    (tmp_path / "config.json").write_text(json.dumps(config))
    spec, _ = load_model_config(str(tmp_path), hf_overrides=changes)
    assert spec.classifier is not None
    return spec.classifier


QWEN2 = {**llama(), "model_type": "qwen2"}


def scores(**keys: Any) -> dict[str, Any]:
    return llama(**{"architectures": [SCORES], **keys})


@pytest.mark.parametrize(
    ("keys", "labels", "activation"),
    [
        ({}, ("LABEL_0", "LABEL_1"), "softmax"),
        ({"num_labels": 3}, ("LABEL_0", "LABEL_1", "LABEL_2"), "softmax"),
        ({"num_labels": 1}, ("LABEL_0",), "sigmoid"),
        ({"id2label": {"1": "bad", "0": "good"}, "label2id": {"good": 0, "bad": 1}}, ("good", "bad"), "softmax"),
        ({"num_labels": 2, "problem_type": "multi_label_classification"}, ("LABEL_0", "LABEL_1"), "sigmoid"),
        ({"num_labels": 1, "problem_type": "regression"}, ("LABEL_0",), "none"),
        ({"num_labels": 1, "problem_type": "single_label_classification"}, ("LABEL_0",), "sigmoid"),
        (
            {"num_labels": 1, "sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}},
            ("LABEL_0",),
            "none",
        ),
    ],
)
def test_labels_and_activations(keys: dict[str, Any], labels: tuple[str, ...], activation: str, tmp_path: Path) -> None:
    """Oracle: transformers' defaults (two labels, LABEL_0 and on), and vLLM's table of activations."""
    found = read(tmp_path, scores(**keys))
    assert (found.labels, found.activation) == (labels, activation)
    assert found.linears == (HeadLinear(name="score", out_size=len(labels), has_bias=False),)
    assert not found.per_token and not found.answers


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"num_labels": 3, "id2label": {"0": "a", "1": "b"}}, ("num_labels is 3", "id2label has 2 labels", "correct")),
        ({"num_labels": 0}, ("num_labels is 0", "1 to 65,536 labels", "correct")),
        ({"num_labels": 10**9}, ("num_labels is 1000000000", "1 to 65,536 labels", "correct")),
        ({"num_labels": True}, ("num_labels is True", "int")),
        ({"id2label": {"0": "a", "2": "b"}}, ("id2label", '"0", "1" and so on', "correct")),
        ({"id2label": {"0": "a", "1": 7}}, ("id2label", "texts", "correct")),
        ({"id2label": ["a", "b"]}, ("id2label", "dict")),
        ({"problem_type": "ranking"}, ("problem_type is 'ranking'", "regression", "correct")),
        ({"sentence_transformers": {"activation_fn": "os.system"}}, ("os.system", "Sigmoid and Identity", "use")),
        (
            {"classifier_from_token": ["no"], "method": "from_2_way_softmax"},
            ("classifier_from_token", "two", "correct"),
        ),
        (
            {"classifier_from_token": ["a", "b"], "method": "mean"},
            ("method is 'mean'", "no_post_processing", "correct"),
        ),
        ({"architectures": ["LlamaForRewardModel"]}, ("LlamaForRewardModel", "exactly one of")),
        ({"architectures": ["BertForSequenceClassification"]}, ("BertForSequenceClassification", "exactly one of")),
        ({"architectures": ["ForSequenceClassification"]}, ("ForSequenceClassification", "exactly one of")),
        ({"head_norm": 2}, ("head_norm",)),
    ],
)
def test_heads_that_are_refused(keys: dict[str, Any], words: tuple[str, ...], tmp_path: Path) -> None:
    """Oracle: the message names the value, the rule and the remedy."""
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, scores(**keys))
    assert all(word in str(caught.value) for word in words), caught.value


def test_a_weight_with_other_labels_is_refused(tmp_path: Path) -> None:
    """Oracle: the shapes of the file and of config.json, and the keys to set; with them it is read."""
    weight = np.zeros((3, llama()["hidden_size"]), dtype=np.float32)
    save_file({"score.weight": weight}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"score.weight is \(3, .*each of 2 labels.*--hf-overrides"):
        read(tmp_path, scores(id2label={"0": "a", "1": "b"}))
    with pytest.raises(ConfigError, match=r"no score.2.weight.*classifier_from_token"):
        read(tmp_path, {**QWEN2, "architectures": ["Qwen2ForRewardModel"]})
    assert len(read(tmp_path, scores(id2label={"0": "a", "1": "b"}), {"id2label": None, "num_labels": 3}).labels) == 3


def test_heads_on_the_text_part(tmp_path: Path) -> None:
    """Oracle: transformers' class of Gemma 3 with images; labels are beside the text part, padding is in it."""
    wrapped = dict(PUBLISHED["gemma-3-4b"])
    config = {**wrapped, "architectures": ["Gemma3ForSequenceClassification"], "id2label": {"0": "a"}}
    config["text_config"] = {**wrapped["text_config"], "pad_token_id": 7}
    found = read(tmp_path, config)
    assert (found.labels, found.pad_token_id) == (("a",), 7)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"classifier_from_token": ["no", "yes"], "is_original_qwen3_reranker": True}, YES_OR_NO),
        (
            {"classifier_from_token": ["0", "1"], "method": "from_2_way_softmax"},
            ClassifierSpec(labels=("LABEL_0",), activation="sigmoid", answers=("1", "0"), is_two_way=True),
        ),
        (
            {"classifier_from_token": ["Yes"], "method": "no_post_processing"},
            ClassifierSpec(labels=("LABEL_0",), activation="sigmoid", answers=("Yes",)),
        ),
        (
            {"classifier_from_token": ["a", "b", "c"]},
            ClassifierSpec(labels=("a", "b", "c"), activation="softmax", answers=("a", "b", "c")),
        ),
    ],
)
def test_scores_of_tokens(keys: dict[str, Any], expected: ClassifierSpec, tmp_path: Path) -> None:
    """Oracle: vLLM's overrides for rerankers that are language models; the output head stays."""
    (tmp_path / "config.json").write_text(json.dumps(llama()))
    changes = {"architectures": [SCORES], **keys}
    spec, _ = load_model_config(str(tmp_path), hf_overrides=changes)
    assert spec.classifier == expected
    pooling = read_pooling("m", tmp_path, "auto", spec.classifier)
    assert (pooling.convert, pooling.classifier) == ("classify", expected)
    assert pooled(spec, pooling) == spec


def test_what_a_classifier_is_served_for(tmp_path: Path) -> None:
    """Oracle: scores by default, its decoder's states as embeddings when told so, and never text."""
    (tmp_path / "config.json").write_text(json.dumps(scores()))
    spec, _ = load_model_config(str(tmp_path))
    for convert in ("auto", "pooling", "classify"):
        pooling = read_pooling("m", tmp_path, convert, spec.classifier)
        assert (pooling.convert, pooling.classifier) == ("classify", spec.classifier)
        assert pooled(spec, pooling).is_tied and pooled(spec, pooling).classifier == spec.classifier
    embedding = pooled(spec, read_pooling("m", tmp_path, "embed", spec.classifier))
    assert embedding.classifier is None and "score." in embedding.names.skipped
    with pytest.raises(ConfigError, match=r"convert is none.*leave convert out"):
        read_pooling("m", tmp_path, "none", spec.classifier)
