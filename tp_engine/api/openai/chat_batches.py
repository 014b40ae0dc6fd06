"""Several conversations in one body, as vLLM's ``POST /v1/chat/completions/batch``: a choice for each, in order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field

from tp_engine.api.input_processor import InputProcessor
from tp_engine.api.openai.answer_shape import JsonObject
from tp_engine.api.openai.protocol import ChatBody
from tp_engine.api.openai.requests import PreparedAnswer, PreparedBody, prepare
from tp_engine.errors import RequestError
from tp_engine.requests.outputs import RequestOutput

_NOT_HERE = ("stream", "tools", "functions", "use_beam_search")


class ChatBatchBody(ChatBody):
    """A chat whose ``messages`` are lists of messages, one for each conversation."""

    messages: list[Annotated[list[dict[str, Any]], Field(min_length=1)]] = Field(min_length=1)  # type: ignore[assignment]


def prepare_chats(
    body: ChatBatchBody, processor: InputProcessor, model: str, defaults: Mapping[str, Any] | None = None
) -> PreparedBody:
    """The engine requests of several conversations; errors name the conversation."""
    for name in _NOT_HERE:
        if getattr(body, name):
            raise RequestError(f"{name} is not taken with several conversations; send each on its own", param=name)
    fields = {name: value for name in ChatBody.model_fields if (value := getattr(body, name)) is not None}
    chats: list[PreparedAnswer] = []
    for number, messages in enumerate(body.messages):
        try:
            one = ChatBody.model_construct(**{**fields, "messages": messages})
            chats.append(prepare(one, processor, model, defaults))
        except RequestError as error:
            if error.param != "messages":
                raise
            place, text = f"messages[{number}]", str(error).removeprefix("messages")
            said = f"{place}{text}" if text.startswith("[") else f"{place}: {error}"
            raise RequestError(said, param=place, code=error.code) from None

    def answer(outputs: Sequence[RequestOutput]) -> JsonObject:
        answers = [chat.answer([output]) for chat, output in zip(chats, outputs, strict=True)]
        choices = [choice for one in answers for choice in one["choices"]]
        for index, choice in enumerate(choices):
            choice["index"] = index
        usage: JsonObject = {}
        for one in answers:
            _add(usage, one["usage"])
        return answers[0] | {"choices": choices, "usage": usage}

    return PreparedBody(requests=[one.requests[0] for one in chats], answer=answer)


def _add(total: JsonObject, counts: Mapping[str, Any]) -> None:
    """Add the ``counts`` of one answer, and those within, to ``total``."""
    for name, value in counts.items():
        if isinstance(value, Mapping):
            _add(total.setdefault(name, {}), value)
        else:
            total[name] = total.get(name, 0) + value
