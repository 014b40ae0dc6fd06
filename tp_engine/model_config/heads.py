"""From the config.json of a classifier or a reward model to its decoder and the head on it.  No torch.

::

    hidden state (hidden,) -> score (labels,)                        *ForSequenceClassification, *ForTokenClassification
    hidden state (hidden,) -> score.0 (hidden,), relu -> score.2     Qwen2ForRewardModel, Qwen2ForProcessRewardModel
    logits of some tokens as the next one                            any of them, with classifier_from_token

``HEADS`` is the table of heads, by the end of the architecture's name.  The beginning names the decoder.
"""

import dataclasses
from collections.abc import Collection
from dataclasses import dataclass

from tp_engine.errors import ConfigError
from tp_engine.model_config.checkpoint_files import CheckpointHeaders
from tp_engine.model_config.classifier import ClassifierSpec, HeadLinear, ScoreActivation
from tp_engine.model_config.config_json import ConfigJson
from tp_engine.model_config.spec import ModelSpec

# A stranger's file may say any number; each label is a row of a weight, and a number in every answer.
_MAX_LABELS = 1 << 16
# How vLLM makes scores of the logits of some tokens: its values of the key ``method``.
_TWO_WAY, _AS_THEY_ARE = "from_2_way_softmax", "no_post_processing"
# problem_type -> what makes probabilities of scores, as in vLLM; a single label has a sigmoid in place of the softmax.
_ACTIVATIONS: dict[str, ScoreActivation] = {
    "regression": "none",
    "single_label_classification": "softmax",
    "multi_label_classification": "sigmoid",
}
# Keys of config.json that say what the head is, and nothing of the decoder.
_KEYS = (
    "num_labels", "id2label", "label2id", "problem_type", "token_classification_bias", "classifier_from_token",
    "method", "is_original_qwen3_reranker", "sentence_transformers", "sbert_ce_default_activation_function",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class _Head:
    """A row of ``HEADS``: the ``modules`` of the checkpoint, and what their own code says in place of config.json:
    ``num_labels`` and ``activation``.  ``only`` these decoders have such a head; empty: all."""

    modules: tuple[str, ...]
    has_bias: bool = False
    per_token: bool = False
    num_labels: int | None = None
    activation: ScoreActivation | None = None
    only: tuple[str, ...] = ()


_TWO_LAYERS = ("score.0", "score.2")
HEADS: dict[str, _Head] = {
    "ForSequenceClassification": _Head(modules=("score",)),
    "ForTokenClassification": _Head(modules=("score",), has_bias=True, per_token=True),
    "ForRewardModel": _Head(modules=_TWO_LAYERS, has_bias=True, num_labels=1, activation="none", only=("Qwen2",)),
    "ForProcessRewardModel": _Head(
        modules=_TWO_LAYERS, has_bias=True, num_labels=2, activation="softmax", per_token=True, only=("Qwen2",)
    ),
}


def decoder_of(config: ConfigJson, decoders: Collection[str]) -> str | None:
    """Return the architecture, one of ``decoders``, beneath the head of ``config``'s; None if there is no such."""
    name = config.architecture
    end = _end(name)
    if end is None:
        return None
    base, kind = name.removesuffix(end), "ForConditionalGeneration" if config.has("text_config") else "ForCausalLM"
    if HEADS[end].only and base not in HEADS[end].only:
        return None
    return next((one for one in (base + kind, base.removesuffix("Text") + kind) if one in decoders), None)


def decoder_config(config: ConfigJson, decoder: str) -> ConfigJson:
    """Return what ``config`` says of its decoder, the architecture ``decoder``."""
    return config.changed({"architectures": [decoder], **dict.fromkeys(_KEYS)})


def with_classifier(spec: ModelSpec, config: ConfigJson) -> ModelSpec:
    """Return the decoder ``spec`` with the head that ``config`` describes.  Raises ``ConfigError``."""
    name = config.architecture
    end = _end(name)
    assert end is not None, "decoder_of found a decoder"
    tokens, head = config.take_names("classifier_from_token"), HEADS[end]
    if tokens:
        return dataclasses.replace(spec, architecture=name, classifier=_of_tokens(config, tokens))
    labels, has_bias = _labels(config, head), config.take("token_classification_bias", bool, head.has_bias)
    sizes = (*(spec.hidden_size,) * (len(head.modules) - 1), len(labels))
    classifier = ClassifierSpec(
        labels=labels,
        activation=_activation(config, head, len(labels)),
        linears=tuple(
            HeadLinear(name=module, out_size=size, has_bias=bool(has_bias))
            for module, size in zip(head.modules, sizes, strict=True)
        ),
        per_token=head.per_token,
        pad_token_id=_pad_token_id(config),
    )
    return dataclasses.replace(spec, architecture=name, classifier=classifier)


def check_head(spec: ModelSpec, headers: CheckpointHeaders) -> None:
    """Raise ``ConfigError`` if the checkpoint has no head, or another number of labels than config.json."""
    if spec.classifier is None or not spec.classifier.linears or not headers.names:
        return
    last = spec.classifier.linears[-1]
    found, shape = headers.find(f"{last.name}.weight"), (last.out_size, spec.hidden_size)
    if found is None and f"{last.name}.weight" not in headers.names:
        raise ConfigError(
            f"{spec.architecture} has a head, and the checkpoint no {last.name}.weight (heads are not quantised); if "
            "that is a language model, leave architectures as it is, or name the tokens that stand for labels: "
            '--hf-overrides \'{"classifier_from_token": ["no", "yes"]}\''
        )
    if found is not None and found.shape != shape:
        raise ConfigError(
            f"{last.name}.weight is {found.shape}, and by config.json it has a row for each of {last.out_size} labels "
            f"and {spec.hidden_size} columns; correct id2label there, or remove it and set num_labels: "
            '--hf-overrides \'{"id2label": null, "num_labels": N}\''
        )


def _end(architecture: str) -> str | None:
    return next((end for end in HEADS if architecture.endswith(end)), None)


def _labels(config: ConfigJson, head: _Head) -> tuple[str, ...]:
    """The names in ``id2label``; without it there are ``num_labels``, and without that 2, as in transformers."""
    names, count = config.take("id2label", dict) or {}, config.take("num_labels", int)
    if head.num_labels is not None:
        names, count = (names if len(names) == head.num_labels else {}), head.num_labels
    number = len(names) or (2 if count is None else count)
    key, value = ("id2label", f"of {number} labels") if names else ("num_labels", number)
    if not 1 <= number <= _MAX_LABELS:
        raise config.refusal(key, value, f"a classifier has 1 to {_MAX_LABELS:,} labels", "correct it")
    if count not in (None, number):
        raise config.refusal("num_labels", count, f"id2label has {number} labels", "correct or remove one of the two")
    if not names:
        return tuple(f"LABEL_{place}" for place in range(number))
    labels = tuple(names.get(str(place)) for place in range(number))
    if not all(isinstance(label, str) for label in labels):
        raise config.refusal("id2label", names, 'it must name "0", "1" and so on by texts', "correct or remove it")
    return tuple(map(str, labels))


def _activation(config: ConfigJson, head: _Head, num_labels: int) -> ScoreActivation:
    """That of the sentence-transformers library, where its keys are, of the head's own code, or of the
    ``problem_type``."""
    library = config.take_object("sentence_transformers")
    own = config.take("sbert_ce_default_activation_function", str) or (
        None if library is None else library.take("activation_fn", str)
    )
    kind = config.take("problem_type", str) or "single_label_classification"
    if own is not None:
        word = own.rpartition(".")[2]
        if word not in ("Sigmoid", "Identity"):
            raise config.refusal("activation_fn", own, "this engine has Sigmoid and Identity", "use another model")
        return "sigmoid" if word == "Sigmoid" else "none"
    if kind not in _ACTIVATIONS:
        raise config.refusal("problem_type", kind, f"it must be one of {', '.join(_ACTIVATIONS)}", "correct it")
    found = head.activation or _ACTIVATIONS[kind]
    return "sigmoid" if found == "softmax" and num_labels == 1 else found


def _pad_token_id(config: ConfigJson) -> int | None:
    """That of the text part, as in transformers."""
    inner = config.peek("text_config")
    found = inner.get("pad_token_id") if isinstance(inner, dict) else config.peek("pad_token_id")
    return found if type(found) is int else None


def _of_tokens(config: ConfigJson, tokens: tuple[str, ...]) -> ClassifierSpec:
    """Scores from the logits of ``tokens``: vLLM's conversion of rerankers that are language models."""
    is_qwen3 = config.take("is_original_qwen3_reranker", bool, False)
    methods = (_TWO_WAY, _AS_THEY_ARE) if is_qwen3 or len(tokens) == 2 else (_AS_THEY_ARE, _TWO_WAY)
    is_two_way = config.take_one_of("method", *methods, remedy="correct it") == _TWO_WAY
    if (is_two_way and len(tokens) != 2) or not 1 <= len(tokens) <= _MAX_LABELS:
        rule = "it must have two tokens, for no and yes" if is_two_way else f"at most {_MAX_LABELS:,} tokens are taken"
        raise config.refusal("classifier_from_token", list(tokens), rule, "correct it")
    if is_two_way or len(tokens) == 1:
        return ClassifierSpec(labels=("LABEL_0",), activation="sigmoid", answers=tokens[::-1], is_two_way=is_two_way)
    return ClassifierSpec(labels=tokens, activation="softmax", answers=tokens)
