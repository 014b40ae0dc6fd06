"""Whether a candidate is right on this device: its results beside float64, for several numbers of rows.

::

    bound of a row = 2 * rms(twin - exact)      plain PyTorch in the model's own type, which rounds too
                     or the rounding of the type and of sums in float32, if that is more
    error          = the largest rms(candidate - exact) / bound, of all rows; right if it is at most 1, and none is NaN

A mean square sees what a largest difference does not: weights that are all a tenth of their spread too large pass a
bound by the largest value.  Rows of zeros and rows 64 times as large are among the inputs.  Of many rows some are
compared, and all must be finite.  Results that are integers must be equal.  A candidate that writes outside of its
memory, or changes an input that it should not, is wrong too.  On a GPU the candidate is recorded and replayed with
other inputs, because kernels that are right once have been wrong in graphs.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from tp_engine.kernels.candidates import Inputs, Operation, Results, Run, Shape
from tp_engine.kernels.rounding import rms, rounding_of
from tp_engine.worker.tuning.guards import Guards, copied, memory_of, tensors_of

ODD_ROWS = (1, 3, 7, 17, 65)  # one, odd ones, and one more than tiles have
_MOST_COMPARED = 24
_INPUTS = 3
_REPLAYS = 24
_LARGE, _ZERO_ROW, _LARGE_ROW = 64.0, 1, 2
_MARGIN = 2.0
_SMALLEST = 1e-30

Found: TypeAlias = tuple[torch.Tensor, ...]
"""What a candidate returns, then what it has changed."""


@dataclass(frozen=True, slots=True)
class Expected:
    """A result's exact values, of the ``rows`` compared (None: all), and the bounds of their errors (rows,)."""

    exact: torch.Tensor
    bound: torch.Tensor
    rows: torch.Tensor | None

    def error(self, found: torch.Tensor, num_rows: int) -> float:
        """Return the error in units of the bound; infinite if a number is NaN."""
        expected = tuple(self.exact.shape) if self.rows is None else (num_rows, *self.exact.shape[1:])
        if found.shape != expected:
            raise ValueError(f"its result has the shape {tuple(found.shape)} instead of {expected}")
        if not self.exact.is_floating_point():
            if num_wrong := int((found != self.exact).sum()):
                raise ValueError(f"{num_wrong} of {found.numel()} values differ from PyTorch's")
            return 0.0
        if not bool(torch.isfinite(found).all()):
            return float("inf")
        compared = found if self.rows is None else found[self.rows]
        return float((rms(compared.double() - self.exact, len(self.bound)) / self.bound).max())


@dataclass(frozen=True, slots=True)
class ProofQuestion:
    """Inputs of some rows, and what is expected of them."""

    inputs: Inputs
    expected: tuple[Expected, ...]

    def error(self, found: Found) -> float:
        """Return the largest error of the results."""
        num_rows = len(self.inputs[0])
        return max(one.error(own, num_rows) for one, own in zip(self.expected, found, strict=True))

    def check_inputs(self, held: Inputs, found: Found) -> None:
        """Raise ``ValueError`` if a candidate that got ``held`` has changed one that is none of its results."""
        results = {one.data_ptr() for one in found}
        for own, other in zip(tensors_of(held), tensors_of(self.inputs), strict=True):
            if own.data_ptr() in results:
                continue
            ends = (memory_of(one).view(torch.uint8) for one in (own, other))  # as bytes: NaN lies between rows
            if not torch.equal(*ends):
                raise ValueError("it changes its inputs")


class ProofQuestions:
    """What all candidates of a shape are asked, made at the first use."""

    def __init__(self, operation: Operation, weights: Any, shape: Shape, device: torch.device) -> None:
        self.operation, self._weights, self._shape, self._device = operation, weights, shape, device
        self._made: dict[tuple[int, int], ProofQuestion] = {}

    def of(self, num_rows: int, number: int = 0) -> ProofQuestion:
        """Return the question ``number`` of so many rows."""
        if (num_rows, number) not in self._made:
            self._made[num_rows, number] = self._make(num_rows, number)
        return self._made[num_rows, number]

    def _make(self, num_rows: int, number: int) -> ProofQuestion:
        operation, device = self.operation, self._device
        generator = torch.Generator().manual_seed(1000 * number + num_rows)
        inputs = operation.inputs(self._shape, num_rows, device, generator)
        x, compared = inputs[0], None
        if operation.is_by_row and x.is_floating_point() and num_rows > _LARGE_ROW:
            x[_ZERO_ROW] = 0
            x[_LARGE_ROW] *= _LARGE
        asked = copied(inputs)
        if operation.rows_of is not None:
            compared = _some_rows(num_rows, device)
            asked = operation.rows_of(asked, compared)
        exact, twin = (_in_order(one) for one in operation.twin(self._weights, self._shape, asked))
        depth = operation.num_terms or x[0].numel()
        expected = [
            Expected(wide, _bound(wide, own, depth, by_row=operation.is_by_row), None if place else compared)
            for place, (wide, own) in enumerate(zip(exact, twin, strict=True))
        ]
        return ProofQuestion(inputs, tuple(expected))


