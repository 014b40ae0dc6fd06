"""From a Responses body to engine requests and back: the way that the server and the batch job share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tp_engine.api.input_processor import InputProcessor
from tp_engine.api.openai.protocol import ChatBody
from tp_engine.api.openai.requests import PreparedAnswer, prepare
from tp_engine.api.openai.responses import JsonObject
from tp_engine.api.openai.responses_api.chat_body import chat_body, renamed
from tp_engine.api.openai.responses_api.events import whole_response
from tp_engine.api.openai.responses_api.protocol import ResponsesBody
from tp_engine.api.openai.responses_api.shape import ResponseShape
from tp_engine.errors import RequestError
from tp_engine.outputs import RequestOutput
from tp_engine.request import EngineRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedResponse:
    """The chat that answers a response, checked, and the shape of the response."""

    chat_body: ChatBody
    chat: PreparedAnswer
    shape: ResponseShape

    @property
    def requests(self) -> list[EngineRequest]:
        """What the engine is to run: one request."""
        return self.chat.requests

    def answer(self, outputs: Sequence[RequestOutput]) -> JsonObject:
        """The whole response; ``outputs`` has one element."""
        return whole_response(self.shape, self.chat.shape.answer(outputs))


def prepare_response(
    body: ResponsesBody, processor: InputProcessor, model: str, defaults: Mapping[str, Any] | None = None
) -> PreparedResponse:
    """As ``requests.prepare``; raises ``RequestError`` that names a field of ``body``."""
    chat = chat_body(body)
    try:
        prepared = prepare(chat, processor, model, defaults)
    except RequestError as error:
        raise renamed(error) from None
    return PreparedResponse(chat_body=chat, chat=prepared, shape=ResponseShape.of(body, prepared))
