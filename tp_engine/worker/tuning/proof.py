"""Whether a candidate is right on this device: its results beside float64, for several numbers of rows.

::

    bound of a row = 2 * rms(twin - exact)      plain PyTorch in the model's own type, which rounds too
                     or the rounding of the type and of sums in float32, if that is more
    error          = the largest rms(candidate - exact) / bound, of all rows; right if it is at most 1, and none is NaN

A mean square sees what a largest difference does not: weights that are all a tenth of their spread too large pass a
bound by the largest value.  Rows of zeros and rows 64 times as large are among the inputs.  Of many rows some are
compared, and all must be finite.  On a GPU the candidate is recorded and replayed with other inputs, because kernels
that are right once have been wrong in graphs.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from tp_engine.kernels.candidates import Inputs, Operation, Run, Shape

ODD_ROWS = (1, 3, 7, 17, 65)  # one, odd ones, and one more than tiles have
_MOST_COMPARED = 24
_INPUTS = 3
_REPLAYS = 24
_LARGE, _ZERO_ROW, _LARGE_ROW = 64.0, 1, 2
_MARGIN = 2.0


@dataclass(frozen=True, slots=True)
class ProofQuestion:
    """Inputs of some rows; of the rows ``compared``, the exact results and the bounds (rows,)."""

    inputs: Inputs
    compared: torch.Tensor
    exact: torch.Tensor
    bound: torch.Tensor

    @property
    def num_rows(self) -> int:
        """Rows of the inputs."""
        return len(self.inputs[0])

    def error(self, found: torch.Tensor) -> float:
        """Return the error of a result, in units of the bound; infinite if it has NaN."""
        expected = self.num_rows, self.exact.shape[1]
        if found.shape != expected:
            raise ValueError(f"its result has the shape {tuple(found.shape)} instead of {expected}")
        if not bool(torch.isfinite(found).all()):
            return float("inf")
        rows = (found[self.compared].double() - self.exact).square().mean(1).sqrt()
        return float((rows / self.bound).max())


class ProofQuestions:
    """What all candidates of a shape are asked, made at the first use."""

    def __init__(self, operation: Operation, weights: Any, shape: Shape, device: torch.device) -> None:
        self._operation, self._weights, self._shape, self._device = operation, weights, shape, device
        self._made: dict[tuple[int, int], ProofQuestion] = {}

    def of(self, num_rows: int, number: int = 0) -> ProofQuestion:
        """Return the question ``number`` of so many rows."""
        if (num_rows, number) not in self._made:
            self._made[num_rows, number] = self._make(num_rows, number)
        return self._made[num_rows, number]

    def _make(self, num_rows: int, number: int) -> ProofQuestion:
        operation, device = self._operation, self._device
        generator = torch.Generator().manual_seed(1000 * number + num_rows)
        inputs = operation.inputs(self._shape, num_rows, device, generator)
        x = inputs[0]
        if num_rows > _LARGE_ROW:
            x[_ZERO_ROW] = 0
            x[_LARGE_ROW] *= _LARGE
        places = {*range(min(num_rows, _MOST_COMPARED // 2)), num_rows - 1}
        spread = torch.linspace(0, num_rows - 1, _MOST_COMPARED // 2 - 1, device="cpu", dtype=torch.float32)
        places |= set(spread.long().tolist())
        compared = torch.tensor(sorted(places), dtype=torch.int64, device=device)
        exact, twin = operation.twin(self._weights, self._shape, operation.rows_of(inputs, compared))
        size = exact.square().mean(1).sqrt()
        sums = x[0].numel() ** 0.5 * torch.finfo(torch.float32).eps
        least = (sums + torch.finfo(twin.dtype).eps / 2) * size
        rounding = _MARGIN * (twin.double() - exact).square().mean(1).sqrt()
        return ProofQuestion(inputs, compared, exact, torch.maximum(rounding, least).clamp_min(1e-30))


def largest_error(run: Run, questions: ProofQuestions, rows: Iterable[int], device: torch.device) -> tuple[float, int]:
    """Return the largest error of a candidate, in units of the bound, and the rows that it was found at; of a wrong one
    the first error above 1, because what comes after does not matter."""
    ask = _replayed if device.type == "cuda" else _called
    largest = 0.0, 0
    for num_rows in rows:
        largest = max(largest, (ask(run, questions, num_rows), num_rows))
        if largest[0] > 1:
            break
    return largest


def _called(run: Run, questions: ProofQuestions, num_rows: int) -> float:
    """On a CPU: called with each input, and with the first one again."""
    asked = [questions.of(num_rows, number) for number in (*range(_INPUTS), 0)]
    return max(one.error(_dirtied(run, one)) for one in asked)


def _dirtied(run: Run, question: ProofQuestion) -> torch.Tensor:
    """A result in memory that may have held NaN: what a candidate does not write is then seen."""
    x, width = question.inputs[0], question.exact.shape[1]
    dirt = torch.full((len(x), width), float("nan"), dtype=x.dtype, device=x.device)
    del dirt
    return run(*question.inputs)


def _replayed(run: Run, questions: ProofQuestions, num_rows: int) -> float:
    """On a GPU: recorded, and replayed many times, with other inputs in the same memory."""
    asked = [questions.of(num_rows, number) for number in range(_INPUTS)]
    held = tuple(one.clone() if isinstance(one, torch.Tensor) else one for one in asked[0].inputs)
    graph, found = record(lambda: run(*held))
    error = 0.0
    for number in range(_REPLAYS):
        question = asked[number % _INPUTS]
        for place, value in zip(held, question.inputs, strict=True):
            if isinstance(place, torch.Tensor):
                place.copy_(value)
        found.fill_(float("nan"))
        graph.replay()
        if number < 2 * _INPUTS or number >= _REPLAYS - _INPUTS:
            error = max(error, question.error(found))
    return error


def record(call: Callable[[], torch.Tensor]) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """Return a graph of ``call``, which runs once before, and the memory of its result."""
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
