"""From the body of a request to checked engine requests, and to a whole answer or a stream."""

import contextlib
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace

from starlette.requests import Request
from starlette.responses import Response

from tp_engine.api.beam_search import BeamSearch, gather_or_cancel, request_output
from tp_engine.api.bodies import Body, num_prompts, prepare_body
from tp_engine.api.openai.errors import sequence_error
from tp_engine.api.openai.protocol import GenerationBody
from tp_engine.api.openai.requests import PreparedAnswer, PreparedBody, PreparedFromChat
from tp_engine.api.preparing import LARGE
from tp_engine.api.request_state import SequenceUpdate
from tp_engine.errors import RequestError
from tp_engine.requests.outputs import RequestOutput
from tp_engine.requests.request import EngineRequest
from tp_engine.server.access import current_caller
from tp_engine.server.bodies import in_thread, read_body
from tp_engine.server.middleware import name_request
from tp_engine.server.replies import EventStream, PartsReply, json_reply, until_disconnect
from tp_engine.server.state import ServerState
from tp_engine.server.streaming import Batches, ChatEventStream, ChunkWriter, merge

# This many prompt tokens count as one more sequence, in the body's turns.
_TOKENS_OF_A_PLACE = 256


async def answer(state: ServerState, request: Request, kind: type[Body]) -> Response:
    """Serve one request; raises ``RequestError`` and ``HttpError`` before anything has been sent."""
    state.check_room()
    return await answer_body(state, request, await read_body(kind, request, state))


async def answer_body(state: ServerState, request: Request, body: Body) -> Response:
    """Answer a request whose body has been read."""
    model, receive = state.model_name(body.model), request.receive
    if isinstance(body, GenerationBody) and body.prompt_cache_key is not None:
        await state.llm.prefetch(body.prompt_cache_key, body.cache_salt)  # while the prompt is tokenized
    body.request_id = name_request(request.scope["state"], body.request_id)
    with contextlib.ExitStack() as held:
        held.enter_context(state.limit.hold(*num_prompts(body)))
        prepared = await in_thread(
            request, state, prepare_body, body, state.llm.input_processor, model, state.sampling_defaults
        )
        if prepared.searches or not body.stream:
            outputs = await until_disconnect(receive, whole_outputs(state, prepared))
            size = prepared.answer_bytes(outputs)
            if size <= LARGE:
                return json_reply(prepared.answer(outputs))
            work = state.preparing.run(size, lambda: PartsReply(prepared.answer(outputs)))
            return await until_disconnect(receive, work)
        assert isinstance(prepared, (PreparedFromChat, PreparedAnswer))
        writer = ChatEventStream(prepared) if isinstance(prepared, PreparedFromChat) else ChunkWriter(prepared)
        batches = _batches(state, prepared)
        ping_s = state.config.sse_keep_alive_interval
        return EventStream(writer.events(batches), writer.failure, held.pop_all(), ping=writer.ping, ping_s=ping_s)


async def whole_outputs(state: ServerState, prepared: PreparedBody) -> list[RequestOutput]:
    """Run the prompts of a body; returns the output of each when all have ended.  Raises as ``update_batches`` does."""
    if prepared.searches:
        return await gather_or_cancel([_search(state, search) for search in prepared.searches])
    outputs: dict[int, RequestOutput] = {}
    batches = _batches(state, prepared)
    async with contextlib.aclosing(batches):
        async for number, updates in batches:
            for update in updates:
                if update.request_output is not None:
                    outputs[number] = update.request_output
    return [outputs[number] for number in range(len(prepared.requests))]


def _batches(state: ServerState, prepared: PreparedBody) -> Batches:
    """The updates of all prompts, each with the prompt's number."""
    client, place, requests = current_caller().client, 0, []
    for one in prepared.requests:
        requests.append(replace(one, client=client, place=place))
        place += 1 + len(one.prompt_token_ids) // _TOKENS_OF_A_PLACE
    return merge([update_batches(state, one, prepared.named) for one in requests])


async def update_batches(
    state: ServerState, request: EngineRequest, named: Callable[[RequestError], RequestError]
) -> AsyncGenerator[list[SequenceUpdate], None]:
    """Yield the engine's updates of one prompt, in batches: all that came while the client did not read.

    Times the prompt.  For a sequence that failed, raises ``HttpError``, or ``RequestError`` as ``named`` rewrites it.
    """
    with state.running.noted(request.request_id), state.observation(request) as seen:
        async with contextlib.aclosing(state.llm.outputs.batches(request)) as stream:
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


async def _search(state: ServerState, search: BeamSearch) -> RequestOutput:
    """Run one search, counted as one prompt and ``n`` sequences whose tokens all come at its end."""
    search.request = replace(search.request, client=current_caller().client)
    with state.observation(search.request, num_sequences=search.n) as seen:
        await state.llm.run_search(search)
        output = request_output(search, state.llm.outputs.decoder)
        for sequence in output.outputs:
            seen.tick(sequence.index, len(sequence.token_ids), sequence.finish_reason)
    return output
