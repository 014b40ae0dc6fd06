"""Start an engine's Python API in a fresh process, up to its first token; needs the standard library only.

``python -m benchmarks.startup.one_start ENGINE SPEC``, where ENGINE is a module with ``LLM`` and ``SamplingParams``
(tp_engine, vllm) and SPEC is JSON::

    {"model": FOLDER, "options": {...}}

The answer is one line on standard output that begins with ``ANSWER``.  ``marks`` are times of the monotonic clock,
which all processes share; ``cpu_s`` are this process's CPU seconds at each mark; ``phases`` are seconds of parts.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

ANSWER = "answer: "
PROMPT = [1, 2, 3, 4, 5, 6, 7, 8]


class Marks:
    """The time of each mark, and the CPU time that this process had used by then."""

    def __init__(self) -> None:
        self.marks: dict[str, float] = {}
        self.cpu_s: dict[str, float] = {}
        self.phases: dict[str, float] = {}

    def reach(self, name: str) -> None:
        """Record the mark ``name`` now."""
        self.marks[name], self.cpu_s[name] = time.monotonic(), time.process_time()

    def timed(self, name: str, body: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``body`` so that it records its seconds as the phase ``name``."""

        @functools.wraps(body)
        def run(*args: Any, **kwargs: Any) -> Any:
            started_s = time.monotonic()
            try:
                return body(*args, **kwargs)
            finally:
                self.phases[name] = self.phases.get(name, 0.0) + time.monotonic() - started_s

        return run


def time_own_phases(marks: Marks) -> None:
    """Record how long the parts of the constructor of tp_engine's ``LLM`` take."""
    module: Any = importlib.import_module("tp_engine.api.llm")
    parts = {"check_config": "configuration", "load_tokenizer": "tokenizer", "start_engine": "engine"}
    for name, phase in parts.items():
        setattr(module, name, marks.timed(phase, getattr(module, name)))


def start(engine: str, spec: dict[str, Any], marks: Marks) -> None:
    """Import, construct, generate one token, and close; this completes the marks."""
    importlib.import_module("torch")
    marks.reach("torch")
    module: Any = importlib.import_module(engine)
    make, params = module.LLM, module.SamplingParams  # lazy modules import what they need only here
    marks.reach("imports")
    if engine == "tp_engine":
        time_own_phases(marks)
    llm = make(model=spec["model"], **spec["options"])
    marks.reach("ready")
    prompt: Any = PROMPT if engine == "tp_engine" else {"prompt_token_ids": PROMPT}
    outputs = llm.generate([prompt], params(temperature=0, max_tokens=1, ignore_eos=True), use_tqdm=False)
    marks.reach("first token")
    assert len(outputs[0].outputs[0].token_ids) == 1
    if engine == "tp_engine":
        marks.phases |= llm.engine.report().ranks[0].startup_s
        llm.close()


def main(engine: str, spec: str) -> None:
    """Start once and answer."""
    marks = Marks()
    marks.reach("interpreter")
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the engine's output goes to the log
    start(engine, json.loads(spec), marks)
    answers.write(ANSWER + json.dumps(vars(marks)) + "\n")
    answers.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
