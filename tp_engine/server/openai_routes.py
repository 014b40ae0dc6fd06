"""The routes of OpenAI's API (completions, chats, responses, embeddings, models) and its kin (classes, scores, tokens).

``/invocations`` is the one route to which Amazon SageMaker sends all requests; ``/ping`` is its health check.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from starlette.responses import Response

from tp_engine.api.bodies import Body, num_prompts
from tp_engine.api.input_processor import InputProcessor
from tp_engine.api.openai.chat_batches import ChatBatchBody
from tp_engine.api.openai.cohere import CohereEmbedBody
from tp_engine.api.openai.errors import HttpError
from tp_engine.api.openai.pooled import (
    ClassifyBody,
    DetokenizeBody,
    EmbeddingBody,
    PoolingBody,
    RerankBody,
    ScoreBody,
    TokenizeBody,
    detokenize,
    tokenize,
)
from tp_engine.api.openai.protocol import ChatBody, CompletionBody
from tp_engine.api.openai.rendering import input_tokens, rendered, tokenizer_info
from tp_engine.api.openai.responses_api.protocol import ResponsesBody
from tp_engine.errors import RequestError
from tp_engine.server.bodies import in_thread, parsed, parsed_by, read_body, read_data
from tp_engine.server.generation import answer, answer_body
from tp_engine.server.openapi import ANSWERS, takes
from tp_engine.server.replies import json_reply
from tp_engine.server.state import ServerState

# By a field that only one kind of body has: that body.  The first field that a body has counts.
_KINDS: dict[str, type[Body]] = {
    "messages": ChatBody,
    "prompt": CompletionBody,
    "input": EmbeddingBody,
    "query": RerankBody,
    "queries": ScoreBody,
    "text_1": ScoreBody,
}


# What runs prompts: the body, the route's name, its paths, and what it does.
_ANSWERED: tuple[tuple[type[Body], str, tuple[str, ...], str], ...] = (
    (CompletionBody, "completions", ("/v1/completions",), "Continue one or several prompts, as text or token ids."),
    (ChatBody, "chat_completions", ("/v1/chat/completions",), "Answer a conversation."),
    (
        ChatBatchBody,
        "chat_batch",
        ("/v1/chat/completions/batch",),
        "Answer several conversations, each with a choice of its own.",
    ),
    (
        ResponsesBody,
        "responses",
        ("/v1/responses",),
        "Answer text or a list of items with a list of items; nothing is stored.",
    ),
    (
        EmbeddingBody,
        "embeddings",
        ("/v1/embeddings",),
        "The vectors of one or several inputs, as text or token ids.",
    ),
    (CohereEmbedBody, "cohere_embed", ("/v2/embed",), "The vectors of texts, as Cohere's API."),
    (ClassifyBody, "classify", ("/v1/classify", "/classify"), "How likely each label of a classifier is for inputs."),
    (
        PoolingBody,
        "pooling",
        ("/v1/pooling", "/pooling"),
        "What the model makes of inputs, as numbers: vectors or scores.",
    ),
    (ScoreBody, "score", ("/v1/score", "/score"), "How well documents answer queries."),
    (
        RerankBody,
        "rerank",
        ("/v2/rerank", "/v1/rerank", "/rerank"),
        "Documents in the order in which they answer a query, the best first.",
    ),
)

PROMPT_PATHS = ("/invocations", *(path for _, _, paths, _ in _ANSWERED for path in paths))
"""The routes that run prompts, which refuse requests while there is no room."""


def add_openai_routes(app: FastAPI, state: ServerState) -> None:
    """Add everything under ``/v1/``, and what vLLM, Jina and Cohere have beside it."""
    _add_answered(app, state)
    _add_tokens(app, state)
    _add_models(app, state)


def _add_answered(app: FastAPI, state: ServerState) -> None:
    def handler(kind: type[Body]) -> Callable[[Request], Awaitable[Response]]:
        async def answered(request: Request) -> Response:
            return await answer(state, request, kind)

        return answered

    for kind, name, paths, text in _ANSWERED:
        for path in paths:
            app.post(path, name=name, description=text, **takes(kind))(handler(kind))

    @app.get("/v1/responses/{response_id}", responses=ANSWERS)
    @app.delete("/v1/responses/{response_id}", responses=ANSWERS)
    async def stored_response(response_id: str) -> Response:
        """404: responses are not stored."""
        raise HttpError(
            404,
            f"there is no response {response_id[:80]!r}; this server stores none, keep the answer to your request",
            code="response_not_found",
        )

    @app.post("/invocations", responses=ANSWERS)
    async def invocations(request: Request) -> Response:
        """A chat, a completion, embeddings, scores or a ranking, by the fields of the body."""
        state.check_room()
        data = await read_data(request, state)
        names = await parsed_by(_names, data, request, state)
        kinds = _KINDS | ({"input": ClassifyBody} if state.llm.model_info.convert == "classify" else {})
        for name, kind in kinds.items():
            if name in names:
                return await answer_body(state, request, await parsed(kind, data, request, state))
        raise RequestError(
            f"the body has none of the fields that tell what it asks for: {', '.join(_KINDS)}; give one of them"
        )


def _names(data: bytearray) -> Collection[str]:
    """The names of a body's fields."""
    try:
        return msgspec.json.decode(data, type=dict[str, msgspec.Raw]).keys()
    except (msgspec.DecodeError, RecursionError) as error:
        raise RequestError(f"the body is not a JSON object: {error}") from None


