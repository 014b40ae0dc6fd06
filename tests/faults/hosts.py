"""Faults over two hosts (``tests/namespaces.py``): ranks and agents die or stop, the network fails or is slow.

::

    what            where                       promise
    kill            a rank                      noticed on both hosts within 1 s; both end, not with 0
    stop            a rank                      both end after watchdog_timeout_s
    kill            an agent                    its ranks end after their last words, the other host's then
    stop            an agent                    the job goes on
    down            one end of the cable        noticed on both hosts within 5 s; both end, not with 0
    slow            20 ms each way, 1 % lost    the job goes on
    none            4 ranks on each host        the tokens of 8 ranks on one host (``tests/host_tokens.py``)
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.fault_jobs import DETECTION_S, HARD_LIMIT_S, Job, interrupt
from tests.faults.client import Asking
from tests.faults.gate import Gate
from tests.host_jobs import HostsJob, hosts_job
from tests.host_tokens import differences
from tests.patience import on_this_machine

KILL_NOTICED_S, DOWN_NOTICED_S = 1.0, 5.0
_LAST_WORDS_S = 4.0
_INTERRUPTED_S = 20.0
_READY_S = 150.0
_GOES_ON_S = 3.0
_SLOW = (0.02, 0.01)


@dataclass(frozen=True, slots=True)
class HostCase:
    """``target``: ``rank N``, ``agent N`` (of host N) or ``link N`` (host N's end of the cable)."""

    kind: str
    what: str
    target: str
    moment: str = "running"
    num_local: int = 2

    def __str__(self) -> str:
        return f"{self.kind}-2x{self.num_local}-{self.what}-{self.target.replace(' ', '')}-{self.moment}"

    @property
    def number(self) -> int:
        """Of the rank or of the host."""
        return int(self.target.split()[1])

    @property
    def host(self) -> int:
        """The host that is struck."""
        return self.number // self.num_local if self.target.startswith("rank") else self.number

    @property
    def goes_on(self) -> bool:
        """Whether the job must survive."""
        return self.what == "slow" or (self.what == "stop" and self.target.startswith("agent"))

    @property
    def limit_s(self) -> float:
        """Time that may pass before the fault is noticed on both hosts."""
        if self.what == "down":
            return DOWN_NOTICED_S
        if self.what == "stop":
            return HARD_LIMIT_S + DETECTION_S / 2
        return KILL_NOTICED_S + (_LAST_WORDS_S if self.target.startswith("agent") else 0.0)


@dataclass(frozen=True, slots=True)
class HostOutcome:
    """``seconds`` from the fault to the end of the last process, ``noticed_s`` to the later host's first report."""

    case: HostCase
    seconds: float
    code: tuple[int | None, ...]
    problems: tuple[str, ...]
    output: str = ""
    noticed_s: float | None = None


def host_matrix() -> Iterator[HostCase]:
    """20 faults: every rank and agent, both ends of the cable, while serving; some in batch jobs, scripts and starts;
    and one job without a fault."""
    yield HostCase("tokens", "none", "rank 0", num_local=4)
    for rank in range(4):
        yield HostCase("serve", "kill", f"rank {rank}")
        yield HostCase("serve", "stop", f"rank {rank}")
    for host in range(2):
        yield HostCase("serve", "kill", f"agent {host}")
        yield HostCase("serve", "stop", f"agent {host}")
        yield HostCase("serve", "down", f"link {host}")
    yield HostCase("serve", "slow", "link 0")
    yield HostCase("script", "slow", "link 0")
    yield HostCase("batch", "kill", "rank 2")
    yield HostCase("script", "down", "link 1", num_local=1)
    yield HostCase("batch", "down", "link 1", "loading")
    yield HostCase("script", "kill", "rank 5", num_local=4)


def run_host_case(case: HostCase, folder: Path, gate: Gate | None = None) -> HostOutcome:
    """Run the job and compare with the promises.  A broken promise goes into ``problems`` and raises nothing."""
    if case.what == "none":
        return _compare_tokens(case, folder, gate or Gate())
    delay_s, loss = _SLOW if case.what == "slow" else (0.0, 0.0)
    rounds = {"serve": 1, "batch": 400, "script": 100_000}[case.kind]
    # A lost host is told from a stopped rank if its limit passes first, as it does with the defaults.
    limits = {"watchdog_warn_s": 10.0, "watchdog_timeout_s": 20.0}
    options = limits if case.what in ("down", "slow") else {}
    with (
        gate or Gate(),
        hosts_job(
            case.kind, folder, num_local=case.num_local, rounds=rounds, options=options, delay_s=delay_s, loss=loss
        ) as running,
    ):
        problems: list[str] = []
        codes: tuple[int | None, ...] = (None, None)
        struck_s, noticed_s = time.monotonic(), None
        try:
            asking = _await_moment(case, running)
            struck_s = time.monotonic()
            _strike(case, running)
            if case.goes_on:
                codes = _see_it_go_on(case, running)
            else:
                slack_s = max(part.slack_s() for part in running.parts)
                deadline_s = struck_s + case.limit_s + DETECTION_S + slack_s
                if case.moment == "loading":  # gloo's connecting cannot be broken off; the agent's signal ends rank 0
                    deadline_s += _INTERRUPTED_S
                codes = tuple(part.wait_end(deadline_s) for part in running.parts)
                # The ranks of a dead agent end without a word, after their last ones.
                heard = [part for host, part in enumerate(running.parts) if case.target != f"agent {host}"]
                noticed_s = max(_noticed_s(part, struck_s) for part in heard)
                problems += _judge(case, running, codes, noticed_s)
                if asking is not None and case.target != "rank 0" and case.what != "stop":
                    problems += asking.problems() if case.target != "agent 0" else []
        except AssertionError as error:
            problems.append(str(error).partition("\n")[0])
        seconds = time.monotonic() - struck_s
        return HostOutcome(case, seconds, codes, tuple(problems), running.tail() if problems else "", noticed_s)


def _compare_tokens(case: HostCase, folder: Path, gate: Gate) -> HostOutcome:
    with gate:
        began_s = time.monotonic()
        problems = tuple(differences(folder, case.num_local))
        return HostOutcome(case, time.monotonic() - began_s, (0, 0), problems)


def _await_moment(case: HostCase, running: HostsJob) -> Asking | None:
    head = running.parts[0]
    if case.moment == "loading":
        running.parts[1].wait_for("connected to rank 0", _READY_S)
        return None
    if case.kind == "batch":
        head.wait_for("allocating the KV cache took", _READY_S)
        time.sleep(2.0)
        return None
    head.wait_ready(_READY_S)
    if case.kind == "script":
        head.wait_for("tokens", _READY_S)
        return None
    return Asking(running.url(), running.hosts[0].enter) if not case.goes_on else None


def _strike(case: HostCase, running: HostsJob) -> None:
    if case.what == "slow":
        return
    if case.what == "down":
        running.hosts[case.number].set_link("down")
        return
    part = running.parts[case.host]
    target = part.process if case.target.startswith("agent") else part.rank(case.number)
    assert target is not None, f"{case.target} is not there"
    interrupt(target, signal.SIGKILL if case.what == "kill" else signal.SIGSTOP)


def _see_it_go_on(case: HostCase, running: HostsJob) -> tuple[int | None, ...]:
    """Requests are answered after the fault, no rank reports a failure, and the job ends when it is told to."""
    time.sleep(_GOES_ON_S)
    if case.kind == "serve":
        for _ in range(3):
            assert '"completion_tokens":8' in running.ask("/v1/completions", {
                "prompt": [65, 66, 67], "max_tokens": 8, "ignore_eos": True,
            }).replace(" ", "")  # fmt: skip
    assert all(part.process.poll() is None for part in running.parts), "the job ended, and should have gone on"
    assert "is over" not in running.text(), "a connection between the hosts was lost"
    if case.what == "stop":
        interrupt(running.parts[case.host].process, signal.SIGCONT)
    interrupt(running.parts[0].process, signal.SIGTERM)
    deadline_s = time.monotonic() + 2 * DETECTION_S + 15.0
    return tuple(part.wait_end(deadline_s) for part in running.parts)


def _noticed_s(part: Job, struck_s: float) -> float:
    """Seconds until this host's first line about a rank or a connection after the fault."""
    found = [
        seen_s - struck_s
        for seen_s, line in part.lines
        if seen_s >= struck_s and ("rank " in line or "connection to host" in line)
    ]
    return min(found, default=float("inf"))


def _judge(case: HostCase, running: HostsJob, codes: tuple[int | None, ...], noticed_s: float) -> list[str]:
    problems = [f"host {host} ended with 0" for host, code in enumerate(codes) if code == 0]
    limit_s = case.limit_s + (0.5 if case.what == "kill" else 0.0)  # starting the signal and writing the line
    limit_s = on_this_machine(limit_s)
    if noticed_s > limit_s:
        problems.append(f"noticed after {noticed_s:.1f} s, not within {limit_s:g} s")
    words = {"down": ["does not answer"], "kill": [], "stop": []}[case.what]
    if case.target.startswith("rank"):
        words = [f"rank {case.number}", f"host {case.host}"]
    for word in words:
        for host, part in enumerate(running.parts):
            if case.kind == "script" and host == case.host:
                continue  # torchrun's agent there ends the other ranks at once, and its summary names the rank
            if word not in part.text():
                problems.append(f"host {host} does not say {word!r}")
    return problems
