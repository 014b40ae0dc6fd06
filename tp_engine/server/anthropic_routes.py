"""The routes of Anthropic's Messages API, which answer errors in its form."""

from fastapi import FastAPI, Request
from starlette.responses import Response

from tp_engine.api.anthropic.protocol import CountTokensBody, MessagesBody, anthropic_error
from tp_engine.api.anthropic.requests import count_tokens
from tp_engine.server.bodies import in_thread, read_body
from tp_engine.server.generation import answer
from tp_engine.server.openapi import takes
from tp_engine.server.replies import json_reply, shape_errors
from tp_engine.server.state import ServerState

MESSAGES_PATH = "/v1/messages"


def add_anthropic_routes(app: FastAPI, state: ServerState) -> None:
    """Add messages, and the count of their prompts' tokens."""

    @app.post(MESSAGES_PATH, name="messages", **takes(MessagesBody, error="AnthropicError"))
    async def messages(request: Request) -> Response:
        """Answer a conversation with blocks of thinking, text and tool use; as Anthropic's API."""
        return await answer(state, request, MessagesBody)

    @app.post(f"{MESSAGES_PATH}/count_tokens", name="count_tokens", **takes(CountTokensBody, error="AnthropicError"))
    async def counted(request: Request) -> Response:
        """The number of prompt tokens of a body of ``/v1/messages``."""
        body = await read_body(CountTokensBody, request, state)
        state.model_name(body.model)
        with state.limit.hold(1):
            return json_reply(await in_thread(request, state, count_tokens, body, state.llm.input_processor))


def shape_own_errors(path: str) -> None:
    """Give errors Anthropic's form if ``path`` is one of these routes, also those raised before the route."""
    if f"{path}/".startswith(f"{MESSAGES_PATH}/"):
        shape_errors(anthropic_error)
