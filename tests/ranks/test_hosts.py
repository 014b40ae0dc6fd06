"""One engine over two hosts (network namespaces): the tokens of one host, and a server that says where ranks are.

Where this machine lets a test make no namespaces, the hosts are two agents of torchrun on the loopback interface.
"""

from __future__ import annotations

import json
import re
import signal
import time
from pathlib import Path

import pytest

from tests.fault_jobs import interrupt
from tests.faults.hosts import HostCase, run_host_case
from tests.host_jobs import hosts_job
from tests.host_tokens import differences
from tests.namespaces import NO_NAMESPACES, can_make_namespaces, on_loopback
from tp_engine.config import DEMO_MODEL

pytestmark = pytest.mark.slow

_ENDS_S = 100.0
_FAR = ("host_name", "resident_bytes")  # of another host's rank, they arrive with its slot


def test_tokens_equal_one_host(tmp_path: Path) -> None:
    """Oracle: TP 4 on one host with gloo, bit for bit (log-probabilities too); two-level sums repeat bit for bit."""
    assert differences(tmp_path, num_local=2) == []


def test_a_server_over_two_hosts(tmp_path: Path) -> None:
    """Oracle: HTTP on host 0 alone; every rank with its host in the report; one stop signal to host 0 ends both.  An
    update with the same weights, an order to the ranks of both, changes no answer."""
    with hosts_job("serve", tmp_path, num_local=1) as running:
        running.parts[0].wait_ready()
        body = {"prompt": [65, 66, 67], "max_tokens": 8, "ignore_eos": True}
        answer = json.loads(running.ask("/v1/completions", body))
        assert answer["usage"]["completion_tokens"] == 8
        done = json.loads(running.ask("/update_weights_from_disk", {"model_path": str(DEMO_MODEL)}))
        assert done["weight_version"] == "1"
        again = json.loads(running.ask("/v1/completions", body))
        assert again["choices"] == answer["choices"] and again["weight_version"] == "1"
        deadline_s = time.monotonic() + _ENDS_S
        while not all((ranks := json.loads(running.ask("/engine"))["ranks"])[-1][key] for key in _FAR):
            assert time.monotonic() < deadline_s, ranks
            time.sleep(0.1)
        assert [rank["host"] for rank in ranks] == [0, 1]
        assert [rank["host_name"] for rank in ranks] == [host.name for host in running.hosts]
        assert all(rank["resident_bytes"] > 0 for rank in ranks)
        silence = r"tp_engine:rank_heartbeat_age_seconds\{[^}]*rank=\"(\d)\"[^}]*\} (\S+)"
        assert {rank: float(age) < 5.0 for rank, age in re.findall(silence, running.ask("/metrics"))} == {
            str(rank): True for rank in range(2)
        }
        assert "serving " not in running.parts[1].text()
        assert "memory of rank 1 (host 1): " in running.parts[1].text()
        interrupt(running.parts[0].process, signal.SIGTERM)
        deadline_s = time.monotonic() + _ENDS_S
        running.parts[0].wait_end(deadline_s)
        assert running.parts[1].wait_end(deadline_s) == 0, running.tail()


def test_a_host_with_another_configuration_is_refused(tmp_path: Path) -> None:
    """Oracle: both hosts end, not with 0, and both name the field, both values and the host."""
    with hosts_job(
        "script", tmp_path, given_hosts=on_loopback(), num_local=1, far_options={"block_size": 32}
    ) as running:
        deadline_s = time.monotonic() + 90.0
        assert [part.wait_end(deadline_s) != 0 for part in running.parts] == [True, True]
        for part in running.parts:
            assert "block_size is 16 on host 0 and 32 on host 1" in part.text(), part.tail()
            assert running.hosts[1].name in part.text()


@pytest.mark.parametrize(
    "case",
    [HostCase("serve", "kill", "rank 1", num_local=1), HostCase("script", "down", "link 1", num_local=1)],
    ids=str,
)
def test_a_fault_ends_both_hosts(case: HostCase, tmp_path: Path) -> None:
    """Oracle: the promises of ``tests/faults/hosts.py``; ``scripts/test_faults --hosts`` runs the whole matrix."""
    if case.what == "down" and not can_make_namespaces():
        pytest.skip(NO_NAMESPACES)
    outcome = run_host_case(case, tmp_path)
    assert not outcome.problems, "\n".join([*outcome.problems, outcome.output])
