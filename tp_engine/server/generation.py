"""From the body of a generation request to checked engine requests, and to a whole answer or a stream."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Callable

from starlette.requests import Request
from starlette.responses import Response

from tp_engine.api.async_llm import AsyncLLM
from tp_engine.api.beam_search import BeamSearch, gather_or_cancel, request_output
from tp_engine.api.openai.answer_shape import JsonObject
from tp_engine.api.openai.errors import sequence_error
from tp_engine.api.openai.protocol import ChatBody, CompletionBody
from tp_engine.api.openai.requests import PreparedAnswer, PreparedSearches, num_prompts, prepare, prepare_searches
from tp_engine.api.openai.responses_api.protocol import ResponsesBody
from tp_engine.api.openai.responses_api.requests import PreparedResponse, prepare_response
from tp_engine.api.request_state import SequenceUpdate
from tp_engine.errors import RequestError
from tp_engine.outputs import RequestOutput
from tp_engine.request import EngineRequest
from tp_engine.server.bodies import in_thread, read_body
from tp_engine.server.disconnect import until_disconnect
from tp_engine.server.middleware import name_request
from tp_engine.server.replies import EventStream, json_reply
from tp_engine.server.state import ServerState
from tp_engine.server.streaming import Batches, ChunkWriter, ResponseStream, merge

Body = ChatBody | CompletionBody | ResponsesBody


async def answer(state: ServerState, request: Request, kind: type[Body]) -> Response:
    """Serve one request; raises ``RequestError`` and ``HttpError`` before anything has been sent."""
    state.check_room()
    return await answer_body(state, request, await read_body(kind, request, state))


async def answer_body(state: ServerState, request: Request, body: Body) -> Response:
    """As ``answer``, for a body that has been read."""
    model = state.model_name(body.model)
    if body.prompt_cache_key is not None:  # its blocks may come back while the prompt is tokenized
        await state.llm.prefetch(body.prompt_cache_key, body.cache_salt)
    body.request_id = name_request(request.scope["state"], body.request_id)
    with contextlib.ExitStack() as held:
        processor = state.llm.input_processor
        num = 1 if isinstance(body, ResponsesBody) else num_prompts(body)
        held.enter_context(state.limit.hold(num, "prompt"))
        if not isinstance(body, ResponsesBody) and body.use_beam_search:
            searches = await in_thread(request, state, prepare_searches, body, processor, state.llm.model_info, model)
            return json_reply(await until_disconnect(request.receive, _beam_search_answer(state, body, searches)))
        prepared: PreparedAnswer | PreparedResponse
        given = (processor, model, state.sampling_defaults)
        if isinstance(body, ResponsesBody):
            prepared = await in_thread(request, state, prepare_response, body, *given)
        else:
            prepared = await in_thread(request, state, prepare, body, *given)
        batches = merge([update_batches(state, one, prepared.named) for one in prepared.requests])
        if not body.stream:
            return json_reply(await until_disconnect(request.receive, _whole_answer(prepared, batches)))
        writer = ResponseStream(prepared) if isinstance(prepared, PreparedResponse) else ChunkWriter(body, prepared)
        ping_s = state.config.sse_keep_alive_interval
        return EventStream(writer.events(batches), writer.failure, held.pop_all(), ping_s=ping_s)


async def _whole_answer(prepared: PreparedAnswer | PreparedResponse, batches: Batches) -> JsonObject:
    """The answer without a stream; closes ``batches``, pairs of prompt number and updates."""
    return prepared.answer(await whole_outputs(len(prepared.requests), batches))


async def whole_outputs(num_prompts: int, batches: Batches) -> list[RequestOutput]:
    """The output of each prompt, when all have ended; closes ``batches``, pairs of prompt number and updates."""
    outputs: dict[int, RequestOutput] = {}
    async with contextlib.aclosing(batches):
        async for number, updates in batches:
            for update in updates:
                if update.request_output is not None:
                    outputs[number] = update.request_output
    return [outputs[number] for number in range(num_prompts)]


async def update_batches(
    state: ServerState, request: EngineRequest, named: Callable[[RequestError], RequestError] = lambda error: error
) -> AsyncGenerator[list[SequenceUpdate], None]:
    """The engine's updates of one prompt, in batches: all that came while the client did not read.

    Times the prompt; raises ``HttpError`` or ``RequestError``, the latter with the name that ``named`` gives it, for a
    sequence that failed.
    """
    with state.running.noted(request.request_id), state.observation(request) as seen:
        async with contextlib.aclosing(state.llm.stream_batches(request)) as stream:
            try:
                async for updates in stream:
                    for position, update in enumerate(updates):
                        seen.note(update)
                        if update.error is not None:
                            if position:
                                yield updates[:position]
                            raise sequence_error(update.error, update.error_code)
                    yield updates
            except RequestError as error:
                raise named(error) from None


async def _beam_search_answer(
    state: ServerState, body: ChatBody | CompletionBody, prepared: PreparedSearches
) -> JsonObject:
    """Search all prompts of a body and put the best sequences of each into one answer.

    Cancelling it ends the searches.
    """
    llm = state.llm
    outputs = await gather_or_cancel([_search(state, llm, search, body.n or 1) for search in prepared.searches])
    return prepared.shape.answer(outputs, prepared.echoes)


async def _search(state: ServerState, llm: AsyncLLM, search: BeamSearch, n: int) -> RequestOutput:
    """One search, counted as one prompt and ``n`` sequences whose tokens all come at its end."""
    with state.observation(search.request, num_sequences=n) as seen:
        await llm.run_search(search)
        output = request_output(search, llm.decoder, n=n)
        for sequence in output.outputs:
            seen.tick(sequence.index, len(sequence.token_ids), sequence.finish_reason)
    return output
