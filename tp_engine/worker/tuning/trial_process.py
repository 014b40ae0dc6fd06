"""The process that tries candidates, and may die of one: it says what it is about to run, then what came of it.

It ends with its device's context, so nothing that a candidate leaves behind is in a rank: no memory, no broken context.
It says a line of JSON for each thing, and a line before each candidate runs, so that the parent knows which one it was.
"""

import os
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import msgspec
import torch

from tp_engine.kernels.candidates import Candidate, Choice, Operation, Run, Shape, Twin, operation
from tp_engine.system.child_process import ignore_stop_signals
from tp_engine.system.log import configure_logging
from tp_engine.worker.tuning.guards import copied
from tp_engine.worker.tuning.proof import ODD_ROWS, ProofQuestions, largest_error
from tp_engine.worker.tuning.rule import fastest, merge, ratios, without
from tp_engine.worker.tuning.table import RIGHT, Extent, Tried
from tp_engine.worker.tuning.timing import clocks_of, num_copies, time_rounds


class TrialShape(msgspec.Struct, frozen=True, kw_only=True):
    """What to try: candidates of an operation (by its name in ``places``) for ``shape``, timed at ``rows``."""

    operation: str
    shape: dict[str, int | str]
    rows: tuple[int, ...]
    extent: Extent


class TrialSettings(msgspec.Struct, frozen=True, kw_only=True):
    """``places`` have the operations; ``refused``, by operation and candidate, must not run again.  The process writes
    to the descriptor ``output``, and ends by itself after ``silence_s`` in one candidate."""

    output: int
    device: str
    silence_s: float
    places: dict[str, str]
    shapes: tuple[TrialShape, ...]
    refused: dict[str, dict[str, str]]


