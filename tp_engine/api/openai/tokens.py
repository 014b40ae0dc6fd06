"""Bodies and answers of ``/tokenize`` and ``/detokenize``, as in vLLM."""

from typing import Any

from pydantic import Field

from tp_engine.api.input_processor import InputProcessor
from tp_engine.api.openai.chat.body import chat_prompt
from tp_engine.api.openai.protocol import ChatBody, RequestBody
from tp_engine.errors import RequestError


class TokenizeBody(RequestBody):
    """``POST /tokenize``: either a ``prompt`` or the ``messages`` of a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = Field(None, min_length=1)
    tools: list[Any] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(RequestBody):
    """``POST /detokenize``."""

    model: str | None = None
    tokens: list[int]


def tokenize(body: TokenizeBody, processor: InputProcessor) -> dict[str, Any]:
    """Return the answer: the prompt's token ids of a generation request with the same fields."""
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
    """Return the answer: the text of ``tokens``, special tokens included."""
    if processor.tokenizer is None:
        raise RequestError("the model has no tokenizer", param="tokens")
    processor.check_size("tokens", len(body.tokens), "tokens")
    if body.tokens:
        processor.check_token_ids(body.tokens, param="tokens")
    return {"prompt": processor.tokenizer.decode(body.tokens)}
