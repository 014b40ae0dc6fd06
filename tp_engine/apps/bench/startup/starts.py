"""Start each contender in a fresh process; the clock starts before the process exists."""

from __future__ import annotations

import json
import resource
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tp_engine.api.server_client import ServerClient
from tp_engine.apps.bench.offline.process import RUN_FILE, peer_environment
from tp_engine.apps.bench.serving.launch import own_environment, own_server
from tp_engine.apps.bench.startup import one_start
from tp_engine.apps.bench.startup.one_start import ANSWER, PROMPT

_LAST_CHARS = 2000


@dataclass(frozen=True, kw_only=True)
class Start:
    """Seconds from the start of the process to each mark, of which the last ones are ``ready`` and ``first token``.
    ``within`` are parts of the time until ready.  ``cpu_s`` is the CPU time of all the contender's processes, their end
    included."""

    marks: Mapping[str, float]
    cpu_s: float
    within: Mapping[str, float] = field(default_factory=dict)

    @property
    def phases(self) -> dict[str, float]:
        """Seconds between successive marks."""
        begins = [0.0, *self.marks.values()]
        return {name: end - begin for (name, end), begin in zip(self.marks.items(), begins, strict=False)}


def api_start(engine: str, python: str, spec: Mapping[str, Any], *, timeout_s: float) -> Start:
    """Run a script that makes an ``LLM`` and generates one token.  ``RuntimeError`` shows the output of a failure."""
    threads = int(spec["threads"])
    environment = peer_environment(engine, python, threads) if engine == "vllm" else own_environment(threads)
    command = [python, "-c", RUN_FILE, one_start.__file__, engine, json.dumps(spec)]
    used_s, begin_s = _children_cpu_s(), time.monotonic()
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", env=environment, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired as late:
        said = late.stderr if isinstance(late.stderr, str) else (late.stderr or b"").decode(errors="replace")
        raise RuntimeError(
            f"{engine} had no first token within {timeout_s:g} s; it said last: {said[-_LAST_CHARS:]}"
        ) from None
    answers = [line for line in done.stdout.splitlines() if line.startswith(ANSWER)]
    if not answers:  # an error after the answer does not concern the start
        raise RuntimeError(f"{engine} ended with exit code {done.returncode}: {done.stderr[-_LAST_CHARS:]}")
    answer = json.loads(answers[0].removeprefix(ANSWER))
    marks = {name: at_s - begin_s for name, at_s in answer["marks"].items()}
    return Start(marks=marks, cpu_s=_children_cpu_s() - used_s, within=answer["within"])


def server_start(spec: Mapping[str, Any], *, size: int, timeout_s: float) -> Start:
    """Run ``tp-engine serve`` until ``GET /health`` answers 200, to 0.05 s, then one completion of one token."""
    arguments = ["--model", str(spec["model"])]
    arguments += [f"--{name.replace('_', '-')}={value}" for name, value in spec["options"].items()]
    used_s, begin_s, marks = _children_cpu_s(), time.monotonic(), {}
    with tempfile.TemporaryDirectory() as name:
        log, threads = Path(name) / "log", int(spec["threads"])
        with own_server(arguments, size, log, start_s=timeout_s, threads=threads) as url:
            marks["ready"] = time.monotonic() - begin_s
            client = ServerClient(url, timeout_s=timeout_s)
            body = {"model": client.model(), "prompt": PROMPT, "max_tokens": 1, "temperature": 0, "ignore_eos": True}
            client.post("/v1/completions", body)
            marks["first token"] = time.monotonic() - begin_s
            with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(f"{url}/engine") as report:
                within = json.load(report)["ranks"][0]["startup_s"]
    return Start(marks=marks, cpu_s=_children_cpu_s() - used_s, within=within)


def _children_cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime
