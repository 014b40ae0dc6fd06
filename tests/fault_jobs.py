"""Start whole jobs that fail, watch them, and search for leftovers.

Three kinds: ``script`` (a Python script whose ``LLM`` starts its own ranks), ``batch`` and ``serve`` (torchrun with
``launch/batch.py`` and ``launch/serve.py``).  Every process of a job inherits a marker in its environment.  The marker
finds all processes of the job, orphans too, and only those are ever killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import psutil

ROOT = Path(__file__).resolve().parents[1]
_DEMO_MODEL = ROOT / "tp_engine" / "models" / "demo_model"
MARKER = "TP_ENGINE_TEST_JOB"
STRUCK = "injected by TP_ENGINE_FAULT"
SOFT_LIMIT_S, HARD_LIMIT_S, STARTUP_LIMIT_S = 1.0, 3.0, 30.0
LONG_START_S = 150.0
"""``startup_timeout_s`` of jobs that are to start, also on a busy machine."""
DETECTION_S = 10.0
"""A job must end within this time after the limit for its fault (after the fault itself for a dead rank)."""

_PROMPTS = [[65, 66, 67], [68] * 20]
OVERFLOWING: tuple[dict[str, object], list[list[int]]] = (
    {"num_gpu_blocks_override": 16, "kv_offloading_size": 0.02},
    [[token] * 60 for token in range(65, 75)],
)
"""Options and prompts of a job whose blocks move to a host tier and back: ten prompts of 5 blocks, a pool of 16."""

_URL = re.compile(r"serving \S+ at (http://\S+?),? ")
_POLL_S = 0.02

# No ``if __name__ == "__main__"``: starting ranks must not run the script again.
_SCRIPT = """
import json, sys, time
from tp_engine import LLM, SamplingParams
options, rounds, prompts = json.loads(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])
params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
with LLM(**options) as llm:
    print("ready", flush=True)
    for _ in range(rounds):
        found = llm.generate(prompts, params, use_tqdm=False)
        print("tokens", *found[0].outputs[0].token_ids, flush=True)
    if not rounds:
        time.sleep(3600)
"""


class Place(Protocol):
    """Where a part of a job runs: how commands are run there, and torchrun's options for meeting the other parts."""

    @property
    def meeting(self) -> Sequence[str]:
        """Options of torchrun."""

    def command(self, command: Sequence[str]) -> list[str]:
        """``command``, run there."""


