"""From the engine's steps to the updates in each request's mailbox.

::

    StepOutput -> process: states, detokenizing -> updates -> mailbox of each request -> its reader

    a small step, none before it    processed and handed out at once
    any other step                  processed in a thread, handed out SLICE updates per iteration of the event loop
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from tp_engine.api.request_state import RequestState, SequenceUpdate
from tp_engine.engine.tokenizer import TokenDecoder
from tp_engine.errors import EngineDeadError, RequestError, again
from tp_engine.requests.outputs import RequestOutput
from tp_engine.requests.request import EngineRequest, SequenceDelta, StepOutput

if TYPE_CHECKING:
    from tp_engine.engine.client import EngineClient

SMALL_STEP = 32  # updates; they take about a third of a millisecond
SLICE = 32
MAX_WAITING = 64
_MAX_LEFT = 4096
MAX_FOLDED_TOKENS = 256


@dataclass(slots=True)
class Processed:
    """The updates of a step.  ``aborts`` are requests that ended here but still run in the engine: abort them."""

    updates: list[SequenceUpdate] = field(default_factory=list)
    finished: list[RequestOutput] = field(default_factory=list)
    aborts: list[str] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """New tokens of all updates."""
        return sum([len(update.token_ids) for update in self.updates])


class Outputs:
    """The requests in flight: a state for each, and a mailbox for each that is streamed.

    ``AsyncLLM`` calls ``open`` and reads ``batches`` or ``stream``; ``LLM`` and the batch job ``begin`` the requests of
    a ``Call``; the engine's client calls the methods of ``EngineEvents``, in the event loop's thread.  Without a
    tokenizer texts are empty.

    A sequence that a stop string ended still runs in the engine: its further deltas are ignored, and when all sequences
    of its request have ended, the request is among ``Processed.aborts``.
    """

    _client: EngineClient

    def __init__(self, tokenizer: Any | None = None) -> None:
        self.decoder = None if tokenizer is None else TokenDecoder(tokenizer)
        self._weight_version: str | None = None
        self._states: dict[str, RequestState] = {}
        self._lock = threading.Lock()  # ``so_far`` may read a state while the thread processes a step
        self._mailboxes: dict[str, Receiver] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="detokenizing")
        self._waiting: deque[StepOutput | EngineDeadError] = deque()
        self._handing_out: asyncio.Task[None] | None = None
        self._holds = False
        self._left: dict[str, None] = {}  # the last requests that ended here first, oldest first
        self._held: dict[str, asyncio.Event] = {}  # requests that are not sent until theirs is set

    def __len__(self) -> int:
        return len(self._states)

    def add(self, request: EngineRequest, prompt: str | None = None) -> None:
        """Expect deltas of ``request``; ``prompt`` is its text, if it came as text."""
        assert request.request_id not in self._states, request.request_id
        self._states[request.request_id] = RequestState(request, prompt, self.decoder)

    def forget(self, request_id: str) -> bool:
        """Ignore the request from now on; False for one that is unknown or has ended."""
        return self._states.pop(request_id, None) is not None

    def so_far(self, request_id: str) -> RequestOutput | None:
        """A copy of what the request has generated until now; None once it has ended."""
        state = self._states.get(request_id)
        with self._lock:
            return None if state is None else self._output(state, time.monotonic())

    def process(self, deltas: StepOutput | Iterable[SequenceDelta]) -> Processed:
        """Apply a step's deltas, or others, in the engine's order; those of unknown and ended requests are ignored."""
        processed, now_s = Processed(), time.monotonic()
        output = deltas if isinstance(deltas, StepOutput) else StepOutput(deltas=list(deltas))
        self._weight_version = output.weight_version or self._weight_version
        for request_id, index, token_id in zip(output.request_ids, output.indices, output.token_ids, strict=True):
            state = self._states.get(request_id)
            if state is not None:
                with self._lock:
                    update = state.add(index, [token_id], now_s)
                if update is not None:
                    processed.updates.append(update)
                    if update.finish_reason is not None:
                        self._end(processed, update, state, now_s)
        for delta in output.deltas:
            state = self._states.get(delta.request_id)
            if state is not None:
                with self._lock:
                    update = state.apply(delta, now_s)
                if update is not None:
                    processed.updates.append(update)
                    if update.finish_reason is not None:
                        self._end(processed, update, state, now_s)
        return processed

    def _end(self, processed: Processed, update: SequenceUpdate, state: RequestState, now_s: float) -> None:
        """Close a sequence that has ended with ``update``, and its request, if it was the last one."""
        if state.finished:
            self._states.pop(update.request_id, None)
            update.request_output = self._output(state, now_s)
            processed.finished.append(update.request_output)
            if state.runs_in_engine:
                processed.aborts.append(update.request_id)

    def _output(self, state: RequestState, now_s: float) -> RequestOutput:
        output = state.output(now_s)
        output.weight_version = self._weight_version
        return output

    def open(self, client: EngineClient, tokenizer: Any | None) -> None:
        """Stream requests of this client, which is connected, from now on."""
        self._client = client
        self.decoder = None if tokenizer is None else TokenDecoder(tokenizer)

    async def close(self) -> None:
        """Hand out what remains after the client has been closed, so that the streams end."""
        while self._handing_out is not None:
            await asyncio.wait([self._handing_out])
        self._thread.shutdown(wait=False)

    def hold(self) -> None:
        """Send no new request until ``release``; streams that have begun continue."""
        self._holds = True

    def release(self) -> None:
        """Send the requests that were held, and new ones."""
        self._holds = False
        while self._held:
            self._held.popitem()[1].set()

    def abort(self, request_id: str) -> None:
        """End a request in the engine; one that is held begins for that."""
        held = self._held.get(request_id)
        if held is None:
            self._client.abort([request_id])
        else:
            held.set()

    async def _wait_to_begin(self, request_id: str) -> bool:
        """Whether the request was aborted while it was held."""
        event = self._held[request_id] = asyncio.Event()
        try:
            await event.wait()
            return request_id in self._held
        finally:
            self._held.pop(request_id, None)

    @property
    def num_streams(self) -> int:
        """Requests whose streams have not ended."""
        return len(self._mailboxes)

    async def stream(self, request: EngineRequest, prompt: str | None = None) -> AsyncGenerator[SequenceUpdate, None]:
        """Send the request and yield its updates; leaving early aborts it."""
        async with aclosing(self.batches(request, prompt)) as batches:
            async for updates in batches:
                for update in updates:
                    yield update

    async def batches(
        self, request: EngineRequest, prompt: str | None = None
    ) -> AsyncGenerator[list[SequenceUpdate], None]:
        """Send the request and yield all updates that came since the last time together; leaving early aborts it."""
        request_id = request.request_id
        if request_id in self._left:  # the engine's last updates of its namesake come before this answer
            del self._left[request_id]
            await self._client.act("weight_info")
            await self.wait_delivered()
        if request_id in self._mailboxes:
            raise RequestError(f"request_id {request_id!r} is in use; give each request its own", param="request_id")
        is_aborted = self._holds and await self._wait_to_begin(request_id)
        self._client.add_request(request)
        if is_aborted:
            self._client.abort([request_id])
        self.add(request, prompt)
        mailbox = Mailbox()
        self._mailboxes[request_id] = mailbox
        try:
            while True:
                updates = await mailbox.take()
                yield updates
                if updates[-1].request_output is not None:
                    return
        finally:
            del self._mailboxes[request_id]
            if self.forget(request_id):
                self._abort([request_id])

    def on_output(self, output: StepOutput) -> None:
        """Hand each request its updates; abort in the engine the requests that stop strings ended here."""
        if self._handing_out is None and len(output) <= SMALL_STEP:
            processed = self.process(output)
            self._abort(processed.aborts)
            self._deliver(processed.updates)
        else:
            self._hand_out_later(output)

    @property
    def is_busy(self) -> bool:
        """Whether a step is being handed out."""
        return self._handing_out is not None

    async def wait_delivered(self) -> None:
        """Wait until all has been handed out and other tasks have run; raises what went wrong."""
        if self._handing_out is None:
            await asyncio.sleep(0)
        else:
            await asyncio.shield(self._handing_out)

    def on_rejected(self, request_id: str, error: RequestError) -> None:
        """Give the reader of a request that the engine refused the error."""
        self.forget(request_id)
        mailbox = self._mailboxes.get(request_id)
        if mailbox is not None:
            mailbox.fail(request_id, error)
            if mailbox.is_shared:
                del self._mailboxes[request_id]

    def on_ended(self, error: EngineDeadError) -> None:
        """Give every reader its own error, after the earlier updates."""
        self.release()
        if self._handing_out is None:
            self._fail_all(error)
        else:
            self._hand_out_later(error)

    def _hand_out_later(self, item: StepOutput | EngineDeadError) -> None:
        self._waiting.append(item)
        if self._handing_out is None:
            self._handing_out = asyncio.get_running_loop().create_task(self._hand_out())

    async def _hand_out(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while self._waiting:
                item = self._waiting.popleft()
                if isinstance(item, EngineDeadError):
                    self._fail_all(item)
                    continue
                processed = await loop.run_in_executor(self._thread, self.process, item)
                self._abort(processed.aborts)
                for start in range(0, max(1, len(processed.updates)), SLICE):
                    self._deliver(processed.updates[start : start + SLICE])
                    await asyncio.sleep(0)
        finally:
            self._handing_out = None

    def _abort(self, request_ids: list[str]) -> None:
        if request_ids:
            self._client.abort(request_ids, forgotten=True)
            self._left |= dict.fromkeys(request_ids)
            while len(self._left) > _MAX_LEFT:
                del self._left[next(iter(self._left))]

    def begin(self, requests: list[EngineRequest], prompts: Sequence[str | None], mailbox: Receiver) -> None:
        """Send requests that ``mailbox`` receives together; see ``EngineClient.add_call``."""
        together = mailbox.wants_all
        for request, prompt in zip(requests, prompts, strict=True):
            self.add(request, prompt)
            self._mailboxes[request.request_id] = mailbox
        try:
            self._client.add_call(requests, together=together)
        except EngineDeadError as error:
            for request in requests:
                if self.forget(request.request_id):
                    self._mailboxes.pop(request.request_id).fail(request.request_id, again(error))

    def leave(self, request_ids: Iterable[str]) -> None:
        """Abort and forget requests that ``begin`` has sent, as far as they run."""
        left = [request_id for request_id in request_ids if self.forget(request_id)]
        for request_id in left:
            del self._mailboxes[request_id]
        self._abort(left)

    def _deliver(self, updates: Sequence[SequenceUpdate]) -> None:
        mailboxes = self._mailboxes
        for update in updates:
            mailbox = mailboxes.get(update.request_id)
            if mailbox is not None:
                mailbox.put(update)
                if update.request_output is not None and mailbox.is_shared:
                    del mailboxes[update.request_id]

    def _fail_all(self, error: EngineDeadError) -> None:
        for request_id, mailbox in list(self._mailboxes.items()):
            if self.forget(request_id):
                mailbox.fail(request_id, again(error))
                if mailbox.is_shared:
                    del self._mailboxes[request_id]


class Receiver(Protocol):
    """Where requests' updates go, and the errors that end them; for the event loop's thread only.

    ``is_shared``: it receives several requests, none of them after its end.  ``wants_all``: if one is refused, it has
    no use for the others.
    """

    is_shared: bool
    wants_all: bool

    def put(self, update: SequenceUpdate) -> None:
        """Take an update."""

    def fail(self, request_id: str, error: Exception) -> None:
        """Take the error with which a request has ended."""


class Mailbox(Receiver):
    """One request's updates that its reader has not taken, and the error after them; for the event loop's thread only.

    ::

        put                     [u u u u ...]   each update stays as it is, so that it becomes its own chunk
        from MAX_WAITING on     an update is folded into the last one of its sequence, up to MAX_FOLDED_TOKENS tokens
    """

    is_shared = wants_all = False

    def __init__(self) -> None:
        self._updates: list[SequenceUpdate] = []
        self._error: Exception | None = None
        self._reader: asyncio.Future[None] | None = None

    def __len__(self) -> int:
        return len(self._updates)

    def put(self, update: SequenceUpdate) -> None:
        if len(self._updates) < MAX_WAITING or not self._fold(update):
            self._updates.append(update)
        self._wake()

    def fail(self, request_id: str, error: Exception) -> None:
        """Raise ``error`` in ``take``, after the updates."""
        self._error = error
        self._wake()

    async def take(self) -> list[SequenceUpdate]:
        """All updates that wait, at least one; raises the error once they have been taken."""
        while not self._updates:
            if self._error is not None:
                raise again(self._error)
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        taken, self._updates = self._updates, []
        return taken

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def _fold(self, update: SequenceUpdate) -> bool:
        """Append ``update`` to the last one of its sequence; False if there is none, or it would grow too long."""
        for last in reversed(self._updates):
            if last.index == update.index:
                if len(last.token_ids) + len(update.token_ids) > MAX_FOLDED_TOKENS:
                    return False
                last.append(update)
                return True
        return False
