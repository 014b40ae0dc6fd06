"""Jobs on fake nodes: the answers of the CPU, and logs without a fault (``logs.py``).

They need torch's CUDA build: ``scripts/test_fake_gpus`` runs them in an environment of its own.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests import fault_jobs
from tests.fake_cuda import jobs, logs, programs
from tests.fake_cuda.jobs import FAULTS, JOBS, REFUSALS, Fault, Job, Refusal
from tests.fake_cuda.node import ROOT, Node, build
from tests.fault_jobs import interrupt
from tests.host_jobs import hosts_job
from tests.mtp_heads import make_mtp_cycle

# The last resort: jobs that hang are ended by the engine, whose limits are for progress.
_LIMIT_S = 900
# The oracle is plain PyTorch: compiling the CPU's kernels takes longer than what they save.
os.environ["TP_ENGINE_NATIVE"] = "0"
_SHOWN = 9000  # characters of a program's output, if it was wrong
# A process keeps the rooms for its uploads (layers/upload.py).
_UPLOAD_BYTES = 3 * (4 << 20)
_CHILD_ENVIRONMENT = ("PATH", "HOME", "LANG", "TMPDIR", "OMP_NUM_THREADS", "HF_HUB_OFFLINE", "TOKENIZERS_PARALLELISM")


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The runtime."""
    return build(tmp_path_factory.mktemp("runtime"))


@pytest.fixture(scope="session")
def model(checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[Job], str]:
    """The folder of a job's checkpoint."""

    @functools.cache
    def with_head(folder: Path) -> Path:
        return make_mtp_cycle(tmp_path_factory.mktemp("head") / "model", folder)

    def of(job: Job) -> str:
        folder = checkpoint(**job.model)
        return str(with_head(folder) if job.has_head else folder)

    return of


@pytest.fixture(scope="session")
def expected(model: Callable[[Job], str]) -> Callable[[Job], Any]:
    """The result of a job's program on one CPU rank."""
    known: dict[str, Any] = {}

    def of(job: Job) -> Any:
        options = {**job.oracle_options(), "model": model(job)}
        key = repr((job.program, options))
        if key not in known:
            known[key] = json.loads(json.dumps(programs.run(job.program, options)))
        return known[key]

    return of


@pytest.mark.parametrize("job", JOBS, ids=[job.name for job in JOBS])
def test_answers_and_logs(
    job: Job, library: Path, model: Callable[[Job], str], expected: Callable[[Job], Any], tmp_path: Path
) -> None:
    """Oracle: tokens and log-probabilities of one CPU rank; the rules of ``logs.faults``."""
    result = tmp_path / "result.json"
    options = {**job.all_options(), "model": model(job)}
    text = json.dumps(options).replace("FOLDER", str(tmp_path))
    output = run_program(Node(library, job.node), tmp_path, [job.program, text, str(result)], job)
    assert result.exists(), output[-_SHOWN:]
    read = logs.read_logs(tmp_path)
    found = logs.faults(
        read, pinned_bytes=_UPLOAD_BYTES, device_bytes=job.kept_bytes, shares_devices="device_ids" in options
    )
    found += logs.ledger_faults(read, output)
    assert not found, "\n".join(found) + output[-_SHOWN:]
    different = programs.differences(json.loads(result.read_text()), expected(job), job.tolerance)
    assert not different, "\n".join(different[:3]) + output[-_SHOWN:]


