"""Requests that generate nothing: the vector of a text, or the scores of a classifier or a reward model.

::

    task             of models for         one result
    embed            embeddings            the hidden state of the last token, divided by its length (L2)
    classify         scores                a number for each label, of the last token
    token_classify   scores, by a head     a number for each label, of each token

A classifier's activation turns its scores into probabilities: a softmax over the labels, or a sigmoid of each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, get_args

import numpy as np

from tp_engine.api.input_processor import InputProcessor, Prompt, TruncationSide
from tp_engine.engine.messages import ModelInfo
from tp_engine.errors import CODE_UNAVAILABLE, RequestError, shown
from tp_engine.model_config.classifier import ClassifierSpec, ScoreActivation
from tp_engine.options.fields import key
from tp_engine.options.foreign_rows import accepted, to_option, translated
from tp_engine.options.intake import takes_names_of_others
from tp_engine.options.params import check_params, switch, takes_forms
from tp_engine.plan import FloatArray
from tp_engine.requests.outputs import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    RequestOutput,
)
from tp_engine.requests.request import NOT_FINITE, EngineRequest, Pooling
from tp_engine.requests.sampling_params import SamplingParams

# Numbers of one result; a text's tokens may be many, and so may a model's labels.
_MOST_SCORES = 1 << 20
_SERVE = {
    "embed": "this model is not served for embeddings; serve one that is made for them, or start with --convert embed",
    "classify": "this model is not served for classification; serve one whose architecture ends in "
    "ForSequenceClassification, or start a reranker with --convert classify",
    "token_classify": "this model gives no scores of each token; serve one whose architecture ends in "
    "ForTokenClassification, ForProcessRewardModel or ForSequenceClassification",
}
"""What to do about a task that the model does not have."""


@takes_names_of_others((*translated(to_option("use_activation"), "normalize"), *accepted("is the method's", "task")))
@takes_forms
@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingParams:
    """How a prompt is pooled: ``use_activation`` False leaves a vector as long as it is, and scores as they are.

    A vector is cut to ``dimensions``.  ``truncate_prompt_tokens`` keeps that many of the prompt's last tokens, or with
    ``truncation_side`` right of its first ones.
    """

    dimensions: int | None = key(None, rule="a whole number")
    use_activation: bool | None = key(None, rule="True or False")
    truncate_prompt_tokens: int | None = key(None, rule="a whole number")
    truncation_side: TruncationSide | None = key(None, choices=get_args(TruncationSide))
    add_special_tokens: bool = switch(True)
    cache_salt: str | None = key(None, rule="a text")

    def __post_init__(self) -> None:
        check_params(self)

    @classmethod
    def of(cls, given: object) -> PoolingParams:
        """``given`` itself, made of a mapping of its fields, or the default for None; else ``RequestError``."""
        made = cls(**given) if isinstance(given, Mapping) else given or cls()
        if not isinstance(made, PoolingParams):
            kind = type(given).__name__
            raise RequestError(
                f"pooling_params is of type {kind}; it must be PoolingParams, or a mapping of its fields",
                param="pooling_params",
            )
        return made

    def check_dimensions(self, model: ModelInfo, task: str) -> None:
        """Raise ``RequestError`` unless this model gives results of that many numbers."""
        asked, legal = self.dimensions, model.dimensions
        if asked is None:
            return
        if task != "embed":
            raise RequestError(
                f"dimensions is {asked}; scores have a number for each label: leave it out", param="dimensions"
            )
        if legal is None:
            raise RequestError(
                f"dimensions is {asked}; the embeddings of this model cannot be cut, they have {model.hidden_size}: "
                "leave it out, or set is_matryoshka in config.json if it was trained for that",
                param="dimensions",
            )
        if (legal and asked not in legal) or not 1 <= asked <= model.hidden_size:
            rule = f"one of {', '.join(map(str, legal))}" if legal else f"from 1 to {model.hidden_size}"
            raise RequestError(f"dimensions is {asked}; it must be {rule}", param="dimensions")

    def vector(self, pooled: FloatArray) -> FloatArray:
        """The embedding (n,) float32 of a hidden state (hidden,)."""
        kept = pooled[: self.dimensions].astype(np.float64)
        if self.use_activation is not False:
            kept /= max(float(np.linalg.norm(kept)), 1e-12)
        found: FloatArray = kept.astype(np.float32)
        return found


PoolingLike: TypeAlias = PoolingParams | Mapping[str, Any] | None
"""How a prompt is pooled; None for the model's defaults."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pooler:
    """Turns outputs of the ``processor``'s model into results of ``task``; ``of`` checks that this is possible."""

    processor: InputProcessor
    params: PoolingParams
    task: str

    @staticmethod
    def of(processor: InputProcessor, params: object = None, task: str | None = None) -> Pooler:
        """The pooler of ``task``, by default the model's own; raises ``RequestError``."""
        found, model = PoolingParams.of(params), processor.model
        tasks = _tasks(model)
        chosen = task if task is not None else tasks[0] if tasks else "embed"
        if chosen not in tasks:
            has = f"this model has {', '.join(tasks)}" if tasks else "this model generates text"
            raise RequestError(
                _SERVE.get(chosen, f"task is {shown(chosen)}; {has}: leave it out"),
                param="task" if task not in (None, *_SERVE) else "model",
            )
        found.check_dimensions(model, chosen)
        return Pooler(processor=processor, params=found, task=chosen)

    @staticmethod
    def of_rewards(processor: InputProcessor, params: object = None) -> Pooler:
        """The pooler of a reward model: for each text or, if it judges steps, each token; a single score stays as
        it is."""
        found, classifier = PoolingParams.of(params), processor.model.classifier
        if classifier is None or not classifier.linears:
            raise RequestError(
                "this model gives no rewards; serve one whose architecture ends in ForRewardModel, "
                "ForProcessRewardModel or ForSequenceClassification",
                param="model",
            )
        if found.use_activation is None:
            found = replace(found, use_activation=len(classifier.labels) > 1)
        return Pooler.of(processor, found)

    @property
    def classifier(self) -> ClassifierSpec:
        """The model's classifier, which it must have."""
        assert self.processor.model.classifier is not None, "of() has looked at the task"
        return self.processor.model.classifier

    def request(
        self, prompt: Prompt, *, request_id: str, priority: int = 0, prompt_field: str = "prompt"
    ) -> EngineRequest:
        """The request for what the model makes of a prompt; raises ``RequestError``, which names
        ``prompt_field``."""
        params, pads = self.params, None
        pooling = Pooling(per_token=self.task == "token_classify")
        if self.task == "classify":
            pooling, pads = Pooling(token_ids=self._answer_ids()), self.classifier.pad_token_id
        made = self.processor.process(
            prompt,
            SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, cache_salt=params.cache_salt),
            request_id=request_id,
            priority=priority,
            add_special_tokens=params.add_special_tokens,
            truncate_prompt_tokens=params.truncate_prompt_tokens,
            truncation_side=params.truncation_side or "left",
            pooling=pooling,
            prompt_field=prompt_field,
        )
        if pooling.per_token:
            self._check_size(len(made.prompt_token_ids), prompt_field)
        if pads is None:
            return made
        ids = made.prompt_token_ids  # transformers pools the last that is not padding; the first one if all are padding
        length = next((n for n in range(len(ids), 0, -1) if ids[n - 1] != pads), 1)
        return replace(made, prompt_token_ids=ids[:length])

    def values(self, output: RequestOutput) -> FloatArray:
        """The vector (n,), the scores (labels,), or those of each token (tokens, labels), of a finished request.

        ``RuntimeError`` for outputs that are not numbers, ``RequestError`` for a request that was aborted.
        """
        pooled = output.pooled
        if pooled is None:
            if output.outputs and output.outputs[0].finish_reason == "abort":
                raise RequestError("the request was aborted before its result; send it again", code=CODE_UNAVAILABLE)
            raise RuntimeError(NOT_FINITE)
        if self.task == "embed":
            return self.params.vector(pooled)
        scores = pooled[:1] - pooled[1:] if self.classifier.is_two_way else pooled
        activation = "none" if self.params.use_activation is False else self.classifier.activation
        found: FloatArray = _ACTIVATIONS[activation](scores.astype(np.float64)).astype(np.float32)
        return found

    def pooled(self, output: RequestOutput) -> PoolingRequestOutput[PoolingOutput]:
        """The values of a finished request, with the prompt that was read."""
        return PoolingRequestOutput(outputs=PoolingOutput(data=self.values(output)), **_read(output))

    def embedding(self, output: RequestOutput) -> EmbeddingRequestOutput:
        """The vector of a finished request."""
        return EmbeddingRequestOutput(outputs=EmbeddingOutput(embedding=self.values(output).tolist()), **_read(output))

    def classification(self, output: RequestOutput) -> ClassificationRequestOutput:
        """The scores of a finished request."""
        probs = self.values(output).tolist()
        return ClassificationRequestOutput(outputs=ClassificationOutput(probs=probs), **_read(output))

    def _check_size(self, num_tokens: int, param: str) -> None:
        """Raise ``RequestError`` for more scores than one answer may have."""
        num_labels = len(self.classifier.labels)
        if num_tokens * num_labels > _MOST_SCORES:
            raise RequestError(
                f"{param} has {num_tokens} tokens, and each has scores for {num_labels} labels; an answer has at most "
                f"{_MOST_SCORES:,} scores: send at most {_MOST_SCORES // num_labels} tokens, or set task to classify",
                param=param,
            )

    def _answer_ids(self) -> tuple[int, ...]:
        """The token ids of a reranker's answers; empty for scores of a head."""
        answers, tokenizer = self.classifier.answers, self.processor.tokenizer
        if not answers:
            return ()
        if tokenizer is None:
            raise RequestError(
                "the model has no tokenizer, and its scores need one: serve it with --tokenizer", param="model"
            )
        found = [tokenizer.encode(word, add_special_tokens=False) for word in answers]
        if any(len(ids) != 1 for ids in found):
            raise RequestError(
                f"the model's tokenizer has no single tokens for {' and '.join(answers)}; serve a reranker that "
                "answers with them",
                param="model",
            )
        return tuple(ids[0] for ids in found)


def _tasks(model: ModelInfo) -> tuple[str, ...]:
    """What the model can be asked for, its own task first."""
    classifier = model.classifier
    if classifier is None:
        return ("embed",) if model.convert == "embed" else ()
    if classifier.per_token:
        return ("token_classify",)
    return ("classify", "token_classify") if classifier.linears else ("classify",)


def _read(output: RequestOutput) -> dict[str, Any]:
    """What was read for a result."""
    names = ("request_id", "prompt_token_ids", "num_cached_tokens")
    return {name: getattr(output, name) for name in names}


def _softmax(scores: Any) -> Any:
    powers = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


def _sigmoid(scores: Any) -> Any:
    powers = np.exp(-np.abs(scores))
    return np.where(scores >= 0, 1.0, powers) / (1.0 + powers)


_ACTIVATIONS: dict[ScoreActivation, Any] = {"softmax": _softmax, "sigmoid": _sigmoid, "none": lambda scores: scores}
