"""A table of candidates with planted faults, for a product of a small weight in plain PyTorch."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

from tp_engine.kernels.candidates import MANY, Candidate, Inputs, Operation, Run, Shape

SHAPE: dict[str, int | str] = {"in": 256, "out": 96}


def _weights(shape: Shape, device: torch.device, generator: torch.Generator) -> torch.Tensor:
    size = int(shape["out"]), int(shape["in"])
    return torch.randn(size, generator=generator, device=device).mul_(0.02).bfloat16()


def _inputs(shape: Shape, num_rows: int, device: torch.device, generator: torch.Generator) -> Inputs:
    return (torch.randn(num_rows, int(shape["in"]), generator=generator, device=device).bfloat16(),)


def _twin(weight: torch.Tensor, shape: Shape, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    return F.linear(inputs[0].double(), weight.double()), F.linear(inputs[0], weight)


def _right(weight: torch.Tensor, shape: Shape) -> Run:
    return lambda x: F.linear(x, weight)


def _slow(weight: torch.Tensor, shape: Shape) -> Run:
    return lambda x: [F.linear(x, weight) for _ in range(12)][-1]


def _crash(x: torch.Tensor) -> torch.Tensor:
    ctypes.string_at(0)
    return x


def _hang(x: torch.Tensor) -> torch.Tensor:
    time.sleep(1000)
    return x


def _nan_in_one_row(weight: torch.Tensor, shape: Shape) -> Run:
    def run(x: torch.Tensor) -> torch.Tensor:
        found = F.linear(x, weight)
        found[-1, 5] = float("nan")
        return found

    return run


def _wrong_from_seven_rows(weight: torch.Tensor, shape: Shape) -> Run:
    return lambda x: F.linear(x, weight) * (1.0 if len(x) < 7 else 1.1)


def _right_once(weight: torch.Tensor, shape: Shape) -> Run:
    kept: list[torch.Tensor] = []

    def run(x: torch.Tensor) -> torch.Tensor:
        if not kept or len(kept[0]) != len(x):
            kept[:] = [F.linear(x, weight)]
        return kept[0]

    return run


def _outside(weight: torch.Tensor, shape: Shape) -> Run:
    """Its output is right, and so is one more row after it."""

    def run(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty(len(x), len(weight), dtype=x.dtype)
        more = out.as_strided((len(x) + 1, len(weight)), out.stride())
        more.copy_(F.linear(torch.cat((x, x[:1])), weight))
        return out

    return run


def _leaves_a_row(weight: torch.Tensor, shape: Shape) -> Run:
    def run(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty(len(x), len(weight), dtype=x.dtype)
        out[:6] = F.linear(x[:6], weight)
        return out

    return run


def _changes_inputs(weight: torch.Tensor, shape: Shape) -> Run:
    def run(x: torch.Tensor) -> torch.Tensor:
        found = F.linear(x, weight)
        x[0, 0] += 1
        return found

    return run


def _raises(weight: torch.Tensor, shape: Shape) -> Run:
    raise RuntimeError("no such instruction")


FAULTS: dict[str, Callable[[torch.Tensor, Shape], Run]] = {
    # A tenth of the weights' spread: a bound by the largest value would pass it.
    "off by 0.002": lambda weight, shape: _right((weight + 0.002).contiguous(), shape),
    "nan": _nan_in_one_row,
    "from seven rows": _wrong_from_seven_rows,
    "right once": _right_once,
    "segfault": lambda weight, shape: _crash,
    "exit": lambda weight, shape: lambda x: os._exit(0) or x,
    "hang": lambda weight, shape: _hang,
    "raises": _raises,
    "outside": _outside,
    "leaves a row": _leaves_a_row,
    "changes inputs": _changes_inputs,
    "half": lambda weight, shape: lambda x: F.linear(x, weight)[:, :48],
}  # fmt: skip


def operation_with(faults: str, *, own: str = "plain") -> Operation:
    """The operation with ``faults`` (names with commas between) before its two right candidates."""
    planted = tuple(Candidate(name=name, build=FAULTS[name]) for name in faults.split(",") if name)
    right = (Candidate(name="slow", build=_slow), Candidate(name="plain", build=_right))
    return Operation(
        candidates=planted if own == "none" else (*planted, *right),
        default=lambda shape, device: ((MANY, planted[0].name if own in ("none", "wrong") else own),),
        weights=_weights,
        inputs=_inputs,
        twin=_twin,
        num_bytes=lambda shape: 2 * int(shape["in"]) * int(shape["out"]),
        sources=(),
    )


def make_place(folder: Path, faults: str, *, own: str = "plain") -> str:
    """A module, importable by its name, whose ``OPERATION`` has ``faults``; returns its place."""
    name = f"planted_{abs(hash((faults, own)))}"
    lines = (
        "from tests.unit.worker.tuning.planted import operation_with",
        f"OPERATION = operation_with({faults!r}, own={own!r})",
    )
    (folder / f"{name}.py").write_text("\n".join(lines))
    return f":{name}"