@pytest.mark.parametrize("refusal", REFUSALS, ids=[refusal.name for refusal in REFUSALS])
def test_refusals(refusal: Refusal, library: Path, checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """Oracle: the rule, in the message; no rank has allocated or captured anything."""
    job = Job(refusal.name, refusal.covers, refusal.ranks, model=refusal.model, node=refusal.node,
              options=refusal.options, environment=refusal.environment)  # fmt: skip
    options = {**job.all_options(), "model": str(checkpoint(**job.model))}
    output = run_program(Node(library, job.node), tmp_path, [job.program, json.dumps(options), "none"], job)
    assert re.search(refusal.message, " ".join(output.split())), output[-_SHOWN:]
    assert "ConfigError" in output, output[-_SHOWN:]
    assert not [one for log in logs.read_logs(tmp_path) for one in log.of("capture", "nccl")]


@pytest.mark.parametrize("fault", FAULTS, ids=[fault.name for fault in FAULTS])
def test_faults(fault: Fault, library: Path, checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """Oracle: every process ends by itself, in time, and the message names the cause."""
    with launched(
        "script", library, checkpoint, tmp_path, fault.node, options=fault.options, fault=fault.fault, rounds=3
    ) as running:
        code = running.wait_end(time.monotonic() + _LIMIT_S)
    assert code != 0, running.tail()
    assert re.search(fault.message, running.text()), running.tail()
    assert not (found := logs.faults(logs.read_logs(tmp_path / "logs"), ends_well=False)), found


def test_server(library: Path, checkpoint: Callable[..., Path], expected: Callable[[Job], Any], tmp_path: Path) -> None:
    """Oracle: the greedy tokens of one CPU rank, through HTTP; SIGTERM ends all ranks with 0, and they keep nothing."""
    with launched("serve", library, checkpoint, tmp_path, {"LAZY": "1"}) as running:
        running.wait_ready(_LIMIT_S)
        wanted = expected(JOBS[0])[0]
        body = {
            "prompt": programs.PROMPTS[0],
            "max_tokens": len(wanted),
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        request = urllib.request.Request(
            running.url() + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        answer = json.loads(urllib.request.urlopen(request, timeout=_LIMIT_S).read())
        interrupt(running.process, signal.SIGTERM)
        running.wait_end(time.monotonic() + _LIMIT_S)
    assert answer["choices"][0]["token_ids"] == wanted, answer
    assert not (found := logs.faults(logs.read_logs(tmp_path / "logs"), pinned_bytes=_UPLOAD_BYTES)), found


def test_two_hosts(
    library: Path, checkpoint: Callable[..., Path], expected: Callable[[Job], Any], tmp_path: Path
) -> None:
    """Oracle: the greedy tokens of one CPU rank; each host has one rank and one GPU."""
    (tmp_path / "logs").mkdir()
    node = Node(library, {"GPUS": "1xH100", "LAZY": "1"})
    options = {**jobs.LAUNCHED_OPTIONS, "model": str(checkpoint(**JOBS[0].model))}
    with hosts_job(
        "script", tmp_path, num_local=1, options=options, environment=node.environment(tmp_path / "logs")
    ) as running:
        for part in running.parts:
            assert part.wait_end(time.monotonic() + _LIMIT_S) == 0, running.tail()
    # The script's LLM, though closed, lives to the end with a small tensor.
    read = logs.read_logs(tmp_path / "logs")
    found = logs.faults(read, shares_devices=True, pinned_bytes=_UPLOAD_BYTES, device_bytes=2 << 20)
    assert not found, found
    line = " ".join(["tokens", *map(str, expected(Job("", "", program="first")))])
    assert line in running.text(), running.tail()


def test_one_visible_gpu_per_rank(
    library: Path, checkpoint: Callable[..., Path], expected: Callable[[Job], Any], tmp_path: Path
) -> None:
    """Oracle: the greedy tokens of one CPU rank; the launcher shows each rank one GPU, as Slurm's --gpus-per-task=1."""
    node = Node(library, {"GPUS": "2xH100", "LAZY": "1"})
    options = json.dumps({**jobs.LAUNCHED_OPTIONS, "model": str(checkpoint(**JOBS[0].model))})
    result = tmp_path / "result.json"
    rank = [sys.executable, "-m", "tests.fake_cuda.programs", "first", options, str(result)]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python"]
    shown = ["bash", "-c", 'CUDA_VISIBLE_DEVICES=$LOCAL_RANK exec "$@"', "bash"]
    done = subprocess.run(
        [*launcher, *shown, *rank], cwd=ROOT, env={**_own_environment(), **node.environment(tmp_path)},
        capture_output=True, text=True, timeout=_LIMIT_S,
    )  # fmt: skip
    assert result.exists(), done.stdout[-3000:] + done.stderr[-6000:]
    assert json.loads(result.read_text()) == expected(Job("", "", program="first"))
    found = logs.faults(logs.read_logs(tmp_path), shares_devices=True, pinned_bytes=_UPLOAD_BYTES)
    assert not found, found


@contextlib.contextmanager
def launched(
    kind: str,
    library: Path,
    checkpoint: Callable[..., Path],
    folder: Path,
    node: Mapping[str, str],
    *,
    options: Mapping[str, Any] | None = None,
    **more: Any,
) -> Iterator[fault_jobs.Job]:
    """A job of two ranks of ``tests.fault_jobs`` on a node; its logs are in ``folder / "logs"``."""
    (folder / "logs").mkdir()
    environment = Node(library, node).environment(folder / "logs")
    engine = {**jobs.LAUNCHED_OPTIONS, **(options or {}), "model": str(checkpoint(**JOBS[0].model))}
    with fault_jobs.job(kind, folder, options=engine, environment=environment, **more) as running:
        yield running


def run_program(node: Node, folder: Path, arguments: list[str], job: Job) -> str:
    """The output of a program's processes on ``node``, which must end."""
    command = [sys.executable, "-m", "tests.fake_cuda.programs", *arguments]
    environment = {**_own_environment(), **node.environment(folder), **job.environment}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=_LIMIT_S)
    return f"{done.stdout}{done.stderr}\nexit code {done.returncode}"


def _own_environment() -> dict[str, str]:
    """What a job takes over from this process."""
    return {name: os.environ[name] for name in _CHILD_ENVIRONMENT if name in os.environ}
