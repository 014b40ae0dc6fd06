"""The streams of all requests in flight: fed by the engine's client, read by whoever asked."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from tp_engine.api.output_processor import OutputProcessor
from tp_engine.api.request_state import SequenceUpdate
from tp_engine.engine.client import EngineClient
from tp_engine.engine.detokenizer import TokenDecoder
from tp_engine.errors import EngineDeadError, RequestError
from tp_engine.outputs import RequestOutput
from tp_engine.request import EngineRequest, StepOutput


class RequestStreams:
    """One queue per request, as long as somebody reads it.  Implements ``EngineEvents``; ``open`` it before use.

    A queue holds at most as many updates as the request may have tokens, however slow its reader is.
    """

    _client: EngineClient
    _outputs: OutputProcessor

    def __init__(self) -> None:
        self._queues: dict[str, asyncio.Queue[SequenceUpdate | Exception]] = {}

    def __len__(self) -> int:
        return len(self._queues)

    def open(self, client: EngineClient, tokenizer: Any | None) -> None:
        """Connected: from now on requests can be sent."""
        self._client = client
        self._outputs = OutputProcessor(tokenizer)

    @property
    def decoder(self) -> TokenDecoder | None:
        """What turns token ids into text; None for a model without a tokenizer."""
        return self._outputs.decoder

    def so_far(self, request_id: str) -> RequestOutput | None:
        """A copy of what the request has generated until now; None once it has ended."""
        return self._outputs.so_far(request_id)

    async def stream(self, request: EngineRequest, prompt: str | None) -> AsyncGenerator[SequenceUpdate, None]:
        """Send the request and yield its updates; leaving early aborts it."""
        request_id = request.request_id
        if request_id in self._queues:
            raise RequestError(f"request_id {request_id!r} is in use; give each request its own", param="request_id")
        self._client.add_request(request)
        self._outputs.add(request, prompt)
        queue = self._queues[request_id] = asyncio.Queue()
        try:
            while True:
                item = await queue.get()
                if isinstance(item, Exception):
                    raise item
                yield item
                if item.request_output is not None:
                    return
        finally:
            del self._queues[request_id]
            if request_id in self._outputs:
                self._outputs.forget(request_id)
                self._client.abort([request_id])

    def on_output(self, output: StepOutput) -> None:
        """Hand each request its updates; end in the engine what a stop string ended here."""
        processed = self._outputs.process(output)
        for update in processed.updates:
            self._put(update.request_id, update)
        if processed.aborts:
            self._client.abort(processed.aborts)

    def on_rejected(self, request_id: str, error: RequestError) -> None:
        """The engine refused a request: its reader gets the error."""
        self._outputs.forget(request_id)
        self._put(request_id, error)

    def on_ended(self, error: EngineDeadError) -> None:
        """Every reader gets an error of its own."""
        for request_id in self._queues:
            if request_id in self._outputs:
                self._outputs.forget(request_id)
                self._put(request_id, EngineDeadError(str(error)))

    def _put(self, request_id: str, item: SequenceUpdate | Exception) -> None:
        queue = self._queues.get(request_id)
        if queue is not None:
            queue.put_nowait(item)
