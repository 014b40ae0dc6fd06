"""The frontend's asyncio end of the local socket."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol, Self

import zmq
import zmq.asyncio

from tp_engine.engine import messages
from tp_engine.engine.messages import ModelInfo, ToEngine
from tp_engine.engine.report import EngineReport
from tp_engine.errors import EngineDeadError, RequestError, again, shown
from tp_engine.requests.request import EngineRequest, StepOutput
from tp_engine.sched.view import ViewLimits
from tp_engine.system.log import get_logger
from tp_engine.system.off_loop import started

logger = get_logger(__name__)

_LINGER_MS = 1000


class EngineEvents(Protocol):
    """What the client reports to its owner, always in the event loop's thread."""

    def on_output(self, output: StepOutput) -> None:
        """Take the output of one step, or of an abort."""

    def on_rejected(self, request_id: str, error: RequestError) -> None:
        """Take the error of a request that the engine refused."""

    async def wait_delivered(self) -> None:
        """Wait until the owner can take the next message; until then messages wait in the socket."""

    def on_ended(self, error: EngineDeadError) -> None:
        """Learn that no output follows.  Called once."""


class EngineClient:
    """One connection to an ``EngineService``; create it with ``connect``, in a running event loop.  ``error`` is None
    while the engine lives, and then says how it ended; ``stopped`` is True if it was told to stop."""

    model_info: ModelInfo

    def __init__(self, address: str, events: EngineEvents) -> None:
        self.error: EngineDeadError | None = None
        self.stopped = False
        self._events = events
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.set_hwm(0)
        self._socket.linger = 0
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._socket.connect(address)
        loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[ModelInfo] = loop.create_future()
        self._ended: asyncio.Future[None] = loop.create_future()
        self._answers: deque[asyncio.Future[Any]] = deque()  # to questions, in the order of the questions
        self._listener = loop.create_task(self._listen())
        self._watcher = loop.create_task(self._watch())

    @classmethod
    async def connect(cls, address: str, events: EngineEvents, *, timeout_s: float) -> Self:
        """Connect and wait for the engine's ``Ready``; ``EngineDeadError`` if it does not arrive in time."""
        client = cls(address, events)
        try:
            client._send(messages.Hello())
            client.model_info = await asyncio.wait_for(client._ready, timeout_s)
        except TimeoutError as error:
            await client.close()
            raise EngineDeadError(f"waited {timeout_s:g} s for rank 0 to answer at {address}") from error
        except BaseException:
            await client.close()
            raise
        client._socket.linger = _LINGER_MS
        return client

    def add_request(self, request: EngineRequest) -> None:
        """Send a request; ``EngineDeadError`` if the engine has ended."""
        if self.error is not None:
            raise again(self.error)
        self._send(messages.AddRequest(request=request))

    def add_call(self, requests: list[EngineRequest], *, together: bool) -> None:
        """Send requests of which only the ends are wanted (``messages.AddCall``); ``EngineDeadError`` if the engine has
        ended."""
        if self.error is not None:
            raise again(self.error)
        self._send(messages.AddCall(requests=requests, together=together))

    def abort(self, request_ids: Sequence[str]) -> None:
        """End requests; ignores unknown ids, and does nothing if the engine has ended."""
        self._send(messages.AbortRequests(request_ids=list(request_ids)))

    def prefetch_session(self, session: str, salt: str) -> None:
        """Announce that a session will continue soon; does nothing if the engine has ended."""
        self._send(messages.ExpectSession(session=session, salt=salt))

    async def report(self, view: ViewLimits | None = None, *, timeout_s: float = 5.0) -> EngineReport:
        """Return the state of the whole job; the engine answers between two steps."""
        report: EngineReport = await self._ask(messages.GetReport(view=view), timeout_s)
        return report

    async def act(self, action: str, *, timeout_s: float = 150.0, **arguments: Any) -> dict[str, Any]:
        """Let the engine do ``action``, a name in ``admin_commands.py``; ``RequestError`` if it refuses."""
        try:
            done: messages.CommandDone = await self._ask(messages.Act(action=action, arguments=arguments), timeout_s)
        except UnicodeEncodeError as error:
            raise RequestError(f"{action}: {shown(error.object)} has half a surrogate pair; use Unicode") from error
        if done.refusal is not None:
            raise RequestError(done.refusal)
        return done.result

    def stop(self) -> None:
        """Ask the engine to abort everything and stop."""
        self._send(messages.Stop())

    def give_up(self, reason: str) -> None:
        """Treat the engine as dead."""
        self._end(reason, stopped=False)

    async def wait_ended(self, *, timeout_s: float | None = None) -> bool:
        """Wait until the engine has ended; False if it still runs after ``timeout_s``."""
        done, _ = await asyncio.wait([self._ended], timeout=timeout_s)
        return bool(done)

    async def close(self) -> None:
        """Disconnect.  An engine that was not told to stop takes this for the death of this process."""
        for task in (self._listener, self._watcher):
            task.cancel()
        await asyncio.gather(self._listener, self._watcher, return_exceptions=True)
        self._end("the connection to rank 0 was closed", stopped=self.stopped)
        self._socket.disable_monitor()
        self._monitor.close()
        self._socket.close()
        await asyncio.shield(asyncio.wrap_future(started(self._context.term)))

    async def _ask(self, question: ToEngine, timeout_s: float) -> Any:
        if self.error is not None:
            raise again(self.error)
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._send(question)
        self._answers.append(answer)
        try:
            return await asyncio.wait_for(answer, timeout_s)
        except TimeoutError as error:
            raise TimeoutError(f"waited {timeout_s:g} s for rank 0 to answer") from error

    def _send(self, message: ToEngine) -> None:
        if self.error is None:
            self._socket.send(messages.encode(message))

    async def _listen(self) -> None:
        # Poll before receiving, because a cancelled poll loses no message.
        while True:
            await self._socket.poll()
            await self._receive_all(self._events.wait_delivered)

    async def _receive_all(self, pause: Callable[[], Awaitable[None]] | None = None) -> None:
        try:
            while True:
                self._dispatch(await self._socket.recv(zmq.NOBLOCK))
                if pause is not None:
                    await pause()
        except zmq.Again:
            return
        except Exception as error:
            logger.exception("a message from rank 0 could not be handled")
            self._end(f"a message from rank 0 could not be handled: {error!r}", stopped=False)
            raise

    async def _watch(self) -> None:
        """When rank 0 has disconnected, deliver what it sent before, such as the reason of its end."""
        await self._monitor.poll()
        self._listener.cancel()
        await self._receive_all()
        self._end("rank 0 went away", stopped=False)

    def _dispatch(self, data: bytes) -> None:
        match messages.decode_to_frontend(data):
            case messages.Added(output=output):
                self._events.on_output(output)
            case messages.Rejected(request_id=request_id, message=text, param=param, code=code):
                self._events.on_rejected(request_id, RequestError(text, param=param, code=code))
            case messages.Report(report=answer):
                self._answer(answer)
            case messages.CommandDone() as done:
                self._answer(done)
            case messages.Ready(model_info=model_info):
                if not self._ready.done():
                    self._ready.set_result(model_info)
            case messages.Stopped():
                self._end("the engine has stopped", stopped=True)
            case messages.EngineDead(error=error):
                self._end(f"the engine stopped after an error: {error}", stopped=False, cause=error.rebuilt())

    def _answer(self, content: object) -> None:
        answer = self._answers.popleft()
        if not answer.done():
            answer.set_result(content)

    def _end(self, reason: str, *, stopped: bool, cause: Exception | None = None) -> None:
        if self.error is not None:
            return
        self.error, self.stopped = EngineDeadError(reason), stopped
        self.error.__cause__ = cause
        waiters: list[asyncio.Future[Any]] = [self._ready, *self._answers]
        for waiting in waiters:
            if not waiting.done():
                waiting.set_exception(again(self.error))
                waiting.exception()  # marks it as retrieved, because there may be no waiter
        self._ended.set_result(None)
        self._events.on_ended(self.error)
