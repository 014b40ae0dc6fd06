"""Tries candidates in a process that may die, within a time, and keeps what is found.

::

    this process                         trial_process.py
      shapes, refused so far   ------->    proves and times candidates, one shape after the other
      reads line by line       <-------    "about to run panels" ... "right" ... "the choice of shape 2"

    a line does not come in time         the candidate is refused, and the process killed
    the process has ended                the candidate is refused
    neither                              all shapes have their choice, or the time is over

A refused candidate runs no more in any shape of its operation: another process goes on without it.  One that only
gave no answer may be slow to compile here.  If nothing else is right, it stays where it is the code's own choice.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import torch

from tp_engine.job.progress import tell_progress
from tp_engine.kernels.candidates import CANDIDATES, Choice, key_of, operation
from tp_engine.system.child_process import start_child
from tp_engine.system.log import get_logger
from tp_engine.worker.tuning.report import chosen
from tp_engine.worker.tuning.rule import without
from tp_engine.worker.tuning.table import LATE, NOT_REACHED, Extent, Tried, TunedShape, shown
from tp_engine.worker.tuning.trial_process import Said, TrialSettings, TrialShape

logger = get_logger(__name__)

QUICK_S = 20.0
FULL_S = 1800.0
# A candidate's compilation, proof, or round of times.
_SILENCE_S: dict[Extent, float] = {"quick": 8.0, "full": 60.0}
_BETWEEN_S = 60.0  # its start, and what it does between two candidates
_ORPHAN_S = 90.0  # beyond the limit, by which this process would have killed it
_MOST_STARTS = 12
_MOST_NAMED = 4
_NEXT = "the next starts go on with them, and tp-engine tune MODEL does so at once"
_ROWS: dict[str, dict[Extent, tuple[int, ...]]] = {
    "cpu": {"quick": (1, 4, 8, 64), "full": (1, 2, 4, 6, 8, 16, 32, 64)},
    "cuda": {"quick": (1, 8, 64, 256, 2048), "full": (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)},
}


class NoRightKernelError(RuntimeError):
    """No candidate of an operation is right on this device."""


def none_is_right(one: TunedShape) -> NoRightKernelError:
    """Return the error that names the operation, its candidates, and the remedy."""
    reasons = "; ".join(f"{tried.candidate}: {tried.verdict}" for tried in one.tried)
    return NoRightKernelError(
        f"no kernel for {one.key} is right on this device ({reasons}). Please report it; --tune off takes the code's "
        "own choice without looking"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedShape:
    """A product's shape that a model has ``count`` times."""

    operation: str
    shape: dict[str, int | str]
    count: int = 1

    @property
    def key(self) -> str:
        """The operation and the shape as one line."""
        return key_of(self.operation, self.shape)


@dataclass(kw_only=True)
class Tuner:
    """Tries candidates on ``device``; ``places`` has the operations.  ``budget_s`` ends the search, not the answer:
    what it does not reach keeps the code's own choice."""

    device: torch.device
    extent: Extent = "quick"
    places: Mapping[str, str] = field(default_factory=lambda: CANDIDATES)
    budget_s: float | None = None
    silence_s: float | None = None
    rows: Sequence[int] | None = None
    report: Callable[[str], None] = lambda _text: None

    def tune(self, wanted: Sequence[WantedShape], before: Mapping[str, TunedShape] | None = None) -> list[TunedShape]:
        """Return a choice for each shape, in their order.  ``before`` is what earlier starts have left open of them, by
        key.  ``NoRightKernelError`` if there is none."""
        budget_s = self.budget_s or (QUICK_S if self.extent == "quick" else FULL_S)
        run = _Search(self, [*wanted], time.monotonic() + budget_s)
        known = before or {}
        order = sorted(range(len(wanted)), key=lambda index: self._place(wanted[index], known))
        run.finish(order)
        found = [
            _joined(run.found.get(index) or run.unreached(index), known.get(one.key))
            for index, one in enumerate(wanted)
        ]
        for one in found:
            _log(one)
        left = [one.key for one in found if one.is_open]
        if left:
            text = "of %d shapes, %d are left as the code has them or as they were, after %.0f s: %s%s; %s"
            logger.info(text, len(found), len(left), budget_s, "; ".join(left[:_MOST_NAMED]),
                        "; ..." if len(left) > _MOST_NAMED else "", _NEXT)  # fmt: skip
        return found

    def _place(self, one: WantedShape, known: Mapping[str, TunedShape]) -> tuple[int, bool, int]:
        """What a step spends most on comes first, because the time may end the search; but what took all of an earlier
        start's time comes last."""
        table, earlier = operation(one.operation, self.places), known.get(one.key)
        return 0 if earlier is None else earlier.cuts, not table.comes_first, -one.count * table.num_bytes(one.shape)