@dataclass
class Job:
    """A running job.  ``lines`` grows while it runs: (time.monotonic(), text)."""

    kind: str
    process: subprocess.Popen[str]
    marker: str
    flight_records: Path
    is_launched: bool = False
    started_s: float = field(default_factory=time.monotonic)
    reader: threading.Thread = field(init=False)
    lines: list[tuple[float, str]] = field(default_factory=list)

    def text(self) -> str:
        """The job's output so far, standard output and error."""
        return "".join(line for _, line in self.lines)

    def seen_s(self, text: str) -> float | None:
        """The time of the first line with ``text`` (time.monotonic()), or None."""
        return next((seconds for seconds, line in list(self.lines) if text in line), None)

    def wait_for(self, text: str, timeout_s: float) -> float:
        """Wait for a line with ``text`` and return its time."""
        deadline_s = time.monotonic() + timeout_s
        while (seen_s := self.seen_s(text)) is None:
            assert self.process.poll() is None, f"the job ended before {text!r}:\n{self.tail()}"
            assert time.monotonic() < deadline_s, f"no {text!r} within {timeout_s:g} s:\n{self.tail()}"
            time.sleep(_POLL_S)
        return seen_s

    def slack_s(self) -> float:
        """Extra time for a busy machine: as long as the job has run so far, at least 5 s."""
        return max(5.0, time.monotonic() - self.started_s)

    def wait_ready(self, timeout_s: float = LONG_START_S) -> None:
        """Wait until the engine runs."""
        self.wait_for({"script": "ready", "batch": "", "serve": "serving "}[self.kind], timeout_s)

    def url(self) -> str:
        """The address of a serving job."""
        found = _URL.search(self.text())
        assert found is not None, self.tail()
        return found[1]

    def wait_end(self, deadline_s: float) -> int:
        """The exit code of the script or of torchrun; no process may be left at ``deadline_s`` (monotonic)."""
        try:
            code = self.process.wait(max(0.0, deadline_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            stacks = self._abort_with_stacks()
            raise AssertionError(f"the job runs on:\n{stacks}\n{self.tail()}") from None
        left = self.leftovers(deadline_s - time.monotonic())
        assert not left, f"left behind: {left}\n{self.tail()}"
        self.reader.join(5.0)
        return code

    def processes(self) -> list[psutil.Process]:
        """Every living process of the job."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARKER) == self.marker:
                    found.append(process)
        return found

    def rank(self, rank: int) -> psutil.Process | None:
        """The process of ``rank``, if it exists."""
        if not self.is_launched:
            return self._own_rank(rank)
        with contextlib.suppress(psutil.Error):
            for child in psutil.Process(self.process.pid).children():
                with contextlib.suppress(psutil.Error):
                    if child.environ().get("RANK") == str(rank):
                        return child
        return None

    def leftovers(self, grace_s: float = DETECTION_S) -> list[str]:
        """Living processes after ``grace_s`` seconds at most, and names in /dev/shm."""
        deadline_s = time.monotonic() + grace_s
        while (left := self.processes()) and time.monotonic() < deadline_s:
            time.sleep(_POLL_S)
        names = [f"/dev/shm/{path.name}" for path in Path("/dev/shm").glob("tp_engine-*")]
        return [
            f"process {process.pid} ({process.status()}): {' '.join(process.cmdline())}" for process in left
        ] + names

    def kill(self) -> None:
        """Kill all processes that are left."""
        while left := self.processes():
            for process in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        self.process.wait()

    def tail(self) -> str:
        """The end of the output."""
        return self.text()[-6000:]

    def _own_rank(self, rank: int) -> psutil.Process | None:
        with contextlib.suppress(psutil.Error):
            script = psutil.Process(self.process.pid)
            ranks = [child for child in script.children() if "tp_engine.engine.rank_process" in child.cmdline()]
            ranks.sort(key=lambda child: (child.create_time(), child.pid))
            return [script, *ranks][rank] if rank <= len(ranks) else None
        return None

    def _abort_with_stacks(self) -> str:
        """Abort the living processes, and return their list; PYTHONFAULTHANDLER writes all stacks to the output."""
        lines = []
        for process in self.processes():
            with contextlib.suppress(psutil.Error, OSError):
                wchan = Path(f"/proc/{process.pid}/wchan").read_text()
                lines.append(f"  {process.pid} {process.status()} {wchan} {' '.join(process.cmdline())[:150]}")
                process.send_signal(signal.SIGABRT)
        time.sleep(1.0)
        return "\n".join(lines)


@contextlib.contextmanager
def job(
    kind: str,
    folder: Path,
    *,
    fault: str = "",
    num_ranks: int = 2,
    rounds: int = 1,
    prompts: Sequence[Sequence[int]] = _PROMPTS,
    options: Mapping[str, object] | None = None,
    environment: Mapping[str, str] | None = None,
    place: Place | None = None,
) -> Iterator[Job]:
    """A job with the demo model and small limits; no process of it lives after the block.

    With a ``place`` it is one host's part of a job under torchrun, scripts too, with ``num_ranks`` ranks there.
    ``folder`` is for its files.  ``rounds`` is a script's number of ``generate`` calls (0: it stays idle), or a batch's
    number of requests.  ``prompts`` are those of each call, and of the requests in turns.  ``options`` are further
    fields of ``EngineConfig``.
    """
    engine = _engine_options(folder) | dict(options or {})
    if kind != "serve":
        engine.setdefault("model", str(_without_tokenizer(folder)))
    marker = secrets.token_hex(8)
    command = _command(kind, folder, engine, num_ranks, rounds, prompts, place)
    process = subprocess.Popen(
        command if place is None else place.command(command),
        cwd=ROOT,
        env={**os.environ, **_environment(fault), **(environment or {}), MARKER: marker, "PYTHONFAULTHANDLER": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    started = Job(kind, process, marker, folder / "flight", is_launched=kind != "script" or place is not None)
    started.reader = threading.Thread(target=_read, args=(started,), daemon=True)
    started.reader.start()
    try:
        yield started
    finally:
        started.kill()
        started.reader.join(5.0)


def port_is_free(url: str) -> bool:
    """Whether no process listens at ``url``."""
    host, _, port = url.removeprefix("http://").partition(":")
    with socket.socket() as probe:
        probe.settimeout(2.0)
        return probe.connect_ex((host, int(port))) != 0


def _without_tokenizer(folder: Path) -> Path:
    """The demo model without a tokenizer, for prompts of token ids; importing tokenizers takes a third of a start."""
    bare = folder / "model"
    bare.mkdir(parents=True)
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        (bare / name).symlink_to(_DEMO_MODEL / name)
    return bare


def _engine_options(folder: Path) -> dict[str, object]:
    return {
        "device": "cpu",
        "attention_backend": "torch",
        "num_gpu_blocks_override": 64,
        "max_model_len": 256,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "startup_timeout_s": LONG_START_S,
        "collective_timeout_s": 30.0,
        "watchdog_warn_s": SOFT_LIMIT_S,
        "watchdog_timeout_s": HARD_LIMIT_S,
        "flight_recorder_dir": str(folder / "flight"),
    }


def _command(
    kind: str,
    folder: Path,
    engine: Mapping[str, object],
    num_ranks: int,
    rounds: int,
    prompts: Sequence[Sequence[int]],
    place: Place | None,
) -> list[str]:
    if kind == "script" and place is None:
        options = json.dumps({**engine, "tensor_parallel_size": num_ranks})
        return [sys.executable, "-c", _SCRIPT, options, str(rounds), json.dumps(prompts)]
    flags = [text for name, value in engine.items() for text in ("--" + name.replace("_", "-"), str(value))]
    meeting = ("--standalone",) if place is None else place.meeting
    torchrun = [sys.executable, "-m", "torch.distributed.run", *meeting, "--nproc-per-node", str(num_ranks)]
    if kind == "script":
        (folder / "job.py").write_text(_SCRIPT)
        return [*torchrun, str(folder / "job.py"), json.dumps(engine), str(rounds), json.dumps(prompts)]
    if kind == "serve":
        return [*torchrun, "launch/serve.py", "--port", "0", "--shutdown-timeout-s", "8", *flags]
    source = folder / "in.jsonl"
    _write_requests(source, [prompts[number % len(prompts)] for number in range(rounds)])
    return [*torchrun, "launch/batch.py", "-i", str(source), "-o", str(folder / "out.jsonl"), *flags]


def _write_requests(path: Path, prompts: Sequence[Sequence[int]]) -> None:
    line = {"method": "POST", "url": "/v1/completions"}
    body = {"max_tokens": 12, "temperature": 0, "ignore_eos": True}
    lines = [
        json.dumps({**line, "custom_id": f"request-{number}", "body": {**body, "prompt": prompt}}) + "\n"
        for number, prompt in enumerate(prompts)
    ]
    path.write_text("".join(lines))


def _environment(fault: str) -> dict[str, str]:
    return {
        "TP_ENGINE_FAULT": fault,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(ROOT),
        "PYTHONUNBUFFERED": "1",
    }


def _read(started: Job) -> None:
    assert started.process.stdout is not None
    for line in started.process.stdout:
        started.lines.append((time.monotonic(), line))


def interrupt(process: psutil.Process | subprocess.Popen[str], number: signal.Signals) -> None:
    """Send a signal to one process, if it still exists."""
    with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
        process.send_signal(number)
