"""Scores of pairs of a query and a document: the cosine of two embeddings, or a classifier's score of both.

A model for embeddings gives each text its vector.  Every other model reads both texts in one prompt and has one score,
which the activation turns into a probability:

::

    Qwen3-Reranker     its own template, part of the model: without it scores mean nothing (the model card)
    others             the chat template, if it writes the roles query and document, as those of vLLM's examples do;
                       else both texts, one after the other, as the tokenizer writes pairs
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import numpy as np

from tp_engine.api.input_processor import InputProcessor, Prompt, check_text
from tp_engine.api.pooling import Pooler, PoolingParams
from tp_engine.errors import RequestError
from tp_engine.model_config.classifier import YES_OR_NO
from tp_engine.requests.outputs import RequestOutput, ScoringOutput, ScoringRequestOutput
from tp_engine.requests.request import EngineRequest

INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
"""Of a reranker's request without one: that of the models' card."""

_PREFIX = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
_SUFFIX = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScorePairs:
    """Pairs of texts to score, and the requests that do it.

    A model for embeddings has a request for each distinct text, in order of appearance, and others one for each pair.
    """

    pairs: tuple[tuple[str, str], ...]
    requests: tuple[EngineRequest, ...]
    pooler: Pooler
    _places: tuple[tuple[int, ...], ...]

    @staticmethod
    def of(
        processor: InputProcessor,
        pairs: Sequence[tuple[str, str]],
        *,
        request_id: str,
        instruction: str | None = None,
        max_tokens_per_doc: int | None = None,
        max_tokens_per_query: int | None = None,
        params: PoolingParams | None = None,
        priority: int = 0,
        fields: Sequence[tuple[str, str]] | None = None,
    ) -> ScorePairs:
        """Check everything and tokenize; raises ``RequestError``.

        ``instruction`` tells a reranker what relevant means; of each document at most ``max_tokens_per_doc`` tokens
        are read, and of each query ``max_tokens_per_query``.  ``fields`` are what the client calls the texts of each
        pair, for errors.
        """
        params = params or PoolingParams()
        fields = fields or [("queries", "documents")] * len(pairs)
        pooler = _pooler(processor, params)
        longest = {"max_tokens_per_query": max_tokens_per_query, "max_tokens_per_doc": max_tokens_per_doc}
        for name, most in longest.items():
            if most is not None and most < 1:
                raise RequestError(f"{name} is {most}; it must be at least 1, or absent", param=name)
        cut_query = lru_cache(maxsize=1)(partial(_cut, processor, max_tokens_per_query))  # one query for all documents
        cut = [
            (cut_query(query, query_field), _cut(processor, max_tokens_per_doc, document, field))
            for (query, document), (query_field, field) in zip(pairs, fields, strict=True)
        ]
        named: list[tuple[Prompt, str]]
        places: list[tuple[int, ...]]
        if pooler.task == "embed":
            _refuse(instruction, "a model for embeddings takes none: write it before the query")
            first_field: dict[str, str] = {}
            for pair, names in zip(cut, fields, strict=True):
                for text, name in zip(pair, names, strict=True):
                    first_field.setdefault(text, name)
            number = {text: index for index, text in enumerate(first_field)}
            named, places = list(first_field.items()), [(number[query], number[document]) for query, document in cut]
        else:
            named = [
                (_pair_prompt(pooler, pair, instruction, params, names), names[1])
                for pair, names in zip(cut, fields, strict=True)
            ]
            places = [(index,) for index in range(len(cut))]
        requests = tuple(
            pooler.request(prompt, request_id=f"{request_id}-{index}", priority=priority, prompt_field=field)
            for index, (prompt, field) in enumerate(named)
        )
        return ScorePairs(pairs=tuple(pairs), requests=requests, pooler=pooler, _places=tuple(places))

    def scores(self, outputs: Sequence[RequestOutput]) -> list[float]:
        """The score of each pair; ``outputs`` has one element per request."""
        values = [self.pooler.values(output).astype(np.float64) for output in outputs]
        if self.pooler.task == "embed":
            return [float(values[query] @ values[document]) for query, document in self._places]
        return [float(values[place][0]) for (place,) in self._places]

    def outputs(self, outputs: Sequence[RequestOutput]) -> list[ScoringRequestOutput]:
        """The score of each pair, with the tokens that were read for it."""
        found = []
        for places, score in zip(self._places, self.scores(outputs), strict=True):
            read = [outputs[place] for place in places]
            found.append(
                ScoringRequestOutput(
                    request_id=read[-1].request_id,
                    outputs=ScoringOutput(score=score),
                    prompt_token_ids=[token_id for one in read for token_id in one.prompt_token_ids],
                    num_cached_tokens=sum(one.num_cached_tokens for one in read),
                )
            )
        return found


def _pooler(processor: InputProcessor, params: PoolingParams) -> Pooler:
    """What makes scores: of a classifier with a single label, or of embeddings."""
    classifier = processor.model.classifier
    if classifier is None and processor.model.convert != "embed":
        raise RequestError(
            "this model is not served for scores; serve a reranker or a model for embeddings, or start with "
            "--convert classify or embed",
            param="model",
        )
    if classifier is None:
        return Pooler.of(processor, replace(params, use_activation=None))
    if classifier.per_token or len(classifier.labels) != 1:
        what = "gives scores to each token" if classifier.per_token else f"has {len(classifier.labels)} labels"
        raise RequestError(
            f"this model {what}, and the score of a pair is that of one label: send the texts to /classify or "
            "/pooling, or serve a reranker",
            param="model",
        )
    # the prompt of a pair is cut as it is written
    return Pooler.of(processor, replace(params, truncate_prompt_tokens=None), "classify")


def _refuse(instruction: str | None, why: str) -> None:
    if instruction is not None:
        raise RequestError(f"instruction is {instruction[:80]!r}; {why}", param="instruction")


def fields_of(
    queries: str | Sequence[str], documents: str | Sequence[str], names: tuple[str, str] = ("queries", "documents")
) -> list[tuple[str, str]]:
    """What a client calls the texts of each pair of ``paired``: ``documents[3]`` for one of a list."""
    first, second = (
        [name] if isinstance(texts, str) else [f"{name}[{number}]" for number in range(len(texts))]
        for name, texts in zip(names, (queries, documents), strict=True)
    )
    return paired(first, second)


def paired(queries: str | Sequence[str], documents: str | Sequence[str]) -> list[tuple[str, str]]:
    """One query with each document, or as many queries as documents, pair by pair; raises ``RequestError``."""
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


def _pair_prompt(
    pooler: Pooler, pair: tuple[str, str], instruction: str | None, params: PoolingParams, fields: tuple[str, str]
) -> list[int]:
    """The prompt of one pair, of parts that are tokenized one by one: only the one in the middle is cut.

    ``truncate_prompt_tokens`` None is any length, -1 the model's context: the end of the document is cut off to fit, or
    with ``truncation_side`` left the beginning of the pair.
    """
    processor, longest = pooler.processor, params.truncate_prompt_tokens
    for text, field in zip(pair, fields, strict=True):
        check_text(field, text)
    parts = _parts(pooler, pair, instruction, must_fit=longest is None, field=fields[1])
    if longest is not None:
        context, around = processor.max_model_len, sum(map(len, parts)) - len(parts[len(parts) // 2])
        room = (context if longest == -1 else longest) - around
        if not 0 < room <= context - around:
            raise RequestError(
                f"truncate_prompt_tokens is {longest}; it must be -1 (what the context allows) or from {around + 1} "
                f"to {context}, of which the template takes {around}",
                param="truncate_prompt_tokens",
            )
        body = parts[len(parts) // 2]
        parts[len(parts) // 2] = body[-room:] if params.truncation_side == "left" else body[:room]
    return [token_id for part in parts for token_id in part]


def _parts(
    pooler: Pooler, pair: tuple[str, str], instruction: str | None, *, must_fit: bool, field: str
) -> list[list[int]]:
    """The tokens before, of and after the pair, or only those of the pair."""
    processor, (query, document) = pooler.processor, pair
    if processor.chat.writes_pairs:
        if not must_fit:
            raise RequestError(
                "truncate_prompt_tokens would cut the model's template; set max_tokens_per_doc",
                param="truncate_prompt_tokens",
            )
        messages = [{"role": "query", "content": query}, {"role": "document", "content": document}]
        if instruction is not None:
            messages.insert(0, {"role": "system", "content": instruction})
        texts: tuple[str, ...] = (processor.chat.render(messages, {"add_generation_prompt": True}).text,)
    elif pooler.classifier.answers == YES_OR_NO.answers:
        body = f"<Instruct>: {instruction or INSTRUCTION}\n<Query>: {query}\n<Document>: {document}"
        texts = (_PREFIX, body, _SUFFIX)
    else:
        _refuse(instruction, "this model takes none: write it before the query")
        return [processor.pair_token_ids(query, document, must_fit=must_fit, param=field)]
    return [processor.text_token_ids(text, add_special_tokens=False, must_fit=must_fit, param=field) for text in texts]


def _cut(processor: InputProcessor, max_tokens: int | None, text: str, field: str) -> str:
    if max_tokens is None or processor.tokenizer is None:
        return text
    token_ids = processor.text_token_ids(text, add_special_tokens=False, may_be_empty=True, param=field)
    return text if len(token_ids) <= max_tokens else str(processor.tokenizer.decode(token_ids[:max_tokens]))
