"""Start an engine's Python API in a fresh process, up to its first token; needs the standard library only.

This file runs as a script with ENGINE and SPEC: ENGINE is a module with ``LLM`` and ``SamplingParams``
(tp_engine, vllm) and SPEC is JSON, ``{"model": FOLDER, "options": {...}}``.  The answer is one line on standard output
that begins with ``ANSWER``: times of the monotonic clock, which all processes share, and seconds of parts.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from typing import Any

ANSWER = "answer: "
PROMPT = [1, 2, 3, 4, 5, 6, 7, 8]


def start(engine: str, spec: dict[str, Any], marks: dict[str, float]) -> dict[str, float]:
    """Import, construct, generate one token, and close; this fills ``marks``.  Returns seconds of parts."""
    importlib.import_module("torch")
    marks["torch"] = time.monotonic()
    module: Any = importlib.import_module(engine)
    make, params = module.LLM, module.SamplingParams  # lazy modules import what they need only here
    marks["imports"] = time.monotonic()
    llm = make(model=spec["model"], **spec["options"])
    marks["ready"] = time.monotonic()
    prompt: Any = PROMPT if engine == "tp_engine" else {"prompt_token_ids": PROMPT}
    outputs = llm.generate([prompt], params(temperature=0, max_tokens=1, ignore_eos=True), use_tqdm=False)
    marks["first token"] = time.monotonic()
    assert len(outputs[0].outputs[0].token_ids) == 1
    if engine != "tp_engine":
        return {}
    parts: dict[str, float] = llm.engine.report().ranks[0].startup_s
    llm.close()
    return parts


def main(engine: str, spec: str) -> None:
    """Start once and answer."""
    marks = {"interpreter": time.monotonic()}
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the engine's output goes to the log
    parts = start(engine, json.loads(spec), marks)
    answers.write(ANSWER + json.dumps({"marks": marks, "within": parts}) + "\n")
    answers.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
