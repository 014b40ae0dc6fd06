"""Try what docs/lab.md holds on this GPU: restore its commit, compare it with the way of main, and say what to do.

    python scripts/gpu/lab.py few_rows [--folder FOLDER]

The commit's files come from the checkout's git history into a folder that is removed afterwards.  Where there is no
history, --folder names one with them: git archive COMMIT | tar -x -C FOLDER, on a machine that has it.  The last line
is JSON, with a verdict for each part: "turn on" if its tests pass and it gains 1 % or more, else "stays out", with why.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

from gpu.run import last_json  # noqa: E402

COMMIT = "9c5db1f"
_LEAST_GAIN = 0.01  # of a whole workload, as CONTRIBUTING.md wants it
Report = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Part:
    """A part of an experiment, named as in docs/lab.md.  ``gain`` compares the reports without and with it: 0.1 is a
    tenth faster.  Without ``gain``, ``why_not`` says why it stays out without a run."""

    title: str
    gain: Callable[[Report, Report], float] | None = None
    why_not: str = ""


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """``command`` runs in the restored folder with the variables ``off``, then ``on``; before it, ``tests``, pytest's
    arguments, compare tokens or numbers."""

    parts: tuple[Part, ...]
    command: str = ""
    off: Mapping[str, str] = field(default_factory=dict)
    on: Mapping[str, str] = field(default_factory=dict)
    tests: str = ""


def workload_gain(name: str) -> Callable[[Report, Report], float]:
    """The gain of a workload of bench_offline."""

    def gain(off: Report, on: Report) -> float:
        before, after = (
            next(one["engines"]["tp_engine TP 1"] for one in report["workloads"] if one["workload"] == name)
            for report in (off, on)
        )
        if "ms_per_token" in before:
            return float(before["ms_per_token"] / after["ms_per_token"] - 1)
        return float(after["tokens_per_s"] / before["tokens_per_s"] - 1)

    return gain


def first_token_gain(off: Report, on: Report) -> float:
    """The gain of bench_prompts' first way."""
    return float(off["results"][0]["ms_to_first_token"] / on["results"][0]["ms_to_first_token"] - 1)


def head_gain(report: Report, _: Report) -> float:
    """The least gain of the LM head over the library, of 64 rows and more, in one report of bench_few_rows."""
    times = {(row["layer"], row["rows"], row["sizes"]): row["us"] for row in report["results"] if "us" in row}
    gains = [
        times[*place, "library"] / us - 1 for (*place, by), us in times.items() if by == "triton" and place[1] > 63
    ]
    return min(gains, default=-1.0)


