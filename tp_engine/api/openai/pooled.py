"""Embeddings, classes, scores, ranks and token ids: the requests of OpenAI and vLLM that generate no token.

``/v1/embeddings`` is OpenAI's.  The others are vLLM's; ``/rerank`` is also that of Jina and Cohere.
"""

from __future__ import annotations

import base64
import time
import uuid
from collections.abc import Sequence
from typing import Any, ClassVar, Literal, TypeAlias

from pydantic import Field

from tp_engine.api.input_processor import InputProcessor
from tp_engine.api.openai import foreign_fields
from tp_engine.api.openai.answer_shape import JsonObject
from tp_engine.api.openai.chat.body import chat_prompt
from tp_engine.api.openai.encoded_vectors import EmbedDtype, Endianness, encoded_vector
from tp_engine.api.openai.protocol import ChatBody, PromptBody, RequestBody, ThinkingBody
from tp_engine.api.openai.requests import PreparedBody
from tp_engine.api.openai.sampling import listed_prompts
from tp_engine.api.pooling import Pooler, PoolingParams
from tp_engine.api.scoring import ScorePairs, fields_of, paired
from tp_engine.engine.messages import ModelInfo
from tp_engine.errors import RequestError, shown
from tp_engine.plan import FloatArray
from tp_engine.requests.outputs import RequestOutput


class InputBody(PromptBody):
    """The fields of all bodies about texts: ``input``, or ``messages`` that the chat template writes as one text, as in
    vLLM.

    A kind of body has a task (None: the model's own), a prefix for its answers' ids, and an ``entry`` for each input.
    """

    foreign = foreign_fields.INPUTS
    id_prefix: ClassVar[str]
    pooling_task: ClassVar[str | None] = None

    input: str | list[str] | list[int] | list[list[int]] | None = None
    messages: list[dict[str, Any]] | None = Field(None, min_length=1)
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = None
    use_activation: bool | None = None

    def entry(self, values: FloatArray, model: ModelInfo) -> JsonObject:
        """The part of the answer about one input, for which the model gave ``values``."""
        raise NotImplementedError  # each kind of body has its own


class VectorBody(InputBody):
    """A body whose answers are arrays: lists of numbers, or base64 of ``embed_dtype`` in ``endianness``, by default
    float32 and little, as OpenAI's clients expect."""

    encoding_format: Literal["float", "base64"] | None = None
    embed_dtype: EmbedDtype | None = None
    endianness: Endianness | None = None
    dimensions: int | None = None

    def shown(self, values: FloatArray) -> Any:
        """An array in the requested form."""
        if self.encoding_format == "base64":
            encoded = encoded_vector(values, self.embed_dtype or "float32", self.endianness or "little")
            return base64.b64encode(encoded).decode()
        return values.tolist()


class EmbeddingBody(VectorBody):
    """``POST /v1/embeddings``.  ``normalize`` is a former name of ``use_activation``."""

    id_prefix = "embd"
    pooling_task = "embed"

    normalize: bool | None = None

    def entry(self, values: FloatArray, model: ModelInfo) -> JsonObject:
        return {"object": "embedding", "embedding": self.shown(values)}


class PoolingBody(VectorBody):
    """``POST /pooling``: the results of a ``task``, by default the model's own."""

    foreign = foreign_fields.POOLING
    id_prefix = "pool"

    task: str | None = None

    def entry(self, values: FloatArray, model: ModelInfo) -> JsonObject:
        return {"object": "pooling", "data": self.shown(values)}


class ClassifyBody(InputBody):
    """``POST /classify``.  ``activation`` is a former name of ``use_activation``."""

    id_prefix = "classify"
    pooling_task = "classify"

    activation: bool | None = None

    def entry(self, values: FloatArray, model: ModelInfo) -> JsonObject:
        assert model.classifier is not None
        labels = model.classifier.labels
        return {"label": labels[int(values.argmax())], "probs": values.tolist(), "num_classes": len(labels)}


class PairsBody(PromptBody):
    """The fields of bodies about pairs of a query and a document; ``use_activation`` False leaves a classifier's scores
    as they are."""

    foreign = foreign_fields.PAIRS

    instruction: str | None = None
    max_tokens_per_doc: int | None = None
    max_tokens_per_query: int | None = None
    use_activation: bool | None = None


class ScoreBody(PairsBody):
    """``POST /score``: ``queries`` and ``documents``, or by their former names ``text_1`` and ``text_2``."""

    queries: str | list[str] | None = None
    documents: str | list[str] | None = None
    text_1: str | list[str] | None = None
    text_2: str | list[str] | None = None


class RerankBody(PairsBody):
    """``POST /rerank``.  A document is text, or an object with ``text``."""

    query: str
    documents: list[str | dict[str, Any]]
    top_n: int | None = None
    return_documents: bool | None = None