def _add_tokens(app: FastAPI, state: ServerState) -> None:
    """Long texts do not hold up the event loop; the limit on prompts counts these requests, too."""

    def handler(kind: type[Any], work: Callable[[Any, InputProcessor], dict[str, Any]]) -> Any:
        async def replied(request: Request) -> Response:
            body = await read_body(kind, request, state)
            state.model_name(body.model)
            with state.limit.hold(1):
                return json_reply(await in_thread(request, state, work, body, state.llm.input_processor))

        return replied

    def render(kind: type[ChatBody | CompletionBody]) -> Any:
        async def replied(request: Request) -> Response:
            body = await read_body(kind, request, state)
            model, processor = state.model_name(body.model), state.llm.input_processor
            with state.limit.hold(*num_prompts(body)):
                return json_reply(
                    await in_thread(request, state, rendered, body, processor, model, state.sampling_defaults)
                )

        return replied

    bodies: tuple[type[ChatBody | CompletionBody], ...] = (ChatBody, CompletionBody)
    for kind, path in zip(bodies, ("/v1/chat/completions", "/v1/completions"), strict=True):
        text = "What the engine would get of the body: token ids and sampling parameters."
        name = f"rendered_{kind.__name__}"
        app.post(f"{path}/render", name=name, description=text, **takes(kind))(render(kind))

    text = "The number of tokens of the prompt that a body of ``/v1/responses`` has."
    app.post("/v1/responses/input_tokens", name="input_tokens", description=text, **takes(ResponsesBody))(
        handler(ResponsesBody, input_tokens)
    )

    @app.get("/tokenizer_info", responses=ANSWERS)
    async def told_tokenizer() -> Response:
        """The tokenizer's configuration, with its chat template."""
        return json_reply(await asyncio.to_thread(tokenizer_info, state.llm.input_processor))

    text = "The token ids of a text, or of a chat as its template writes it."
    app.post("/tokenize", name="tokenized", description=text, **takes(TokenizeBody))(handler(TokenizeBody, tokenize))
    text = "The text of token ids."
    app.post("/detokenize", name="detokenized", description=text, **takes(DetokenizeBody))(
        handler(DetokenizeBody, detokenize)
    )


def _add_models(app: FastAPI, state: ServerState) -> None:
    """Models are listed only while ``/health`` is 200: clients take a listed model for one that is served."""

    @app.get("/v1/models", responses=ANSWERS)
    async def models() -> Response:
        """The names under which the model is served, and its adapters."""
        max_model_len = state.healthy_llm().model_info.max_model_len
        cards = [_model_card(state, name, max_model_len) for name in (*state.model_names, *state.adapters)]
        return json_reply({"object": "list", "data": cards})

    @app.get("/v1/models/{name:path}", responses=ANSWERS)
    async def model(name: str) -> Response:
        """One of the names; 404 for any other."""
        max_model_len = state.healthy_llm().model_info.max_model_len
        return json_reply(_model_card(state, state.model_name(name), max_model_len))


def _model_card(state: ServerState, name: str, max_model_len: int) -> dict[str, object]:
    card: dict[str, object] = {"id": name, "object": "model", "created": state.created, "owned_by": "tp_engine"}
    root, parent = state.model_names[0], None
    if name in state.adapters:
        root, parent = state.adapters[name], state.model_names[0]
    return card | {"root": root, "parent": parent, "max_model_len": max_model_len}