def _some_rows(num_rows: int, device: torch.device) -> torch.Tensor:
    places = {*range(min(num_rows, _MOST_COMPARED // 2)), num_rows - 1}
    spread = torch.linspace(0, num_rows - 1, _MOST_COMPARED // 2 - 1, device="cpu", dtype=torch.float32)
    return torch.tensor(sorted(places | set(spread.long().tolist())), dtype=torch.int64, device=device)


def _bound(exact: torch.Tensor, twin: torch.Tensor, depth: int, *, by_row: bool) -> torch.Tensor:
    """The bounds of rows' errors; ``depth``: numbers that a sum has."""
    count = len(exact) if by_row else 1
    if not exact.is_floating_point():
        return exact
    if not exact.numel():
        return exact.new_full((count,), _SMALLEST)
    least = rounding_of(exact, twin.dtype, depth, count)
    return torch.maximum(_MARGIN * rms(twin.double() - exact, count), least).clamp_min(_SMALLEST)


def _in_order(results: Results) -> Found:
    return (results,) if isinstance(results, torch.Tensor) else tuple(results)


def largest_error(
    run: Run,
    questions: ProofQuestions,
    rows: Iterable[int],
    device: torch.device,
    note: Callable[[], None] = lambda: None,
) -> tuple[float, int]:
    """Return the largest error of a candidate, in units of the bound, and the rows that it was found at; of a wrong one
    the first error above 1, because what comes after does not matter.  ``note`` is called before each number of
    rows."""
    ask = _replayed if device.type == "cuda" and questions.operation.is_recorded else _called
    largest = 0.0, 0
    for num_rows in rows:
        note()
        largest = max(largest, (ask(run, questions, num_rows, device), num_rows))
        if largest[0] > 1:
            break
    return largest


def _called(run: Run, questions: ProofQuestions, num_rows: int, device: torch.device) -> float:
    """Called with each input, and with the first one again."""
    largest = 0.0
    for number in (*range(_INPUTS), 0):
        question, guards = questions.of(num_rows, number), Guards(device)
        held = copied(question.inputs, guards.copy)
        with guards:
            found = _results(run, held, questions.operation)
        guards.check()
        question.check_inputs(held, found)
        largest = max(largest, question.error(found))
    return largest


def _results(run: Run, held: Inputs, operation: Operation) -> Found:
    return (run(*held), *operation.changed(held))


def _replayed(run: Run, questions: ProofQuestions, num_rows: int, device: torch.device) -> float:
    """On a GPU: recorded, and replayed many times, with other inputs in the same memory."""
    asked, guards = [questions.of(num_rows, number) for number in range(_INPUTS)], Guards(device)
    held = copied(asked[0].inputs, guards.copy)
    places = tensors_of(held)
    with guards:
        graph, found = record(lambda: _results(run, held, questions.operation))
    addresses = {place.data_ptr() for place in places}
    fresh = [one for one in found if one.is_floating_point() and one.data_ptr() not in addresses]
    error = 0.0
    for number in range(_REPLAYS):
        question = asked[number % _INPUTS]
        for place, value in zip(places, tensors_of(question.inputs), strict=True):
            place.copy_(value)
        for one in fresh:
            one.fill_(float("nan"))
        graph.replay()
        if number < 2 * _INPUTS or number >= _REPLAYS - _INPUTS:
            error = max(error, question.error(found))
            question.check_inputs(held, found)
    guards.check()
    return error


def record(call: Callable[[], Found]) -> tuple[torch.cuda.CUDAGraph, Found]:
    """Return a graph of ``call``, which runs once before, and the memory of its results."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = call()
    return graph, found