@dataclass
class _Search:
    """One search: what is found, by place in ``wanted``, and what is refused, by operation and candidate, of it what
    was ``late``."""

    tuner: Tuner
    wanted: list[WantedShape]
    end_s: float
    found: dict[int, TunedShape] = field(default_factory=dict)
    refused: dict[str, dict[str, str]] = field(default_factory=dict)
    late: set[tuple[str, str]] = field(default_factory=set)
    cut: int = -1

    def finish(self, order: Sequence[int]) -> None:
        """Start processes until all shapes of ``order`` have a choice, or the time is over."""
        for _ in range(_MOST_STARTS):
            left = [index for index in order if index not in self.found]
            if not left or not self._one_process(left):
                return

    def _one_process(self, left: list[int]) -> bool:
        """Try the shapes ``left``; False if another process would get no further."""
        tuner = self.tuner
        silence_s, running, index = tuner.silence_s or _SILENCE_S[tuner.extent], "", left[0]
        with self._lines(left, silence_s + _ORPHAN_S) as (lines, process):
            while True:
                limit_s = silence_s if running else _BETWEEN_S
                line = lines.read(min(limit_s, self.end_s - time.monotonic()))
                if not line:
                    break
                said = msgspec.json.decode(line, type=Said)
                index, running = left[said.index], said.candidate
                if running:
                    text = f"trying {self.wanted[index].key}: {running}"
                    tell_progress(text, len(self.found), len(self.wanted), "shapes")
                    tuner.report(f"{text}, {len(self.found)} of {len(self.wanted)} shapes are done")
                if said.choice is not None:
                    self._finish_shape(index, said)
                    if len(self.found) == len(self.wanted):
                        return False
            code = None if line is None else process.wait()
        if time.monotonic() >= self.end_s:
            self.cut = index
            return False
        if code == 0 and not running:
            return False
        reason = f"{LATE} {limit_s:g} s" if code is None else f"it ended its process, code {code}"
        if not running:
            logger.warning("the process that tries kernels is given up: %s; untried kernels stay", reason)
            return False
        name = self.wanted[index].operation
        self.refused.setdefault(name, {})[running] = reason
        if code is None:
            self.late.add((name, running))
        return True

    def _finish_shape(self, index: int, said: Said) -> None:
        assert said.choice is not None
        one = self.wanted[index]
        own = self._own(one)
        if not said.choice and not any((one.operation, name) in self.late for _, name in own):
            raise none_is_right(self._shape(index, own, said.all_tried))
        found = self._proven(index, said.choice or own, said.all_tried)
        self.found[index] = msgspec.structs.replace(found, clocks=said.clocks)

    def _own(self, one: WantedShape) -> Choice:
        return operation(one.operation, self.tuner.places).default(one.shape, self.tuner.device)

    def _proven(self, index: int, choice: Choice, tried: tuple[Tried, ...]) -> TunedShape:
        """The shape with ``choice``; ``NoRightKernelError`` if one of that has been seen to be wrong."""
        name = self.wanted[index].operation
        refused = {one.candidate for one in tried if one.is_fault} & {one for _, one in choice}
        if any((name, one) not in self.late for one in refused):
            raise none_is_right(self._shape(index, choice, tried))
        if refused:
            text = "%s: no candidate was proven, so the code's own choice, which gave no answer in time: %s"
            logger.warning(text, self.wanted[index].key, shown(choice))
            late = {"verdict": NOT_REACHED, "is_fault": False}
            tried = tuple(msgspec.structs.replace(one, **late) if one.candidate in refused else one for one in tried)
        return self._shape(index, choice, tried)

    def unreached(self, index: int) -> TunedShape:
        """Return the code's own choice for a shape that the time has not reached."""
        one = self.wanted[index]
        table, refused = operation(one.operation, self.tuner.places), self.refused.get(one.operation, {})
        tried = tuple(
            Tried(candidate=name, verdict=refused.get(name, NOT_REACHED), is_fault=name in refused)
            for name in (candidate.name for candidate in table.candidates)
        )
        others = {one.candidate for one in tried} - refused.keys()
        found = self._proven(index, without(self._own(one), others), tried)
        return msgspec.structs.replace(found, cuts=int(index == self.cut))

    def _shape(self, index: int, choice: Choice, tried: tuple[Tried, ...]) -> TunedShape:
        one, tuner = self.wanted[index], self.tuner
        return TunedShape(
            operation=one.operation,
            shape=one.shape,
            extent=tuner.extent,
            choice=choice,
            default=self._own(one),
            tried=tried,
            count=one.count,
        )

    @contextlib.contextmanager
    def _lines(self, left: list[int], orphan_s: float) -> Iterator[tuple[_Lines, subprocess.Popen[bytes]]]:
        tuner = self.tuner
        rows = tuple(tuner.rows or _ROWS[tuner.device.type][tuner.extent])
        reads, writes = os.pipe()
        try:
            settings = TrialSettings(
                output=writes,
                device=str(tuner.device),
                silence_s=orphan_s,
                places=dict(tuner.places),
                shapes=tuple(
                    TrialShape(
                        operation=self.wanted[one].operation,
                        shape=self.wanted[one].shape,
                        rows=rows,
                        extent=tuner.extent,
                    )
                    for one in left
                ),
                refused=self.refused,
            )
            data = msgspec.json.encode(settings)
            process = start_child("tp_engine.worker.tuning.trial_process", data, own_session=True, pass_fds=(writes,))
        except BaseException:
            os.close(reads)
            raise
        finally:
            os.close(writes)
        try:
            yield _Lines(reads), process
        finally:
            process.kill()
            process.wait()
            os.close(reads)


