"""The way of one generation request: body -> checked engine requests -> a whole answer or a stream."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator

from starlette.requests import Request
from starlette.responses import Response

from tp_engine.api.openai_errors import HttpError
from tp_engine.api.openai_protocol import ChatBody, CompletionBody, parse_body
from tp_engine.api.openai_requests import PreparedAnswer, num_prompts, prepare
from tp_engine.api.openai_responses import JsonObject
from tp_engine.api.request_state import SequenceUpdate
from tp_engine.errors import RequestError
from tp_engine.outputs import RequestOutput
from tp_engine.request import EngineRequest
from tp_engine.server.beam_search import beam_search_answer
from tp_engine.server.guards import read_body
from tp_engine.server.merge import merge
from tp_engine.server.replies import EventStream, json_reply, until_disconnect
from tp_engine.server.state import ServerState
from tp_engine.server.streaming import ChunkWriter


async def answer(state: ServerState, request: Request, kind: type[ChatBody] | type[CompletionBody]) -> Response:
    """Serve one request; raises ``RequestError`` and ``HttpError`` before anything has been sent."""
    body = parse_body(kind, await read_body(request, state.config.max_body_bytes))
    model = state.model_name(body.model)
    if body.stream and body.prompt_logprobs is not None:
        raise RequestError("prompt_logprobs do not come in streams; leave stream out", param="prompt_logprobs")
    with contextlib.ExitStack() as held:
        processor = state.llm.input_processor
        held.enter_context(state.admission.hold(num_prompts(body)))
        if body.use_beam_search:
            return json_reply(await until_disconnect(request.receive, beam_search_answer(state, body, model)))
        prepared = await asyncio.get_running_loop().run_in_executor(
            state.tokenizing, prepare, body, processor, model, state.sampling_defaults
        )
        updates = merge([_updates(state, engine_request) for engine_request in prepared.requests])
        if body.stream:
            return EventStream(ChunkWriter(body, prepared).events(updates), held.pop_all())
        return json_reply(await until_disconnect(request.receive, _whole_answer(prepared, updates)))


async def _whole_answer(
    prepared: PreparedAnswer, updates: AsyncGenerator[tuple[int, SequenceUpdate], None]
) -> JsonObject:
    outputs: dict[int, RequestOutput] = {}
    async with contextlib.aclosing(updates):
        async for number, update in updates:
            if update.request_output is not None:
                outputs[number] = update.request_output
    return prepared.shape.answer([outputs[number] for number in range(len(prepared.requests))], prepared.echoes)


async def _updates(state: ServerState, request: EngineRequest) -> AsyncGenerator[SequenceUpdate, None]:
    """The engine's updates of one prompt, timed; a sequence that failed raises."""
    clock = state.metrics.clock(len(request.prompt_token_ids))
    async with contextlib.aclosing(state.llm.stream_request(request)) as stream:
        async for update in stream:
            clock.tick(update.index, len(update.token_ids), update.finish_reason)
            if update.error is not None:
                raise HttpError(500, update.error, code="generation_failed")
            yield update
