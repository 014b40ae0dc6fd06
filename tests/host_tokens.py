"""The tokens of one engine over two hosts, compared with those of as many ranks on one host."""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.host_jobs import meeting_of
from tests.namespaces import hosts
from tests.ranks import parity_job
from tests.ranks.launch import torchrun
from tests.ranks.warm_ranks import warm_ranks

_OPTIONS = {
    "device": "cpu",
    "dtype": "float32",
    "num_gpu_blocks_override": 96,
    "max_model_len": 128,
    "max_num_batched_tokens": 48,
    "max_num_seqs": 4,
    "flight_recorder_dir": "",
}


def differences(folder: Path, num_local: int) -> list[str]:
    """What is wrong with the answers of two hosts of ``num_local`` ranks each; empty if nothing is.

    With gloo they are those of one host bit for bit, log-probabilities too.  Sums in two levels repeat bit for bit, and
    give the same tokens.
    """
    one, two = folder / "one", folder / "two"
    (expected,) = _on_one_host(one, 2 * num_local, _cases("gloo"))
    flat, first, second = _on_two_hosts(two, num_local, _cases("gloo", "auto", "shm"))
    found = []
    if flat != expected:
        found.append(f"gloo gives {flat}, on one host {expected}")
    if first != second:
        found.append(f"sums in two levels give {first}, then {second}")
    if first["tokens"] != expected["tokens"]:
        found.append(f"sums in two levels give {first['tokens']}, on one host {expected['tokens']}")
    return found


def _cases(*all_reduces: str) -> list[dict[str, Any]]:
    """The same requests with each kind of all-reduce, on the demo model, sampled with a seed."""
    prompts = [list(range(5, 30)), [65, 66, 67], [80] * 60, [90, 33], [70, 71, 72, 73]]
    params = {"temperature": 0.7, "seed": 3, "ignore_eos": True, "logprobs": 1}
    return [
        {
            "options": {**_OPTIONS, "all_reduce_backend": all_reduce},
            "prompts": prompts, "max_tokens": [20, 16, 12, 24, 8], "params": params, "is_batch_only": True,
        }
        for all_reduce in all_reduces
    ]  # fmt: skip


def _on_one_host(folder: Path, num_ranks: int, cases: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    source, out = _files(folder, cases)
    warm_ranks(num_ranks, parity_job.main, source, out)
    return _read(out)


def _on_two_hosts(folder: Path, num_local: int, cases: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    source, out = _files(folder, cases)
    with hosts() as made:

        def run(index: int) -> Any:
            command = ["-m", "tests.ranks.parity_job", str(source), str(out)]
            meeting = meeting_of(index, made[0], is_static=False)  # hosts are numbered as they arrive
            return torchrun(num_local, command, meeting=meeting, wrap=made[index].command)

        with ThreadPoolExecutor(2) as pool:
            ended = list(pool.map(run, range(2)))
    for one in ended:
        assert one.returncode == 0, one.stdout[-6000:]
    return _read(out)


def _files(folder: Path, cases: Sequence[dict[str, Any]]) -> tuple[Path, Path]:
    folder.mkdir()
    (folder / "cases.json").write_text(json.dumps(cases))
    return folder / "cases.json", folder / "out.json"


def _read(path: Path) -> list[dict[str, Any]]:
    return list(json.loads(path.read_text()))
