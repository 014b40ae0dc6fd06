"""The streams of all requests in flight: fed by the engine's client, read by whoever asked."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from tp_engine.api.mailbox import Mailbox
from tp_engine.api.output_pipeline import OutputPipeline
from tp_engine.api.output_processor import OutputProcessor, Processed
from tp_engine.api.request_state import SequenceUpdate
from tp_engine.engine.client import EngineClient
from tp_engine.engine.detokenizer import TokenDecoder
from tp_engine.errors import EngineDeadError, RequestError
from tp_engine.outputs import RequestOutput
from tp_engine.request import EngineRequest, StepOutput


class RequestStreams:
    """One mailbox per request, as long as somebody reads it.  Implements ``EngineEvents``; ``open`` it before use."""

    _client: EngineClient
    _outputs: OutputProcessor
    _pipeline: OutputPipeline | None = None

    def __init__(self) -> None:
        self._mailboxes: dict[str, Mailbox] = {}

    def __len__(self) -> int:
        return len(self._mailboxes)

    def open(self, client: EngineClient, tokenizer: Any | None) -> None:
        """Connected: from now on requests can be sent."""
        self._client = client
        self._outputs = OutputProcessor(tokenizer)
        self._pipeline = OutputPipeline(self._outputs.process, self._deliver)

    async def close(self) -> None:
        """The client has been closed: let the streams end."""
        if self._pipeline is not None:
            await self._pipeline.close()

    @property
    def decoder(self) -> TokenDecoder | None:
        """What turns token ids into text; None for a model without a tokenizer."""
        return self._outputs.decoder

    def so_far(self, request_id: str) -> RequestOutput | None:
        """A copy of what the request has generated until now; None once it has ended."""
        return self._outputs.so_far(request_id)

    async def stream(self, request: EngineRequest, prompt: str | None) -> AsyncGenerator[SequenceUpdate, None]:
        """Send the request and yield its updates; leaving early aborts it."""
        async with aclosing(self.batches(request, prompt)) as batches:
            async for updates in batches:
                for update in updates:
                    yield update

    async def batches(self, request: EngineRequest, prompt: str | None) -> AsyncGenerator[list[SequenceUpdate], None]:
        """As ``stream``, with all that has come since the last time together: one, where the reader is quick."""
        request_id = request.request_id
        if request_id in self._mailboxes:
            raise RequestError(f"request_id {request_id!r} is in use; give each request its own", param="request_id")
        self._client.add_request(request)
        self._outputs.add(request, prompt)
        mailbox = self._mailboxes[request_id] = Mailbox()
        try:
            while True:
                updates = await mailbox.take()
                yield updates
                if updates[-1].request_output is not None:
                    return
        finally:
            del self._mailboxes[request_id]
            if request_id in self._outputs:
                self._outputs.forget(request_id)
                self._client.abort([request_id])

    def on_output(self, output: StepOutput) -> None:
        """Hand each request its updates; end in the engine what a stop string ended here."""
        assert self._pipeline is not None
        self._pipeline.push(output)

    async def keep_up(self) -> None:
        """Return when the streams have got what the engine has sent."""
        if self._pipeline is not None:
            await self._pipeline.keep_up()

    def on_rejected(self, request_id: str, error: RequestError) -> None:
        """The engine refused a request: its reader gets the error."""
        self._outputs.forget(request_id)
        mailbox = self._mailboxes.get(request_id)
        if mailbox is not None:
            mailbox.fail(error)

    def on_ended(self, error: EngineDeadError) -> None:
        """Every reader gets an error of its own, behind what came before."""
        if self._pipeline is not None:
            self._pipeline.after(lambda: self._fail_all(error))

    def _fail_all(self, error: EngineDeadError) -> None:
        for request_id, mailbox in self._mailboxes.items():
            if request_id in self._outputs:
                self._outputs.forget(request_id)
                mailbox.fail(EngineDeadError(str(error)))

    def _deliver(self, processed: Processed) -> None:
        if processed.aborts:
            self._client.abort(processed.aborts)
        mailboxes = self._mailboxes
        for update in processed.updates:
            mailbox = mailboxes.get(update.request_id)
            if mailbox is not None:
                mailbox.put(update)