class Said(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A line: ``candidate`` is about to run, or ``tried`` came of it, or ``choice`` ends the shape ``index``; an empty
    one says that no candidate is right.  ``clocks`` are the device's before and after the shape."""

    index: int
    candidate: str = ""
    tried: Tried | None = None
    choice: tuple[tuple[int, str], ...] | None = None
    all_tried: tuple[Tried, ...] = ()
    clocks: str = ""


def main() -> int:
    """Try all shapes of the settings on standard input."""
    ignore_stop_signals()
    settings = msgspec.json.decode(sys.stdin.buffer.read(), type=TrialSettings)
    configure_logging("tuning")
    device = torch.device(settings.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)

    def say(said: Said) -> None:
        signal.setitimer(signal.ITIMER_REAL, settings.silence_s)  # the end of an orphan that hangs
        os.write(settings.output, msgspec.json.encode(said) + b"\n")

    for index, one in enumerate(settings.shapes):
        trial = ShapeTrial(one, operation(one.operation, settings.places), device, index, say)
        try:
            trial.run(settings.refused.get(one.operation, {}))
        except Exception:
            say(Said(index=index))  # a fault of this process, not of the candidate that ran last
            raise
    return 0


class ShapeTrial:
    """The candidates of one shape: proven, then timed."""

    def __init__(
        self, wanted: TrialShape, table: Operation, device: torch.device, index: int, say: Callable[[Said], None]
    ) -> None:
        self._wanted, self._table, self._device, self._index, self._say = wanted, table, device, index, say
        self._tried: dict[str, Tried] = {}
        self._clocks = ""
        self._rows = [one for one in wanted.rows if table.takes(one)] or [min(table.most_rows, max(wanted.rows))]

    def run(self, refused: Mapping[str, str]) -> None:
        """Say what came of each candidate, and the choice."""
        wanted, table, device = self._wanted, self._table, self._device
        self._say(Said(index=self._index))
        self._clocks = clocks_of(device)
        generator = torch.Generator().manual_seed(0)
        weights = table.weights(wanted.shape, device, generator)

        @cache
        def asked(twin: Twin | None) -> ProofQuestions:
            own = table if twin is None else replace(table, twin=twin)
            return ProofQuestions(own, weights, wanted.shape, device)

        builds: dict[str, Callable[[Any, Shape], Run]] = {}
        for candidate in table.candidates:
            if wanted.extent == "quick" and not candidate.is_quick:
                continue
            name, reason = candidate.name, candidate.why_not(wanted.shape, device)
            if name in refused:
                self._note(Tried(candidate=name, verdict=refused[name], is_fault=True))
            elif reason is not None:
                self._note(Tried(candidate=name, verdict=reason))
            elif self._prove(candidate, weights, asked(candidate.twin)):
                builds[name] = candidate.build
        copies = [weights, *(table.copy(weights) for _ in range(num_copies(table.num_bytes(wanted.shape), device) - 1))]
        made: dict[str, list[Run]] = {}
        for name, build in builds.items():
            self._say_candidate(name)
            made[name] = [build(one, wanted.shape) for one in copies]
        self._choose(made, asked(None))

    def _prove(self, candidate: Candidate, weights: Any, questions: ProofQuestions) -> bool:
        name, shape = candidate.name, self._wanted.shape
        rows = [one for one in sorted({*ODD_ROWS, *self._rows}) if candidate.takes(one) and self._table.takes(one)]
        self._say_candidate(name)
        try:
            run = candidate.build(weights, shape)
            error, at = largest_error(run, questions, rows, self._device, lambda: self._say_candidate(name))
        except Exception as fault:
            self._note(
                Tried(candidate=name, verdict=f"it failed: {type(fault).__name__}: {fault}"[:300], is_fault=True)
            )
            self._check_device()
            return False
        is_right = error <= 1
        verdict = RIGHT if is_right else f"it is wrong: its error is {error:.3g} times the bound, at {at} rows"
        if error == float("inf"):
            verdict = f"it is wrong: not all of its numbers are finite, at {at} rows"
        self._note(Tried(candidate=name, verdict=verdict, is_fault=not is_right, error=error if is_right else 0.0))
        return is_right

    def _check_device(self) -> None:
        """End this process if the fault has broken the device's context; the parent starts another."""
        try:
            if self._device.type == "cuda":
                torch.ones(1, device=self._device, dtype=torch.float32).sum().item()
        except Exception:
            os._exit(1)

    def _choose(self, made: Mapping[str, list[Run]], questions: ProofQuestions) -> None:
        table, wanted = self._table, self._wanted
        default = table.default(wanted.shape, self._device)
        winners: dict[int, str | None] = {}
        for num_rows in self._rows:
            fitting = {name: runs for name, runs in made.items() if _takes(table, name, num_rows)}
            own = next(name for most, name in default if num_rows <= most)
            if not fitting:
                self._say_choice(())
                return
            if len(fitting) == 1:
                winners[num_rows] = None if own in fitting else next(iter(fitting))
                continue
            beside = own if own in fitting else None
            count = len(fitting[beside or next(iter(fitting))]) if table.copies_inputs else 1
            inputs = [copied(questions.of(num_rows).inputs) for _ in range(count)]
            times = time_rounds(
                fitting, inputs, self._device, beside, self._say_candidate, is_recorded=table.is_recorded
            )
            taken = fastest(times, beside)
            winners[num_rows] = None if taken == own else taken
            for name, found in times.items():
                self._add_times(name, num_rows, found, [] if beside is None else ratios(times, name, beside))
        choice = without(merge(default, winners), made)
        self._say_choice(choice)

    def _say_choice(self, choice: Choice) -> None:
        clocks = f"{self._clocks} before, {clocks_of(self._device)} after" if self._clocks else ""
        self._say(Said(index=self._index, choice=choice, all_tried=tuple(self._tried.values()), clocks=clocks))

    def _say_candidate(self, name: str) -> None:
        self._say(Said(index=self._index, candidate=name))

    def _add_times(self, name: str, num_rows: int, found: list[float], beside: list[float]) -> None:
        known = self._tried[name]
        microseconds = {**known.microseconds, num_rows: round(_middle(found) / 1e3, 2)}
        others = {**known.ratios, num_rows: round(_middle(beside), 3)} if beside else known.ratios
        self._tried[name] = msgspec.structs.replace(known, microseconds=microseconds, ratios=others)

    def _note(self, tried: Tried) -> None:
        self._tried[tried.candidate] = tried
        self._say(Said(index=self._index, tried=tried))


def _takes(table: Operation, name: str, num_rows: int) -> bool:
    candidate = table.named(name)
    return candidate is not None and candidate.takes(num_rows)


def _middle(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]
