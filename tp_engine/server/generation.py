"""The way of one generation request: body -> checked engine requests -> a whole answer or a stream."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator

from starlette.requests import Request
from starlette.responses import Response

from tp_engine.api.openai.answer_shape import JsonObject
from tp_engine.api.openai.errors import HttpError
from tp_engine.api.openai.protocol import ChatBody, CompletionBody, parse_body
from tp_engine.api.openai.requests import PreparedAnswer, num_prompts, prepare
from tp_engine.api.request_state import SequenceUpdate
from tp_engine.outputs import RequestOutput
from tp_engine.request import EngineRequest
from tp_engine.server.beam_search import beam_search_answer
from tp_engine.server.guards import read_body
from tp_engine.server.merge import merge
from tp_engine.server.replies import EventStream, json_reply, until_disconnect
from tp_engine.server.request_ids import name_request
from tp_engine.server.state import ServerState
from tp_engine.server.streaming import ChunkWriter


async def answer(state: ServerState, request: Request, kind: type[ChatBody] | type[CompletionBody]) -> Response:
    """Serve one request; raises ``RequestError`` and ``HttpError`` before anything has been sent."""
    state.check_room()
    body = parse_body(kind, await read_body(request, state.config))
    model = state.model_name(body.model)
    body.request_id = name_request(request.scope["state"], body.request_id)
    with contextlib.ExitStack() as held:
        processor = state.llm.input_processor
        held.enter_context(state.admission.hold(num_prompts(body)))
        if body.use_beam_search:
            return json_reply(await until_disconnect(request.receive, beam_search_answer(state, body, model)))
        prepared = await asyncio.get_running_loop().run_in_executor(
            state.tokenizing, prepare, body, processor, model, state.sampling_defaults
        )
        if body.stream:
            batches = merge([engine_batches(state, engine_request) for engine_request in prepared.requests])
            return EventStream(ChunkWriter(body, prepared).events(batches), held.pop_all())
        updates = merge([engine_updates(state, engine_request) for engine_request in prepared.requests])
        return json_reply(await until_disconnect(request.receive, whole_answer(prepared, updates)))


async def whole_answer(
    prepared: PreparedAnswer, updates: AsyncGenerator[tuple[int, SequenceUpdate], None]
) -> JsonObject:
    """The answer without a stream; ``updates`` are pairs of prompt number and update, closed at the end."""
    outputs: dict[int, RequestOutput] = {}
    async with contextlib.aclosing(updates):
        async for number, update in updates:
            if update.request_output is not None:
                outputs[number] = update.request_output
    return prepared.shape.answer([outputs[number] for number in range(len(prepared.requests))], prepared.echoes)


async def engine_updates(state: ServerState, request: EngineRequest) -> AsyncGenerator[SequenceUpdate, None]:
    """The engine's updates of one prompt, timed; a sequence that failed raises."""
    async with contextlib.aclosing(engine_batches(state, request)) as batches:
        async for updates in batches:
            for update in updates:
                yield update


async def engine_batches(state: ServerState, request: EngineRequest) -> AsyncGenerator[list[SequenceUpdate], None]:
    """As ``engine_updates``, with all together that came while the client did not read."""
    with state.running.noted(request.request_id), state.observation(request) as seen:
        async with contextlib.aclosing(state.llm.stream_batches(request)) as stream:
            async for updates in stream:
                for position, update in enumerate(updates):
                    seen.note(update)
                    if update.error is not None:
                        yield updates[:position]
                        raise HttpError(500, update.error, code="generation_failed")
                yield updates
