"""Cohere's ``POST /v2/embed``: the vectors of texts, in the types that the client asks for."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
from pydantic import Field

from tp_engine.api.input_processor import InputProcessor
from tp_engine.api.openai import foreign_fields
from tp_engine.api.openai.answer_shape import JsonObject
from tp_engine.api.openai.encoded_vectors import encoded_vector, packed_signs
from tp_engine.api.openai.errors import renamed
from tp_engine.api.openai.pooled import EmbeddingBody, prepare_pooled
from tp_engine.api.openai.protocol import PromptBody
from tp_engine.api.openai.requests import PreparedBody
from tp_engine.errors import RequestError, shown
from tp_engine.requests.outputs import RequestOutput
from tp_engine.system.log import get_logger, warn_once

logger = get_logger(__name__)

# Where long texts are cut: the value of ``truncation_side``.
_SIDES: Mapping[str, Literal["left", "right"]] = {"START": "left", "END": "right"}
_NAMES = {"input": "texts", "dimensions": "output_dimension", "truncate_prompt_tokens": "max_tokens"}


class CohereEmbedBody(PromptBody):
    """``texts``, or ``inputs`` whose content is text.  ``input_type`` is a prefix of Cohere's own models."""

    foreign = foreign_fields.TEXTS

    texts: list[str] | None = None
    inputs: list[dict[str, Any]] | None = None
    images: list[str] | None = None
    input_type: str | None = None
    embedding_types: list[Literal["float", "base64", "binary", "ubinary", "int8", "uint8"]] | None = None
    output_dimension: int | None = None
    max_tokens: int | None = Field(None, ge=1)
    truncate: Literal["NONE", "START", "END"] | None = None

    def listed(self) -> list[str]:
        """The texts; raises ``RequestError``."""
        if self.images:
            raise RequestError("images are not embedded here; send texts", param="images")
        if (self.texts is None) == (self.inputs is None):
            raise RequestError("give either texts or inputs", param="texts")
        if self.texts is not None:
            return self.texts
        return [_text(f"inputs[{number}]", one) for number, one in enumerate(self.inputs or ())]


def prepare_cohere(body: CohereEmbedBody, processor: InputProcessor, model: str) -> PreparedBody:
    """The engine requests of texts to embed; ``RequestError`` names a field of ``body``."""
    kinds, texts = body.embedding_types or ["float"], body.listed()
    if {"int8", "uint8"} & {*kinds}:
        raise RequestError(
            "embedding_types has int8 or uint8, whose scale only Cohere's models have; ask for float, base64, binary "
            "or ubinary",
            param="embedding_types",
        )
    if body.input_type:
        warn_once(logger, "input_type adds no prefix to texts: write what the model wants into them")
    truncate = body.truncate or "END"
    fields: dict[str, Any] = {name: getattr(body, name) for name in PromptBody.model_fields}
    fields |= {"input": texts, "dimensions": body.output_dimension, "truncation_side": _SIDES.get(truncate)}
    if truncate in _SIDES:
        fields["truncate_prompt_tokens"] = body.max_tokens or -1
    asked = EmbeddingBody.model_validate({name: value for name, value in fields.items() if value is not None})
    try:
        prepared = prepare_pooled(asked, processor, model)
    except RequestError as error:
        raise renamed(error, _NAMES if body.inputs is None else _NAMES | {"input": "inputs"}) from None

    def answer(outputs: Sequence[RequestOutput]) -> JsonObject:
        found = prepared.answer(outputs)
        vectors = [np.array(one["embedding"], dtype=np.float32) for one in found["data"]]
        return {
            "id": found["id"],
            "response_type": "embeddings_by_type",
            "embeddings": {kind: [_written(kind, one) for one in vectors] for kind in kinds},
            "texts": texts,
            "meta": {
                "api_version": {"version": "2"},
                "billed_units": {"input_tokens": found["usage"]["prompt_tokens"]},
            },
        }

    return replace(prepared, answer=answer)


def _written(kind: str, vector: Any) -> Any:
    """A vector in the form of ``kind``."""
    if kind.endswith("binary"):
        return packed_signs(vector, signed=kind == "binary")
    return (
        base64.b64encode(encoded_vector(vector, "float32", "little")).decode() if kind == "base64" else vector.tolist()
    )


def _text(where: str, given: Mapping[str, Any]) -> str:
    content = given.get("content")
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(parts, list) or not all(isinstance(one, Mapping) for one in parts):
        raise RequestError(f"{where}.content is {shown(content)}; it must be a list of parts of text", param="inputs")
    for part in parts:
        if part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = shown(part.get("type"))
            raise RequestError(f"{where}.content has a part of type {kind}; only text is embedded here", param="inputs")
    return "\n".join(part["text"] for part in parts)
