"""One engine over two hosts (network namespaces): the tokens of one host, and a server that says where ranks are."""

from __future__ import annotations

import json
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.fault_jobs import interrupt
from tests.faults.hosts import HostCase, run_host_case
from tests.host_jobs import hosts_job, meeting_of
from tests.namespaces import NO_NAMESPACES, can_make_namespaces, hosts
from tests.ranks.launch import torchrun

pytestmark = pytest.mark.skipif(not can_make_namespaces(), reason=NO_NAMESPACES)

_OPTIONS = {
    "device": "cpu",
    "dtype": "float32",
    "num_gpu_blocks_override": 96,
    "max_model_len": 128,
    "max_num_batched_tokens": 48,
}
_ENDS_S = 30.0


def cases(*all_reduces: str) -> list[dict[str, Any]]:
    """The same requests with each way to add up, on the demo model, greedy and sampled."""
    prompts = [list(range(5, 30)), [65, 66, 67], [80] * 60, [90, 33], [70, 71, 72, 73]]
    params = {"temperature": 0.7, "seed": 3, "ignore_eos": True, "logprobs": 1}
    max_tokens = [20, 16, 12, 24, 8]
    return [
        {
            "options": {**_OPTIONS, "max_num_seqs": 4, "all_reduce": all_reduce, "flight_recorder_dir": ""},
            "prompts": prompts, "max_tokens": max_tokens, "params": params, "is_batch_only": True,
        }
        for all_reduce in all_reduces
    ]  # fmt: skip


def run_on_hosts(folder: Path, num_local: int, wanted: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The results of ``parity_job`` over two hosts of ``num_local`` ranks, which arrive in any order."""
    (folder / "cases.json").write_text(json.dumps(wanted))
    command = ["-m", "tests.ranks.parity_job", str(folder / "cases.json"), str(folder / "out.json")]
    with hosts() as made:

        def run(index: int) -> Any:
            meeting = meeting_of(index, made[0], is_static=False)
            return torchrun(num_local, command, meeting=meeting, wrap=made[index].command)

        with ThreadPoolExecutor(2) as pool:
            ended = list(pool.map(run, range(2)))
    for one in ended:
        assert one.returncode == 0, one.stdout[-6000:]
    return list(json.loads((folder / "out.json").read_text()))


@pytest.mark.timeout(300)
def test_tokens_equal_one_host(tmp_path: Path) -> None:
    """Oracle: TP 4 on one host with gloo, bit for bit (log-probabilities too); two-level sums repeat bit for bit."""
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "cases.json").write_text(json.dumps(cases("gloo")))
    command = ["-m", "tests.ranks.parity_job", str(tmp_path / "one/cases.json"), str(tmp_path / "one/out.json")]
    done = torchrun(4, command)
    assert done.returncode == 0, done.stdout[-6000:]
    (expected,) = json.loads((tmp_path / "one" / "out.json").read_text())
    flat, first, second = run_on_hosts(tmp_path, 2, cases("gloo", "auto", "shm"))
    assert flat == expected
    assert first == second
    assert first["tokens"] == expected["tokens"]


@pytest.mark.timeout(180)
def test_a_server_over_two_hosts(tmp_path: Path) -> None:
    """Oracle: HTTP on host 0 alone; every rank with its host in the report; one stop signal to host 0 ends both."""
    with hosts_job("serve", tmp_path) as running:
        running.parts[0].wait_ready(90.0)
        body = {"prompt": [65, 66, 67], "max_tokens": 8, "ignore_eos": True}
        assert json.loads(running.ask("/v1/completions", body))["usage"]["completion_tokens"] == 8
        time.sleep(0.6)  # the far ranks' slots arrive every quarter of a second
        ranks = json.loads(running.ask("/engine"))["ranks"]
        assert [rank["host"] for rank in ranks] == [0, 0, 1, 1]
        assert [rank["host_name"] for rank in ranks] == [host.name for host in running.hosts for _ in range(2)]
        assert all(rank["resident_bytes"] > 0 for rank in ranks)
        silence = r"tp_engine:rank_heartbeat_age_seconds\{[^}]*rank=\"(\d)\"[^}]*\} (\S+)"
        assert {rank: float(age) < 5.0 for rank, age in re.findall(silence, running.ask("/metrics"))} == {
            str(rank): True for rank in range(4)
        }
        assert "serving " not in running.parts[1].text()
        interrupt(running.parts[0].process, signal.SIGTERM)
        deadline_s = time.monotonic() + _ENDS_S
        running.parts[0].wait_end(deadline_s)
        assert running.parts[1].wait_end(deadline_s) == 0, running.tail()


@pytest.mark.timeout(120)
def test_a_host_with_another_configuration_is_refused(tmp_path: Path) -> None:
    """Oracle: both hosts end, not with 0, and both name the field, both values and the host."""
    with hosts_job("script", tmp_path, far_options={"block_size": 32}) as running:
        deadline_s = time.monotonic() + 90.0
        assert [part.wait_end(deadline_s) != 0 for part in running.parts] == [True, True]
        for part in running.parts:
            assert "block_size is 16 on host 0 and 32 on host 1" in part.text(), part.tail()
            assert running.hosts[1].name in part.text()


@pytest.mark.timeout(240)
@pytest.mark.parametrize("case", [HostCase("serve", "kill", "rank 2"), HostCase("script", "down", "link 1")], ids=str)
def test_a_fault_ends_both_hosts(case: HostCase, tmp_path: Path) -> None:
    """Oracle: the promises of ``tests/faults/hosts.py``; ``scripts/test_faults --hosts`` runs the whole matrix."""
    outcome = run_host_case(case, tmp_path)
    assert not outcome.problems, "\n".join([*outcome.problems, outcome.output])