AnyPooledBody: TypeAlias = InputBody | ScoreBody | RerankBody


def check_pooled(body: AnyPooledBody) -> None:
    """Raise ``RequestError`` for fields that do not fit together."""
    if body.stream:
        raise RequestError("stream is true; these answers have no streams, leave it out", param="stream")
    if isinstance(body, InputBody):
        for former in ("normalize", "activation"):
            if getattr(body, former, None) is not None:
                raise RequestError(f"{former} is no field any more; its name is use_activation", param=former)
        if body.input is None and body.messages is None:
            raise RequestError("input is missing; give it, or messages", param="input")
        if body.input is not None and body.messages is not None:
            raise RequestError("input and messages are both given; give one of them", param="messages")
        if body.input is not None:
            listed_prompts("input", body.input)
        return
    if isinstance(body, RerankBody) and body.top_n is not None and body.top_n < 0:
        raise RequestError(f"top_n is {body.top_n}; it must be at least 0, which gives all", param="top_n")
    queries, documents, _ = _texts(body)
    paired(queries, documents)


def prepare_pooled(body: AnyPooledBody, processor: InputProcessor, model: str) -> PreparedBody:
    """Check and tokenize; raises ``RequestError``.  ``model`` is the name to answer with."""
    check_pooled(body)
    if isinstance(body, InputBody):
        return _prepare_inputs(body, processor, model)
    envelope = _Envelope(body, "score" if isinstance(body, ScoreBody) else "rerank", model)
    queries, documents, names = _texts(body)
    pairs = ScorePairs.of(
        processor,
        paired(queries, documents),
        fields=fields_of(queries, documents, names),
        request_id=envelope.engine_id,
        instruction=body.instruction,
        max_tokens_per_doc=body.max_tokens_per_doc,
        max_tokens_per_query=body.max_tokens_per_query,
        params=PoolingParams(
            use_activation=body.use_activation,
            truncate_prompt_tokens=body.truncate_prompt_tokens,
            truncation_side=body.truncation_side,
            cache_salt=body.cache_salt,
        ),
        priority=body.priority or 0,
    )

    def answer(outputs: Sequence[RequestOutput]) -> JsonObject:
        scores = pairs.scores(outputs)
        if isinstance(body, ScoreBody):
            data = [{"index": index, "object": "score", "score": score} for index, score in enumerate(scores)]
            return envelope.listed(data, outputs)
        return {
            "id": envelope.answer_id, "model": model, "usage": _usage(outputs), "results": _ranked(body, scores),
        }  # fmt: skip

    return PreparedBody(requests=list(pairs.requests), answer=answer)


class _Envelope:
    """What surrounds the data of an answer; ``engine_id`` is unique, where a client may repeat its request ids."""

    def __init__(self, body: AnyPooledBody, kind: str, model: str) -> None:
        unique = uuid.uuid4().hex
        self.answer_id = f"{kind}-{body.request_id or unique}"
        self.engine_id = f"{self.answer_id}-{unique[:12]}"
        self.created, self.model = int(time.time()), model

    def listed(self, data: list[JsonObject], outputs: Sequence[RequestOutput]) -> JsonObject:
        return {
            "id": self.answer_id, "object": "list", "created": self.created, "model": self.model, "data": data,
            "usage": _usage(outputs),
        }  # fmt: skip


def _prepare_inputs(body: InputBody, processor: InputProcessor, model: str) -> PreparedBody:
    params = PoolingParams(
        dimensions=body.dimensions if isinstance(body, VectorBody) else None,
        use_activation=body.use_activation,
        truncate_prompt_tokens=body.truncate_prompt_tokens,
        truncation_side=body.truncation_side,
        add_special_tokens=body.add_special_tokens is not False,
        cache_salt=body.cache_salt,
    )
    task = body.task if isinstance(body, PoolingBody) else body.pooling_task
    pooler = Pooler.of(processor, params, task)
    envelope = _Envelope(body, body.id_prefix, model)
    is_list = isinstance(body.input, list) and not isinstance(next(iter(body.input), None), int)
    prompts = listed_prompts("input", body.input) if body.input is not None else [_chat_token_ids(body, processor)]
    whole = "messages" if body.input is None else "input"
    requests = [
        pooler.request(
            prompt,
            request_id=f"{envelope.engine_id}-{number}",
            priority=body.priority or 0,
            prompt_field=f"input[{number}]" if is_list else whole,
        )
        for number, prompt in enumerate(prompts)
    ]

    def answer(outputs: Sequence[RequestOutput]) -> JsonObject:
        data = [
            {"index": index, **body.entry(pooler.values(output), processor.model)}
            for index, output in enumerate(outputs)
        ]
        return envelope.listed(data, outputs)

    return PreparedBody(requests=requests, answer=answer)


