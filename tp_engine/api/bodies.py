"""The bodies of all endpoints that run prompts: how many prompts one has, and how they are prepared."""

from collections.abc import Mapping
from typing import Any, TypeAlias

from pydantic import BaseModel

from tp_engine.api.anthropic.protocol import CountTokensBody, MessagesBody
from tp_engine.api.anthropic.requests import prepare_message
from tp_engine.api.input_processor import InputProcessor
from tp_engine.api.openai.chat_batches import ChatBatchBody, prepare_chats
from tp_engine.api.openai.cohere import CohereEmbedBody, prepare_cohere
from tp_engine.api.openai.pooled import AnyPooledBody, InputBody, RerankBody, ScoreBody, prepare_pooled
from tp_engine.api.openai.protocol import ChatBody, CompletionBody
from tp_engine.api.openai.requests import PreparedBody, prepare
from tp_engine.api.openai.responses_api.protocol import ResponsesBody
from tp_engine.api.openai.responses_api.requests import prepare_response
from tp_engine.api.openai.sampling import listed_prompts
from tp_engine.images.sources import WITH_PARTS, has_image_part

Body: TypeAlias = ChatBody | CompletionBody | ResponsesBody | MessagesBody | CohereEmbedBody | AnyPooledBody


def num_prompts(body: Body) -> tuple[int, str]:
    """The number of prompts, inputs or pairs of ``body``, if its fields are consistent, and the field that has
    them."""
    match body:
        case ChatBatchBody():
            return len(body.messages), "messages"
        case CompletionBody():
            return len(listed_prompts("prompt", body.prompt)), "prompt"
        case InputBody(input=given):
            is_one = not isinstance(given, list) or (len(given) > 0 and isinstance(given[0], int))
            return 1 if is_one else len(given or ()), "input"
        case CohereEmbedBody():
            return len(body.listed()), "texts"
        case RerankBody():
            return len(body.documents), "documents"
        case ScoreBody():
            texts = (body.queries, body.text_1, body.documents, body.text_2)
            return max(len(one) if isinstance(one, list) else 1 for one in texts), "documents"
    return 1, "prompt"


def has_image(body: object) -> bool:
    if isinstance(body, CountTokensBody):
        return has_image_part([message.content for message in body.messages])
    return isinstance(body, BaseModel) and has_image_part([getattr(body, name, None) for name in WITH_PARTS])


def forces_calls(body: object) -> bool:
    """Whether ``body`` may force tool calls, so that their schemas must be read."""
    choice = getattr(body, "tool_choice", None)
    kind = choice.get("type") if isinstance(choice, Mapping) else getattr(choice, "type", choice)
    return bool(getattr(body, "tools", None)) and kind not in (None, "auto", "none")


def prepare_body(
    body: Body, processor: InputProcessor, model: str, defaults: Mapping[str, Any] | None = None
) -> PreparedBody:
    """Check and tokenize; raises ``RequestError``.

    ``model`` is the name to answer with.  ``defaults`` are the model's sampling parameters, for fields that the request
    does not set.
    """
    if isinstance(body, MessagesBody):
        return prepare_message(body, processor, model, defaults)
    if isinstance(body, ResponsesBody):
        return prepare_response(body, processor, model, defaults)
    if isinstance(body, ChatBatchBody):
        return prepare_chats(body, processor, model, defaults)
    if isinstance(body, (ChatBody, CompletionBody)):
        return prepare(body, processor, model, defaults)
    if isinstance(body, CohereEmbedBody):
        return prepare_cohere(body, processor, model)
    return prepare_pooled(body, processor, model)