_OFFLINE = "scripts/bench_offline.py --shape qwen3-0.6b --rounds 1 --no-peer --workloads"
_KERNEL_TESTS = "tests/gpu/test_kernels_gpu.py -k"
EXPERIMENTS = {
    "few_rows": Experiment(
        parts=(
            Part(title="Products of 2 to 256 rows in Triton", gain=workload_gain("32 requests")),
            Part(title="Norm and residual sum inside products of few rows", gain=workload_gain("latency")),
        ),
        command=f"{_OFFLINE} latency,batch32",
        on={"TP_ENGINE_FEW_ROWS": "triton"},
        tests=f"{_KERNEL_TESTS} few_rows",
    ),
    "head_choice": Experiment(
        parts=(Part(title="LM head that chooses tokens", gain=head_gain),),
        command="scripts/bench_few_rows.py --shape qwen3-8b --only head --rows 64 256",
        tests=f"{_KERNEL_TESTS} head_choice",
    ),
    "heads": Experiment(
        parts=(Part(title="Heads prepared inside decode attention", gain=workload_gain("latency")),),
        command=f"{_OFFLINE} latency",
        on={"TP_ENGINE_HEADS_IN_ATTENTION": "1"},
        tests="tests/gpu/test_engine_gpu.py -k heads_in_attention",
    ),
    "long_prompts": Experiment(
        parts=(Part(title="Long prompts by cuDNN", gain=first_token_gain),),
        command="scripts/bench_prompts.py --shape qwen3-8b --prompt-len 8192 --sizes none --repeats 5",
        off={"TP_ENGINE_LONG_PROMPTS": "backend"},
        on={"TP_ENGINE_LONG_PROMPTS": "cudnn"},
    ),
    "others": Experiment(
        parts=(
            Part(title="All-reduce fused with the norm", why_not="it needs two GPUs that share memory"),
            Part(title="FlashInfer, PyTorch's `varlen_attn`, two backends at once", why_not="nothing to gain"),
            Part(title="Prompt lookup on the device", why_not="`ngram` on the host drafts the same tokens"),
        )
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one experiment; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiment", choices=EXPERIMENTS)
    parser.add_argument("--folder", type=Path, help=f"the files of commit {COMMIT}")
    args = parser.parse_args(arguments)
    experiment = EXPERIMENTS[args.experiment]
    if experiment.command:
        with restored(args.folder) as folder:
            found = judge(experiment, lambda command, variables: run(folder, command, variables))
    else:
        found = {part.title: f"stays out: {part.why_not}" for part in experiment.parts}
    for title, verdict in found.items():
        print(f"{title}: {verdict}")
    print(json.dumps({"benchmark": "lab", "commit": COMMIT, "verdict": "; ".join(found.values()), "parts": found}))
    return 0


def judge(experiment: Experiment, run: Callable[[str, Mapping[str, str]], tuple[int, Report]]) -> dict[str, str]:
    """Return the verdict of each part; ``run`` takes a command line and variables; returns exit status and report."""
    if experiment.tests and run(f"-m pytest -q -p no:cacheprovider {experiment.tests}", experiment.on)[0]:
        return {part.title: "stays out: its tests fail" for part in experiment.parts}
    off = run(experiment.command, experiment.off)
    on = run(experiment.command, experiment.on) if experiment.on else off
    if off[0] or on[0] or not off[1] or not on[1]:
        return {part.title: "stays out: its benchmark fails" for part in experiment.parts}
    gains = {part.title: part.gain(off[1], on[1]) for part in experiment.parts if part.gain is not None}
    return {
        title: f"{'turn on' if gain >= _LEAST_GAIN else 'stays out'}: {100 * gain:+.1f} %"
        for title, gain in gains.items()
    }


@contextmanager
def restored(folder: Path | None) -> Iterator[Path]:
    """The files of the commit; SystemExit if the checkout has no history and nothing is given."""
    if folder is not None:
        if not (folder / "scripts" / "bench_offline.py").exists():
            raise SystemExit(f"--folder {folder} has no scripts/bench_offline.py; unpack git archive {COMMIT} there")
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="tp_engine_lab_") as scratch:
        archive = Path(scratch) / "files.tar"
        made = subprocess.run(
            ["git", "-C", str(ROOT), "archive", "-o", str(archive), COMMIT], capture_output=True, text=True, check=False
        )
        if made.returncode:
            raise SystemExit(
                f"commit {COMMIT} can not be restored: {made.stderr.strip() or 'git fails'}. Where {ROOT} has no git "
                f"history, unpack its files (git archive {COMMIT} | tar -x -C FOLDER) and give --lab-folder FOLDER"
            )
        subprocess.run(["tar", "-x", "-f", str(archive), "-C", scratch], check=True)
        yield Path(scratch)


def run(folder: Path, command: str, variables: Mapping[str, str]) -> tuple[int, Report]:
    """Run a command of the restored files with this interpreter; show its output."""
    print(f"{' '.join(f'{name}={value}' for name, value in variables.items())} {command}", flush=True)
    environment = {**os.environ, **variables, "PYTHONPATH": os.pathsep.join([str(folder), str(folder / "scripts")])}
    done = subprocess.run(
        [sys.executable, *shlex.split(command)], cwd=folder, env=environment, stdout=subprocess.PIPE, text=True,
        check=False,
    )  # fmt: skip
    print(done.stdout, flush=True)
    return done.returncode, last_json(done.stdout.splitlines())


if __name__ == "__main__":
    sys.exit(main())
