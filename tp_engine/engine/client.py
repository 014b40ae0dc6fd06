"""The frontend's asyncio end of the local socket."""

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol, Self

from tp_engine.engine import messages
from tp_engine.engine.message_socket import MessageSocket
from tp_engine.engine.messages import ModelInfo, ToEngine
from tp_engine.engine.report import EngineReport
from tp_engine.engine.service_socket import connect
from tp_engine.errors import EngineDeadError, RequestError, again, shown
from tp_engine.requests.request import EngineRequest, StepOutput
from tp_engine.sched.view import ViewLimits
from tp_engine.system.log import get_logger

logger = get_logger(__name__)

_LOOK_S = 0.02


class EngineEvents(Protocol):
    """What the client reports to its owner, always in the event loop's thread."""

    def on_output(self, output: StepOutput) -> None:
        """Take the output of one step, or of an abort."""

    def on_rejected(self, request_id: str, error: RequestError) -> None:
        """Take the error of a request that the engine refused."""

    @property
    def is_busy(self) -> bool:
        """Whether the next message must wait."""

    async def wait_delivered(self) -> None:
        """Wait until the owner can take the next message; until then messages wait in the socket."""

    def on_ended(self, error: EngineDeadError) -> None:
        """Learn that no output follows.  Called once."""


class EngineClient:
    """One connection to an ``EngineService``; create it with ``connect``, in a running event loop.  ``error`` is None
    while the engine lives, and then says how it ended; ``stopped`` is True if it was told to stop."""

    model_info: ModelInfo

    def __init__(self, connection: MessageSocket, events: EngineEvents) -> None:
        self.error: EngineDeadError | None = None
        self.stopped = False
        self._events = events
        self._connection = connection
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[ModelInfo] = self._loop.create_future()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._answers: deque[asyncio.Future[Any]] = deque()  # to questions, in the order of the questions
        self._arrived: deque[bytes] = deque()
        self._delivering: asyncio.Task[None] | None = None
        self._loop.add_reader(connection, self._receive)

    @classmethod
    async def connect(cls, address: str, events: EngineEvents, *, timeout_s: float) -> Self:
        """Connect and wait for the engine's ``Ready``; ``EngineDeadError`` if it does not arrive in time."""
        client = None
        try:
            async with asyncio.timeout(timeout_s):
                client = cls(await _connection(address), events)
                client._send(messages.Hello())
                client.model_info = await client._ready
        except BaseException as error:
            if client is not None:
                await client.close()
            if isinstance(error, TimeoutError):
                raise EngineDeadError(f"waited {timeout_s:g} s for rank 0 to answer at {address}") from error
            raise
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

    def abort(self, request_ids: Sequence[str], *, forgotten: bool = False) -> None:
        """End requests; ignores unknown ids, and does nothing if the engine has ended.  Of those ``forgotten`` nothing
        more is told."""
        self._send(messages.AbortRequests(request_ids=list(request_ids), forgotten=forgotten))

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
            raise RequestError(done.refusal, param=done.param, code=done.code)
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
        """Disconnect; safe to call twice.  An engine that was not told to stop takes this for the death of this
        process."""
        if self._delivering is not None:
            self._delivering.cancel()
            await asyncio.gather(self._delivering, return_exceptions=True)
        self._end("the connection to rank 0 was closed", stopped=self.stopped)
        if self._connection.fileno() >= 0:
            self._loop.remove_reader(self._connection.fileno())
            self._loop.remove_writer(self._connection.fileno())
            self._connection.close()

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
        if self.error is not None:
            return
        self._connection.send(messages.encode(message))
        if self._connection.has_unsent:
            self._loop.add_writer(self._connection.fileno(), self._send_rest)

    def _send_rest(self) -> None:
        self._connection.flush()
        if not self._connection.has_unsent:
            self._loop.remove_writer(self._connection.fileno())

    def _receive(self) -> None:
        """Take what has arrived.  A message that comes alone to an owner who is free is handed on at once."""
        self._arrived += self._connection.receive()
        try:
            if self._arrived:
                self._dispatch(self._arrived.popleft())
        except Exception as error:
            self._give_up_on(error)
        if self._arrived or self._connection.ended or self._events.is_busy or self.error is not None:
            self._loop.remove_reader(self._connection.fileno())
            self._delivering = self._loop.create_task(self._deliver())

    async def _deliver(self) -> None:
        """Hand on what has arrived, as the owner takes it, and go on receiving."""
        try:
            while self._arrived or self._events.is_busy:
                await self._events.wait_delivered()
                if self._arrived:
                    self._dispatch(self._arrived.popleft())
        except Exception as error:
            self._give_up_on(error)
        if self._connection.ended:
            self._end("rank 0 went away", stopped=False)
        if self.error is None:
            self._loop.add_reader(self._connection.fileno(), self._receive)

    def _give_up_on(self, error: Exception) -> None:
        logger.exception("a message from rank 0 could not be handled")
        self._arrived.clear()
        self._end(f"a message from rank 0 could not be handled: {error!r}", stopped=False)

    def _dispatch(self, data: bytes) -> None:
        match messages.decode_to_frontend(data):
            case messages.Output(output=output):
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


async def _connection(address: str) -> MessageSocket:
    """Connect as soon as rank 0 listens."""
    while True:
        try:
            return connect(address)
        except (FileNotFoundError, ConnectionRefusedError, BlockingIOError):
            await asyncio.sleep(_LOOK_S)
