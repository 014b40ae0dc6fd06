"""Rank 0's loop behind the frontend process: take messages, run a step, send its output.

::

    serving --drain--> serving out --the frontend has gone, or the deadline--> stopped
       |                        |
       +---Stop, request_stop---+---> stopped (running requests are aborted)
       |                        |
       +------engine fails------+---> EngineDead is sent, the error is raised
       +-----frontend gone----------> its requests are aborted, RuntimeError
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

import msgspec

from tp_engine.engine import messages
from tp_engine.engine.admin_commands import act
from tp_engine.engine.held_tokens import HeldTokens
from tp_engine.engine.service_socket import ServiceSocket
from tp_engine.engine.told_errors import ToldError
from tp_engine.errors import CODE_UNAVAILABLE, RequestError
from tp_engine.requests.request import EngineRequest, StepOutput
from tp_engine.system.log import get_logger

if TYPE_CHECKING:
    from tp_engine.engine.engine import Engine

logger = get_logger(__name__)

_IDLE_SLICE_S = 1.0
_IDLE_WORK_SLICE_S = 0.001
_ABORTED_AT_ONCE = 1024  # sequences, between two steps; about 2 ms


class EngineService:
    """Serves one frontend at ``address`` (from ``new_address``) until it is told to stop.  ``drain`` and
    ``request_stop`` may be called from any thread and from a signal handler.  The frontend must connect within
    ``connect_timeout_s``.  The caller closes the engine."""

    def __init__(self, engine: Engine, address: str, *, connect_timeout_s: float = 120.0) -> None:
        self._engine = engine
        self._socket = ServiceSocket(address)
        self._connect_timeout_s = connect_timeout_s
        self._connected = False
        self._drain_s: float | None = None
        self._stop_requested = False
        self._deadline_s: float | None = None
        self._has_idle_work = True  # until the engine says otherwise
        self._held = HeldTokens()
        self._aborting: dict[str, bool] = {}  # requests that end soon, and whether nobody wants their last records
        self._unfinished: dict[str, int] = {}  # request id -> number of its sequences that still run

    def drain(self, timeout_s: float) -> None:
        """Stop when the frontend has gone, or after ``timeout_s``.  The frontend has been told to accept no new
        requests.  The engine still accepts them, because only the frontend knows which belong to work that it has
        accepted: a beam search goes on with requests that are new here."""
        self._drain_s = timeout_s
        self._socket.wake()

    def request_stop(self) -> None:
        """Abort everything and stop."""
        self._stop_requested = True
        self._socket.wake()

    def run(self) -> None:
        """Serve until told to stop.  Raises what the engine raised, after telling the frontend; ``RuntimeError`` if the
        frontend did not connect, or went away without asking for a stop."""
        connect_deadline_s = time.monotonic() + self._connect_timeout_s
        while not self._is_over():
            self._turn()
            if self._socket.peer_gone:
                self._abort_all()
                if self._stop_requested or self._drain_s is not None:
                    return
                raise RuntimeError("the frontend process went away; its requests were aborted")
            if not self._connected and time.monotonic() > connect_deadline_s:
                raise RuntimeError(f"waited {self._connect_timeout_s:g} s for the frontend process to connect")
        self._abort_all()
        self._socket.send(messages.Stopped())

    def close(self) -> None:
        self._socket.close()

    def _is_over(self) -> bool:
        return self._stop_requested or (self._deadline_s is not None and time.monotonic() >= self._deadline_s)

    def _turn(self) -> None:
        """One round: handle all messages that have arrived, abort what they asked for in part, then run one step."""
        try:
            idle_s = _IDLE_WORK_SLICE_S if self._has_idle_work else _IDLE_SLICE_S
            for data in self._socket.receive(0.0 if self._engine.has_unfinished or self._aborting else idle_s):
                self._handle(data)
            self._abort_some()
            if self._drain_s is not None and self._deadline_s is None:
                self._deadline_s = time.monotonic() + self._drain_s
                if num_running := len(self._unfinished):
                    logger.info("draining: %d requests may finish within %g s", num_running, self._drain_s)
            if self._engine.has_unfinished:
                self._publish(self._engine.step())
                self._has_idle_work = True
            else:
                self._engine.check_health()
                self._has_idle_work = self._engine.run_background_io()
        except Exception as error:
            self._socket.send(messages.EngineDead(error=ToldError.of(error)))
            raise

    def _handle(self, data: bytes) -> None:
        try:
            message = messages.decode_to_engine(data)
        except msgspec.ValidationError as error:
            self._reject_malformed(data, error)
            return
        match message:
            case messages.AddRequest(request=request):
                self._add(request)
            case messages.AddCall(requests=requests, together=together):
                self._add_call(requests, together=together)
            case messages.AbortRequests(request_ids=request_ids, forgotten=forgotten):
                self._aborting |= dict.fromkeys(request_ids, forgotten)
            case messages.ExpectSession(session=session, salt=salt):
                self._engine.prefetch_session(session, salt)
            case messages.GetReport(view=view):
                self._socket.send(messages.Report(report=self._engine.report(view)))
            case messages.Act(action=action, arguments=arguments):
                self._act(action, arguments)
            case messages.Hello():
                self._connected = True
                self._socket.send(messages.Ready(model_info=self._engine.model_info))
            case messages.Stop():
                self._stop_requested = True

    def _add_call(self, requests: list[EngineRequest], *, together: bool) -> None:
        for number, request in enumerate(requests):
            if not request.params.stop:
                self._held.expect(request.request_id, request.params.n)
            if not self._add(request, waits=False) and together:
                self._forget([before.request_id for before in requests[:number]])
                return

    def _forget(self, request_ids: list[str]) -> None:
        """End requests whose output nobody wants any more."""
        self._engine.abort(request_ids)
        for request_id in request_ids:
            self._unfinished.pop(request_id, None)
            self._held.forget(request_id)

    def _add(self, request: EngineRequest, *, waits: bool = True) -> bool:
        """Queue a request; False if it was refused.  ``waits``: a paused engine takes it."""
        if request.request_id in self._aborting:  # its namesake ends first
            self._end({request.request_id: self._aborting.pop(request.request_id)})
        try:
            if self._stop_requested:
                raise RequestError("the engine is shutting down; send the request elsewhere", code=CODE_UNAVAILABLE)
            if not waits and self._engine.operator.is_paused:
                raise RequestError(_asleep(self._engine.operator.is_asleep))
            self._engine.add_request(request)
        except RequestError as error:
            self._held.forget(request.request_id)
            self._reject(request.request_id, error)
            return False
        self._unfinished[request.request_id] = request.params.n
        return True

    def _act(self, action: str, arguments: dict[str, Any]) -> None:
        """Do ``action`` before anything else; what was aborted before, and the output of steps in flight, is sent
        first."""
        self._abort_some(math.inf)
        try:
            done = messages.CommandDone(result=act(self._engine.operator, action, arguments))
        except RequestError as error:
            done = messages.CommandDone(result={}, refusal=str(error), param=error.param, code=error.code)
        for output in self._engine.operator.take_drained():
            self._publish(output)
        self._socket.send(done)

    def _reject(self, request_id: str, error: RequestError) -> None:
        self._socket.send(
            messages.Rejected(request_id=request_id, message=str(error), param=error.param, code=error.code)
        )

    def _reject_malformed(self, data: bytes, error: msgspec.ValidationError) -> None:
        """A request with a value of the wrong type is the user's fault; any other malformed message is ours."""
        match msgspec.msgpack.decode(data):
            case ["AddRequest", {"request_id": str(request_id)}] | [
                "AddCall",
                [{"request_id": str(request_id)}],
                bool(),
            ]:
                self._reject(request_id, RequestError(f"the request is malformed: {error}"))
            case ["AddCall", [*requests], bool(together)]:
                for request in requests:
                    self._handle(msgspec.msgpack.encode(["AddCall", [request], together]))
            case _:
                raise error

    def _abort_some(self, most: float = _ABORTED_AT_ONCE) -> None:
        """End requests of about ``most`` sequences in the order in which that was asked for: the others run on between
        the parts of many."""
        part: dict[str, bool] = {}
        num_sequences = 0
        while self._aborting and num_sequences < most:
            request_id = next(iter(self._aborting))
            part[request_id] = self._aborting.pop(request_id)
            num_sequences += self._unfinished.get(request_id, 1)
        self._end(part)

    def _end(self, forgotten: dict[str, bool]) -> None:
        """End these requests, and tell of those that are not forgotten."""
        if not forgotten:
            return
        self._forget([request_id for request_id, is_forgotten in forgotten.items() if is_forgotten])
        self._abort([request_id for request_id, is_forgotten in forgotten.items() if not is_forgotten])

    def _abort(self, request_ids: list[str]) -> None:
        self._publish(StepOutput(deltas=self._engine.abort(request_ids)))

    def _publish(self, output: StepOutput) -> None:
        if not output:
            return
        for delta in output.deltas:
            if delta.finish_reason is not None:
                num_running = self._unfinished.pop(delta.request_id, 1) - 1
                if num_running:
                    self._unfinished[delta.request_id] = num_running
        if self._held:
            output = self._held.fold(output)
            if not output:
                return
        self._socket.send(messages.Output(output=output))

    def _abort_all(self) -> None:
        self._abort(list(self._unfinished))


def _asleep(is_asleep: bool) -> str:
    if is_asleep:
        return "the engine sleeps, and requests would never end; call wake_up() first"
    return "the engine is paused, and requests would never end; call resume() first, or wake_up() after sleep()"