class _Lines:
    """Lines of a pipe, each within a time."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._rest = descriptor, b""

    def read(self, limit_s: float) -> bytes | None:
        """Return the next line; empty at the end of the pipe, None if none comes within ``limit_s``."""
        end_s = time.monotonic() + limit_s
        with selectors.DefaultSelector() as selector:
            selector.register(self._descriptor, selectors.EVENT_READ)
            while b"\n" not in self._rest:
                if not selector.select(max(0.0, end_s - time.monotonic())):
                    return None
                if not (more := os.read(self._descriptor, 1 << 16)):
                    return b""
                self._rest += more
        line, _, self._rest = self._rest.partition(b"\n")
        return line


def _log(one: TunedShape) -> None:
    """Log refused candidates, and the choice."""
    for tried in one.tried:
        if tried.is_fault:
            logger.warning("%s: the candidate %s is not used: %s", one.key, tried.candidate, tried.verdict)
    text = "%s: not reached in time: %s" if one.is_unknown else "%s: %s"
    logger.debug(text, one.key, chosen(one))


def _joined(one: TunedShape, earlier: TunedShape | None) -> TunedShape:
    """What this start and earlier ones know of a shape: the earlier choice stays if the time has not reached it now."""
    if earlier is None:
        return one
    kept = earlier if one.is_unknown else one
    return msgspec.structs.replace(kept, starts=earlier.starts + 1, cuts=earlier.cuts + one.cuts)
