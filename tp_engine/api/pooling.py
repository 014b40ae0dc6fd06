"""Embeddings and scores from what the engine pools: the last token's hidden state, or the logits of yes and no.

A model for embeddings gives a text the hidden state of its last token, divided by its length (L2).  Two texts score the
cosine of theirs.  A reranker reads query and document in one prompt and says yes or no: the score is the probability of
yes among the two, 1 / (1 + exp(no - yes)) of their logits.  Its template is part of the model: without it scores mean
nothing (Qwen3-Reranker's model card).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tp_engine.api.input_processor import InputProcessor, Prompt, TruncationSide, check_text
from tp_engine.engine.messages import ModelInfo
from tp_engine.errors import RequestError
from tp_engine.options.foreign_rows import accepted, to_option, translated
from tp_engine.options.intake import takes_names_of_others
from tp_engine.outputs import (
    EmbeddingOutput,
    EmbeddingRequestOutput,
    RequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from tp_engine.plan import FloatArray
from tp_engine.request import EngineRequest, Pooling
from tp_engine.sampling_params import SamplingParams

INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
"""Of a reranker's request that brings none: that of the models' card."""

_PREFIX = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
_SUFFIX = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
_ANSWERS = ("yes", "no")


@takes_names_of_others((*translated(to_option("use_activation"), "normalize"), *accepted("is the method's", "task")))
@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingParams:
    """How a prompt is embedded: cut to ``dimensions``, of length 1 unless ``use_activation`` is False.

    ``truncate_prompt_tokens`` keeps so many of its last tokens, or with ``truncation_side`` right of its first ones.
    """

    dimensions: int | None = None
    use_activation: bool = True
    truncate_prompt_tokens: int | None = None
    truncation_side: TruncationSide | None = None
    add_special_tokens: bool = True
    cache_salt: str | None = None

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

    def check(self, model: ModelInfo) -> None:
        """Raise ``RequestError`` unless this model gives such embeddings."""
        if model.convert != "embed":
            raise RequestError(
                "this model is not served for embeddings; serve one that is made for them, or start with "
                "--convert embed",
                param="model",
            )
        asked, legal = self.dimensions, model.dimensions
        if asked is None:
            return
        if legal is None:
            raise RequestError(
                f"dimensions is {asked}; the embeddings of {model.model!r} can not be cut, they have "
                f"{model.hidden_size}: leave it out, or set is_matryoshka in config.json if it was trained for that",
                param="dimensions",
            )
        if (legal and asked not in legal) or not 1 <= asked <= model.hidden_size:
            rule = f"one of {', '.join(map(str, legal))}" if legal else f"from 1 to {model.hidden_size}"
            raise RequestError(f"dimensions is {asked}; it must be {rule}", param="dimensions")

    def vector(self, pooled: FloatArray) -> FloatArray:
        """Return the embedding (n,) float32 of a hidden state (hidden,)."""
        kept = pooled[: self.dimensions].astype(np.float64)
        if self.use_activation:
            kept /= max(float(np.linalg.norm(kept)), 1e-12)
        found: FloatArray = kept.astype(np.float32)
        return found


def embedding_request(
    processor: InputProcessor,
    prompt: Prompt,
    params: PoolingParams,
    *,
    request_id: str,
    priority: int = 0,
    prompt_field: str = "prompt",
) -> EngineRequest:
    """Return the request for the hidden state of a prompt; raises ``RequestError``, which names ``prompt_field``."""
    return processor.process(
        prompt,
        _one_token(params.cache_salt),
        request_id=request_id,
        priority=priority,
        add_special_tokens=params.add_special_tokens,
        truncate_prompt_tokens=params.truncate_prompt_tokens,
        truncation_side=params.truncation_side or "left",
        pooling=Pooling(),
        prompt_field=prompt_field,
    )


def embedding_output(output: RequestOutput, params: PoolingParams) -> EmbeddingRequestOutput:
    """Return the embedding of a finished request."""
    assert output.pooled is not None
    return EmbeddingRequestOutput(
        request_id=output.request_id,
        outputs=EmbeddingOutput(embedding=params.vector(output.pooled).tolist()),
        prompt_token_ids=output.prompt_token_ids,
        num_cached_tokens=output.num_cached_tokens,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ScorePairs:
    """Pairs of texts to score, and the requests that do it.

    A reranker has a request for each pair; a model for embeddings one for each distinct text, in order of appearance.
    """

    pairs: tuple[tuple[str, str], ...]
    requests: tuple[EngineRequest, ...]
    is_reranker: bool
    _places: tuple[tuple[int, int], ...]

    @staticmethod
    def of(
        processor: InputProcessor,
        model: ModelInfo,
        pairs: Sequence[tuple[str, str]],
        *,
        request_id: str,
        instruction: str | None = None,
        max_tokens_per_doc: int | None = None,
        params: PoolingParams | None = None,
        priority: int = 0,
        fields: Sequence[tuple[str, str]] | None = None,
    ) -> ScorePairs:
        """Check everything and tokenize; raises ``RequestError``.

        ``instruction`` tells a reranker what relevant means; of each document at most ``max_tokens_per_doc`` tokens
        are read.  ``fields`` are what the client calls the texts of each pair, for errors.
        """
        params = params or PoolingParams()
        fields = fields or [("queries", "documents")] * len(pairs)
        if model.convert not in ("embed", "classify"):
            raise RequestError(
                "this model is not served for scores; serve a reranker or a model for embeddings, or start with "
                "--convert classify or embed",
                param="model",
            )
        if max_tokens_per_doc is not None and max_tokens_per_doc < 1:
            raise RequestError(
                f"max_tokens_per_doc is {max_tokens_per_doc}; it must be at least 1, or absent",
                param="max_tokens_per_doc",
            )
        if instruction is not None and model.convert == "embed":
            raise RequestError(
                f"instruction is {instruction[:80]!r}; a model for embeddings takes none: write it before the query",
                param="instruction",
            )
        cut = [
            (query, _cut(processor, document, max_tokens_per_doc, field))
            for (query, document), (_, field) in zip(pairs, fields, strict=True)
        ]
        is_reranker = model.convert == "classify"
        named: list[tuple[Prompt, str]]
        if is_reranker:
            told = instruction or INSTRUCTION
            named = [
                (_reranker_prompt(processor, pair, told, params, names), names[1])
                for pair, names in zip(cut, fields, strict=True)
            ]
            places, pooling = [(index, index) for index in range(len(cut))], Pooling(token_ids=_answer_ids(processor))
        else:
            first_field: dict[str, str] = {}
            for pair, names in zip(cut, fields, strict=True):
                for text, name in zip(pair, names, strict=True):
                    first_field.setdefault(text, name)
            named, pooling = list(first_field.items()), Pooling()
            number = {text: index for index, text in enumerate(first_field)}
            places = [(number[query], number[document]) for query, document in cut]
        requests = [
            processor.process(
                prompt,
                _one_token(params.cache_salt),
                request_id=f"{request_id}-{index}",
                priority=priority,
                truncate_prompt_tokens=None if is_reranker else params.truncate_prompt_tokens,
                truncation_side=params.truncation_side or "left",
                pooling=pooling,
                prompt_field=field,
            )
            for index, (prompt, field) in enumerate(named)
        ]
        return ScorePairs(pairs=tuple(pairs), requests=tuple(requests), is_reranker=is_reranker, _places=tuple(places))

    def scores(self, outputs: Sequence[RequestOutput]) -> list[float]:
        """Return the score of each pair; ``outputs`` has one element per request."""
        if self.is_reranker:
            return [_probability(outputs[place].pooled) for place, _ in self._places]
        params = PoolingParams()
        vectors = [params.vector(output.pooled) for output in outputs if output.pooled is not None]
        return [float(vectors[query].astype(np.float64) @ vectors[document]) for query, document in self._places]

    def outputs(self, outputs: Sequence[RequestOutput]) -> list[ScoringRequestOutput]:
        """Do as ``scores``, with what was read for each pair."""
        found = []
        for places, score in zip(self._places, self.scores(outputs), strict=True):
            read = [outputs[place] for place in (places[:1] if self.is_reranker else places)]
            found.append(
                ScoringRequestOutput(
                    request_id=read[-1].request_id,
                    outputs=ScoringOutput(score=score),
                    prompt_token_ids=[token_id for one in read for token_id in one.prompt_token_ids],
                    num_cached_tokens=sum(one.num_cached_tokens for one in read),
                )
            )
        return found


def fields_of(
    queries: str | Sequence[str], documents: str | Sequence[str], names: tuple[str, str]
) -> list[tuple[str, str]]:
    """Return what a client calls the texts of each pair of ``paired``: ``documents[3]`` for one of a list."""
    first, second = (
        [name] if isinstance(texts, str) else [f"{name}[{number}]" for number in range(len(texts))]
        for name, texts in zip(names, (queries, documents), strict=True)
    )
    return paired(first, second)


def paired(queries: str | Sequence[str], documents: str | Sequence[str]) -> list[tuple[str, str]]:
    """Return one query with each document, or as many queries as documents, pair by pair; raises ``RequestError``."""
    first = [queries] if isinstance(queries, str) else list(queries)
    second = [documents] if isinstance(documents, str) else list(documents)
    if not first or not second:
        name = "documents" if first else "queries"
        raise RequestError(f"{name} is empty; give at least one text", param=name)
    if len(first) == 1:
        first = first * len(second)
    if len(first) != len(second):
        raise RequestError(
            f"{len(first)} queries for {len(second)} documents; give one query, or one for each document",
            param="queries",
        )
    return list(zip(first, second, strict=True))


def _reranker_prompt(
    processor: InputProcessor, pair: tuple[str, str], instruction: str, params: PoolingParams, fields: tuple[str, str]
) -> list[int]:
    """The prompt of one pair in the template of Qwen3-Reranker; its three parts are tokenized one by one, as in the
    model card.

    ``truncate_prompt_tokens`` None is any length, -1 the model's context: the end of the document is cut off to fit, or
    with ``truncation_side`` left the beginning of the pair.
    """
    query, document = pair
    check_text(fields[0], query)
    texts = (_PREFIX, f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}", _SUFFIX)
    longest = params.truncate_prompt_tokens
    prefix, body, suffix = (
        processor.text_token_ids(text, add_special_tokens=False, must_fit=longest is None, param=fields[1])
        for text in texts
    )
    if longest is not None:
        context, around = processor.max_model_len, len(prefix) + len(suffix)
        room = (context if longest == -1 else longest) - around
        if not 0 < room <= context - around:
            raise RequestError(
                f"truncate_prompt_tokens is {longest}; it must be -1 (what the context allows) or from {around + 1} "
                f"to {context}, of which the template takes {around}",
                param="truncate_prompt_tokens",
            )
        body = body[-room:] if params.truncation_side == "left" else body[:room]
    return [*prefix, *body, *suffix]


def _probability(logits: FloatArray | None) -> float:
    assert logits is not None
    yes, no = map(float, logits)
    return 1.0 / (1.0 + math.exp(no - yes)) if yes >= no else math.exp(yes - no) / (1.0 + math.exp(yes - no))


def _answer_ids(processor: InputProcessor) -> tuple[int, int]:
    """The token ids of yes and no."""
    if processor.tokenizer is None:
        raise RequestError("the model has no tokenizer, and scores need one: serve it with --tokenizer", param="model")
    found = [processor.tokenizer.encode(word, add_special_tokens=False) for word in _ANSWERS]
    if any(len(ids) != 1 for ids in found):
        raise RequestError(
            "the model's tokenizer has no single tokens for yes and no; serve a reranker that answers with them",
            param="model",
        )
    return found[0][0], found[1][0]


def _cut(processor: InputProcessor, document: str, max_tokens: int | None, field: str) -> str:
    if max_tokens is None or processor.tokenizer is None:
        return document
    token_ids = processor.text_token_ids(document, add_special_tokens=False, may_be_empty=True, param=field)
    return document if len(token_ids) <= max_tokens else str(processor.tokenizer.decode(token_ids[:max_tokens]))


def _one_token(cache_salt: str | None) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, cache_salt=cache_salt)
