"""Start each contender in a fresh process; the clock starts before the process exists."""

from __future__ import annotations

import json
import resource
import subprocess
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import httpx

from benchmarks.offline.process import peer_environment
from benchmarks.serving.launch import own_environment, started_server
from benchmarks.startup.one_start import ANSWER, PROMPT

_MODULE = "benchmarks.startup.one_start"
_POLL_S = 0.01
_LAST_CHARS = 2000


@dataclass(frozen=True, kw_only=True)
class Start:
    """Seconds from the start of the process to ``ready`` and to the first token.  ``phases`` follow each other and add
    up to the time to the first token; ``within`` are parts of phases.  ``cpu_s`` is the CPU time of all the contender's
    processes, their end included; ``phases_cpu_s`` is a script's, by phase."""

    ready_s: float
    first_token_s: float
    cpu_s: float
    phases: dict[str, float]
    within: dict[str, float] = field(default_factory=dict)
    phases_cpu_s: dict[str, float] = field(default_factory=dict)


def api_start(engine: str, python: str, spec: Mapping[str, Any], *, timeout_s: float) -> Start:
    """Run a script that makes an ``LLM`` and generates one token.  ``RuntimeError`` shows the output of a failure."""
    threads = int(spec["threads"])
    environment = peer_environment(engine, python, threads) if engine == "vllm" else own_environment(threads)
    command = [python, "-m", _MODULE, engine, json.dumps(spec)]
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
        used_s, begin_s = _children_cpu_s(), time.monotonic()
        try:
            done = subprocess.run(
                command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment, timeout=timeout_s, check=False
            )
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"{engine} had no first token within {timeout_s:g} s{_end_of(log)}") from None
        cpu_s = _children_cpu_s() - used_s
        answers = [line for line in done.stdout.splitlines() if line.startswith(ANSWER)]
        if not answers:  # an error after the answer does not concern the start
            raise RuntimeError(f"{engine} ended with exit code {done.returncode}{_end_of(log)}")
    answer = json.loads(answers[0].removeprefix(ANSWER))
    marks = {name: at_s - begin_s for name, at_s in answer["marks"].items()}
    return Start(
        ready_s=marks["ready"],
        first_token_s=marks["first token"],
        cpu_s=cpu_s,
        phases=_differences(marks),
        within=answer["phases"],
        phases_cpu_s=_differences(answer["cpu_s"]),
    )


def server_start(spec: Mapping[str, Any], *, size: int, timeout_s: float) -> Start:
    """Run ``launch/serve.py`` until ``GET /health`` answers 200, then one completion of one token."""
    command = ["launch/serve.py", "--model", str(spec["model"])]
    command += [f"--{name.replace('_', '-')}={value}" for name, value in spec["options"].items()]
    with tempfile.TemporaryDirectory() as name:
        log, environment = Path(name) / "log", own_environment(int(spec["threads"]))
        used_s, begin_s = _children_cpu_s(), time.monotonic()
        with started_server(command, size, log, environment) as process:
            marks, within = _follow_server(process, log, begin_s, timeout_s)
    return Start(
        ready_s=marks["ready"],
        first_token_s=marks["first token"],
        cpu_s=_children_cpu_s() - used_s,
        phases=_differences(marks),
        within=within,
    )


def _follow_server(
    process: subprocess.Popen[bytes], log: Path, begin_s: float, timeout_s: float
) -> tuple[dict[str, float], dict[str, float]]:
    """The times of the ready line, the first good /health and the completion; and rank 0's own phases."""
    deadline_s, marks = begin_s + timeout_s, {"process": time.monotonic() - begin_s}
    while (url := _announced(log)) is None:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with exit code {process.returncode}{_tail(log)}")
        if time.monotonic() > deadline_s:
            raise RuntimeError(f"the server was not ready within {timeout_s:g} s{_tail(log)}")
        time.sleep(_POLL_S)
    with httpx.Client(base_url=url, timeout=timeout_s) as client:
        while client.get("/health").status_code != httpx.codes.OK:
            time.sleep(_POLL_S)
        marks["ready"] = time.monotonic() - begin_s
        model = client.get("/v1/models").json()["data"][0]["id"]
        body = {"model": model, "prompt": PROMPT, "max_tokens": 1, "temperature": 0, "ignore_eos": True}
        client.post("/v1/completions", json=body).raise_for_status()
        marks["first token"] = time.monotonic() - begin_s
        ranks = client.get("/engine").raise_for_status().json()["ranks"]
    return marks, ranks[0]["startup_s"]


def _announced(log: Path) -> str | None:
    """The URL in the line that the server prints when it is ready."""
    for line in log.read_text(encoding="utf-8", errors="replace").splitlines():
        if line.startswith("serving ") and " at http" in line:
            return line.split(" at ", 1)[1].split(",")[0]
    return None


def _differences(marks: Mapping[str, float]) -> dict[str, float]:
    """The seconds between successive marks; ``marks`` are times since the start, in order."""
    ends = list(marks.values())
    return {name: end - begin for (name, end), begin in zip(marks.items(), [0.0, *ends[:-1]], strict=True)}


def _children_cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _end_of(log: IO[str]) -> str:
    log.seek(0)
    return f"; it said last: {log.read()[-_LAST_CHARS:]}"


def _tail(log: Path) -> str:
    return f"; it said last: {log.read_text(encoding='utf-8', errors='replace')[-_LAST_CHARS:]}"
