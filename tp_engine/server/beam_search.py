"""The way of a generation request with ``use_beam_search``: body -> one search per prompt -> a whole answer."""

from __future__ import annotations

import asyncio

from tp_engine.api.async_llm import AsyncLLM
from tp_engine.api.beam_search import BeamSearch, gather_or_cancel, request_output
from tp_engine.api.openai.answer_shape import JsonObject
from tp_engine.api.openai.protocol import ChatBody, CompletionBody
from tp_engine.api.openai.requests import prepare_searches
from tp_engine.outputs import RequestOutput
from tp_engine.server.state import ServerState


async def beam_search_answer(state: ServerState, body: ChatBody | CompletionBody, model: str) -> JsonObject:
    """Search all prompts of a body and put the best sequences of each into one answer.

    Cancelling it ends the searches.  Raises ``RequestError``.
    """
    llm = state.llm
    prepared = await asyncio.get_running_loop().run_in_executor(
        state.tokenizing, prepare_searches, body, llm.input_processor, llm.model_info, model
    )
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