def _chat_token_ids(body: InputBody, processor: InputProcessor) -> list[int]:
    """The prompt that the chat template makes of ``messages``; it ends with the last message."""
    fields = {
        "messages": body.messages,
        "chat_template_kwargs": body.chat_template_kwargs,
        "add_generation_prompt": bool(body.add_generation_prompt),
        "continue_final_message": bool(body.continue_final_message),
    }
    return processor.text_token_ids(
        chat_prompt(ChatBody.model_validate(fields), processor).text,
        add_special_tokens=bool(body.add_special_tokens),
        must_fit=body.truncate_prompt_tokens is None,
        param="messages",
    )


def _texts(body: ScoreBody | RerankBody) -> tuple[str | list[str], str | list[str], tuple[str, str]]:
    """The queries, the documents, and the names of their fields."""
    if isinstance(body, RerankBody):
        return body.query, [_text(number, one) for number, one in enumerate(body.documents)], ("query", "documents")
    queries, documents = _either(body, "queries", "text_1"), _either(body, "documents", "text_2")
    return getattr(body, queries), getattr(body, documents), (queries, documents)


def _either(body: ScoreBody, name: str, former: str) -> str:
    """The one of the two fields that is given."""
    given = [one for one in (name, former) if getattr(body, one) is not None]
    if len(given) != 1:
        what = "both are given" if given else "neither is given"
        raise RequestError(f"{name} and {former} are names of one field, and {what}; give {name}", param=name)
    return given[0]


def _text(number: int, document: str | dict[str, Any]) -> str:
    text = document.get("text") if isinstance(document, dict) else document
    if not isinstance(text, str):
        raise RequestError(
            f"documents[{number}] is an object with the keys {shown(sorted(map(str, document)))}; a document is text, "
            'or an object with "text"',
            param="documents",
        )
    return text


def _ranked(body: RerankBody, scores: Sequence[float]) -> list[JsonObject]:
    """The best documents first; equal ones in the order of the request."""
    order = sorted(range(len(scores)), key=lambda index: -scores[index])[: body.top_n or None]
    results: list[JsonObject] = [{"index": index, "relevance_score": scores[index]} for index in order]
    if body.return_documents is not False:
        for result in results:
            index = result["index"]
            result["document"] = {"text": _text(index, body.documents[index])}
    return results


def _usage(outputs: Sequence[RequestOutput]) -> JsonObject:
    num_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    num_cached = sum(output.num_cached_tokens for output in outputs)
    return {
        "prompt_tokens": num_tokens, "total_tokens": num_tokens, "completion_tokens": 0,
        "prompt_tokens_details": {"cached_tokens": num_cached},
    }  # fmt: skip


class TokenizeBody(ThinkingBody):
    """``POST /tokenize``: either a ``prompt`` or the ``messages`` of a chat."""

    foreign = foreign_fields.TOKENS

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = Field(None, min_length=1)
    tools: list[Any] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(RequestBody):
    """``POST /detokenize``."""

    model: str | None = None
    tokens: list[int]


def tokenize(body: TokenizeBody, processor: InputProcessor) -> dict[str, Any]:
    """The answer: the prompt's token ids of a generation request with the same fields."""
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("give either prompt or messages", param="prompt" if body.prompt is None else "messages")
    if body.prompt is not None:
        adds_special = body.add_special_tokens is not False
        token_ids = processor.text_token_ids(body.prompt, add_special_tokens=adds_special, may_be_empty=True)
    else:
        names = TokenizeBody.model_fields.keys() & ChatBody.model_fields.keys()
        given = {name: value for name in names if (value := getattr(body, name)) is not None}
        chat, adds_special = chat_prompt(ChatBody.model_validate(given), processor), bool(body.add_special_tokens)
        token_ids = processor.chat_tokens(chat, add_special_tokens=adds_special, stages=False)["prompt_token_ids"]
    texts = processor.tokenizer.convert_ids_to_tokens(token_ids) if body.return_token_strs else None  # type: ignore[union-attr]
    return {"count": len(token_ids), "max_model_len": processor.max_model_len, "tokens": token_ids, "token_strs": texts}


def detokenize(body: DetokenizeBody, processor: InputProcessor) -> dict[str, Any]:
    """The answer: the text of ``tokens``, special tokens included."""
    if processor.tokenizer is None:
        raise RequestError("the model has no tokenizer", param="tokens")
    processor.check_size("tokens", len(body.tokens), "tokens")
    if body.tokens:
        processor.check_token_ids(body.tokens, param="tokens")
    return {"prompt": processor.tokenizer.decode(body.tokens)}
