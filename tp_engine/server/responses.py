"""The way of one ``/v1/responses`` request: the chat that answers it, turned into items and typed events."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterable, Mapping
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tp_engine.api.openai.answer_shape import JsonObject
from tp_engine.api.openai.errors import describe_error
from tp_engine.api.openai.protocol import parse_body
from tp_engine.api.openai.responses_api.events import ResponseWriter, whole_response
from tp_engine.api.openai.responses_api.protocol import ResponsesBody
from tp_engine.api.openai.responses_api.requests import PreparedResponse, prepare_response
from tp_engine.log import get_logger
from tp_engine.server.generation import engine_batches, engine_updates, whole_answer
from tp_engine.server.guards import read_body
from tp_engine.server.merge import merge
from tp_engine.server.replies import EventStream, json_reply, until_disconnect
from tp_engine.server.request_ids import name_request
from tp_engine.server.state import ServerState
from tp_engine.server.streaming import Batches, ChunkWriter, Updates

logger = get_logger(__name__)


async def answer_response(state: ServerState, request: Request) -> Response:
    """Serve one request; raises ``RequestError`` and ``HttpError`` before anything has been sent."""
    state.check_room()
    body = parse_body(ResponsesBody, await read_body(request, state.config))
    model = state.model_name(body.model)
    body.request_id = name_request(request.scope["state"], body.request_id)
    with contextlib.ExitStack() as held:
        processor = state.llm.input_processor
        held.enter_context(state.admission.hold(1))
        prepared = await asyncio.get_running_loop().run_in_executor(
            state.tokenizing, prepare_response, body, processor, model, state.sampling_defaults
        )
        if body.stream:
            batches = merge([engine_batches(state, engine_request) for engine_request in prepared.requests])
            return EventStream(response_events(prepared, batches), held.pop_all())
        updates = merge([engine_updates(state, engine_request) for engine_request in prepared.requests])
        return json_reply(await until_disconnect(request.receive, _whole(prepared, updates)))


async def _whole(prepared: PreparedResponse, updates: Updates) -> JsonObject:
    return whole_response(prepared.shape, await whole_answer(prepared.chat, updates))


async def response_events(prepared: PreparedResponse, batches: Batches) -> AsyncGenerator[bytes, None]:
    """All events of a streamed response, those of one batch together; ``batches`` is closed at the end.

    What fails after the first of them ends it as ``response.failed``.
    """
    chunks, writer = ChunkWriter(prepared.chat_body, prepared.chat), ResponseWriter(prepared.shape)
    begun = False
    try:
        async with contextlib.aclosing(batches):
            async for number, updates in batches:
                events = [] if begun else writer.begin()
                begun = True
                for update in updates:
                    for choice in chunks.choices(number, update):
                        events += writer.take(choice)
                if events:
                    yield _data(events)
        yield _data(writer.finish(chunks.usage.as_json()))
    except Exception as error:
        if not begun:
            raise
        logger.error("response %s failed: %s", prepared.shape.response_id, error)
        yield _data(writer.fail(describe_error(error)[1]["error"]["message"]))


def _data(events: Iterable[Mapping[str, Any]]) -> bytes:
    return b"".join([b"event: %s\ndata: %s\n\n" % (one["type"].encode(), msgspec.json.encode(one)) for one in events])
