"""Rows through the engine, for a thread that waits: all at once, or a window if there may be very many."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, Literal, TypeAlias

from tp_engine.api.calls import Call, RequestEnd
from tp_engine.api.rows import Row, Rows
from tp_engine.errors import NO_TOKEN_LEFT, RequestError, again
from tp_engine.options.fields import unboxed
from tp_engine.requests.outputs import RequestOutput
from tp_engine.requests.structured_outputs import PARAM
from tp_engine.system.progress_bar import progress_bar, say_plainly

_ENDING_S = 60.0

OnError: TypeAlias = Literal["raise", "return"]
Progress: TypeAlias = bool | Callable[..., Any]
"""Whether a bar is shown, or what makes it, with the keywords of ``tqdm``."""
Result: TypeAlias = RequestOutput | RequestError


class RowRun:
    """One run of ``rows``: iterating gives their results as they end.

    At most ``window`` rows are in the engine at a time; None: all are made before one runs, and with ``on_error`` raise
    none runs if one is bad.  A row that turns out to be bad later raises after the ends of those that run, so that no
    computed result is lost.  After ``timeout_s`` running rows end with what they have, and rows that were not made yet
    are left out.
    """

    def __init__(
        self,
        call: Call,
        rows: Rows,
        *,
        window: int | None = None,
        on_error: OnError = "raise",
        timeout_s: float | None = None,
        use_tqdm: Progress = True,
    ) -> None:
        if on_error not in ("raise", "return"):
            raise RequestError(f"on_error is {on_error!r}; it must be raise or return", param="on_error")
        self._deadline_s = None if timeout_s is None else time.monotonic() + _seconds(timeout_s)
        self._call, self._rows, self._window, self._on_error = call, rows, window, on_error
        self._numbers: dict[str, int] = {}  # of the rows that run, by the ids of their requests
        self._errors: list[RequestError] = []  # to be raised
        self._bar = _bar(rows.size, use_tqdm) if use_tqdm else None
        self._num_tokens, self._started_s = 0, time.monotonic()

    def results(self, made: Callable[[RequestOutput], Any] = lambda output: output) -> list[Any]:
        """All results in the order of the rows, each output turned by ``made``.  An error or interrupt has those
        that have ended as its ``outputs``."""
        found: list[tuple[int, Any]] = []
        try:
            for one in self:
                found.append((one.row or 0, one if isinstance(one, RequestError) else made(one)))  # noqa: PERF401
        except BaseException as error:
            if found:
                error.outputs = _in_order(found)  # type: ignore[attr-defined]
                error.add_note(f"{len(found)} rows are done, and are the outputs of this error")
            raise
        return _in_order(found)

    def __iter__(self) -> Iterator[Result]:
        try:
            with self._call:
                yield from self._run()
        finally:
            if self._bar is not None:
                self._bar.close()

    def _run(self) -> Iterator[Result]:
        left = iter(self._rows)
        if self._window is None:
            left = iter(list(self._checked(left)))
        is_late = False
        while True:
            if not is_late and not self._errors:
                yield from self._fill(left)
            if not self._call.running:
                break
            wait_s = None
            if self._deadline_s is not None:
                wait_s = _ENDING_S if is_late else max(0.0, self._deadline_s - time.monotonic())
            for one in self._call.take(wait_s):
                yield from self._result(one)
            if self._deadline_s is not None and time.monotonic() >= self._deadline_s:
                if is_late and time.monotonic() > self._deadline_s + _ENDING_S:
                    raise TimeoutError(f"the engine has not ended requests {_ENDING_S:g} s after the call's timeout_s")
                if not is_late:
                    self._call.abort(self._call.running)
                is_late = True
        for error in sorted(self._errors, key=lambda error: error.row or 0):
            raise error

    def _checked(self, rows: Iterator[Row]) -> Iterator[Row]:
        for row in rows:
            if row.error is not None and self._on_error == "raise":
                raise row.error
            yield row

    def _fill(self, left: Iterator[Row]) -> Iterator[Result]:
        """Send rows while there is room; the results of those that cannot be sent."""
        chosen: list[Row] = []
        while not self._errors and (self._window is None or len(self._call.running) + len(chosen) < self._window):
            row = next(left, None)
            if row is None:
                break
            if row.error is not None:
                yield from self._failed(row.error)
            else:
                chosen.append(row)
            if self._window is not None and self._is_late():
                break
        requests = [row.request for row in chosen if row.request is not None]
        for row, request in zip(chosen, requests, strict=True):
            self._numbers[request.request_id] = row.number
        self._call.add(requests, [row.text for row in chosen])

    def _is_late(self) -> bool:
        return self._deadline_s is not None and time.monotonic() >= self._deadline_s

    def _result(self, ended: RequestEnd) -> Iterator[Result]:
        number = self._numbers.pop(ended.request_id)
        if ended.is_refused:
            param = None if ended.failure_code == NO_TOKEN_LEFT else PARAM
            error: Exception | None = RequestError(str(ended.failure), param=param, code=ended.failure_code)
        else:
            error = ended.error
        if isinstance(error, RequestError):
            named = self._rows.naming(error, number)
            if self._call.wants_all and ended.error is not None:
                raise named  # before it ran: the engine says nothing of those that came with it
            yield from self._failed(named)
            return
        if error is not None:
            raise again(error.__cause__ or error)
        assert ended.output is not None
        ended.output.row = number
        self._num_tokens += sum(len(one.token_ids) for one in ended.output.outputs)
        self._show()
        yield ended.output

    def _failed(self, error: RequestError) -> Iterator[RequestError]:
        if self._on_error == "raise":
            self._errors.append(error)
        else:
            self._show()
            yield error

    def _show(self) -> None:
        if self._bar is not None:
            rate = self._num_tokens / max(1e-9, time.monotonic() - self._started_s)
            self._bar.set_postfix_str(f"{rate:.1f} output tokens/s", refresh=False)
            self._bar.update(1)


def _bar(total: int | None, made_by: Progress) -> Any:
    """What ``made_by`` makes; a bar on a terminal, and elsewhere a line in a while."""
    if callable(made_by):
        return made_by(total=total, desc="requests", unit="", dynamic_ncols=True)
    return progress_bar("requests", total=total, unit="", say=say_plainly)


def _in_order(found: list[tuple[int, Any]]) -> list[Any]:
    return [one for _, one in sorted(found, key=lambda both: both[0])]


def _seconds(timeout_s: float) -> float:
    timeout_s = unboxed(timeout_s)
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, (int, float)) or not timeout_s >= 0:
        raise RequestError(f"timeout_s is {timeout_s!r}; it must be seconds, at least 0, or None", param="timeout_s")
    return timeout_s
