"""What a job does with the Python API: a function per program, from an ``LLM`` to what its tokens must equal.

The same function runs on the CPU for the oracle.  ``python -m tests.fake_cuda.programs NAME OPTIONS RESULT`` runs one,
with its options as JSON, and writes its result.
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from tp_engine import LLM, SamplingParams

Program: TypeAlias = Callable[[LLM], Any]

PROMPTS = [[5, 9, 13, 7], list(range(20, 50)), [7] * 17]
# Greedy, by noise with a rank, and by noise alone.
_SAMPLING: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 0.8, "top_k": 5, "seed": 4},
    {"temperature": 1.0, "seed": 3},
)


def generate(llm: LLM, sampling: tuple[dict[str, Any], ...] = _SAMPLING, max_tokens: int = 6) -> list[list[int]]:
    """Token ids of three prompts, the longer ones in chunks beside decodes."""
    params = [SamplingParams(max_tokens=max_tokens, ignore_eos=True, **own) for own in sampling]
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    llm.engine.check_integrity()
    return [list(output.outputs[0].token_ids) for output in outputs]


PROGRAMS: dict[str, Program] = {"generate": generate}


def run(name: str, options: Mapping[str, Any]) -> Any:
    """The result of a program on an engine with these options."""
    with LLM(**options) as llm:
        return PROGRAMS[name](llm)


def main(name: str, options: str, result: str) -> None:
    """Run a program and write its result, when the engine has ended."""
    found = run(name, json.loads(options))
    gc.collect()
    Path(result).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
