"""Candidates on a fake GPU: Triton's for quantised weights, in its interpreter, after two that are planted.

``python -m tests.fake_cuda.tuned RESULT`` tries them as a start does, and writes the verdicts and the choice.
"""

from __future__ import annotations

import ctypes
import json
import sys
from dataclasses import replace
from pathlib import Path

import torch

from tp_engine.kernels.candidates import MANY, Candidate, Run, Shape
from tp_engine.kernels.quantization.linear_candidates import OPERATION as OWN
from tp_engine.kernels.quantization.weights import QuantisedWeight, multiply_quantised
from tp_engine.worker.tuning.tuner import Tuner, WantedShape

SHAPE: dict[str, int | str] = {
    "in": 64, "out": 32, "type": "float32", "codes": "int8", "scales": "none", "group": 0, "row_block": 1, "zeros": 0,
    "factors": 1, "parts": 0, "rows": "whole",
}  # fmt: skip


def _wrong(weight: QuantisedWeight, shape: Shape) -> Run:
    return lambda x, bias, activation: multiply_quantised(x, weight, bias, activation) * 1.1


def _crash(weight: QuantisedWeight, shape: Shape) -> Run:
    def run(x: torch.Tensor, *_others: object) -> torch.Tensor:
        ctypes.string_at(0)
        return x

    return run


OPERATION = replace(
    OWN,
    candidates=(
        Candidate(name="wrong", build=_wrong),
        Candidate(name="crash", build=_crash),
        *(one for one in OWN.candidates if one.name in ("row", "tiles-16x32x64-w4-s4")),
    ),
    default=lambda shape, device: ((MANY, "wrong"),),
)


def main(result: str) -> None:
    """Try the candidates on the first GPU."""
    tuner = Tuner(
        device=torch.device("cuda", 0), places={"planted": ":tests.fake_cuda.tuned"}, rows=(1,), silence_s=300,
        budget_s=800,
    )  # fmt: skip
    found = tuner.tune([WantedShape(operation="planted", shape=SHAPE)])[0]
    has_context = torch.cuda.is_initialized()
    content = {
        "choice": found.choice, "tried": {one.candidate: one.verdict for one in found.tried}, "context": has_context,
    }  # fmt: skip
    Path(result).write_text(json.dumps(content))


if __name__ == "__main__":
    main(*sys.argv[1:])
