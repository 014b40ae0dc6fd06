"""Jobs over two hosts (``tests/namespaces.py``), with one torchrun on each, and what users see of them."""

from __future__ import annotations

import contextlib
import json
import threading
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from tests.fault_jobs import Job, job
from tests.namespaces import Host, hosts

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class HostPlace:
    """A host, and how its torchrun meets the other one."""

    host: Host
    meeting: Sequence[str]

    def command(self, command: Sequence[str]) -> list[str]:
        """See ``fault_jobs.Place``."""
        return self.host.command(command)


@dataclass
class HostsJob:
    """One job: its hosts, and on each its part, of ``num_local`` ranks."""

    hosts: list[Host]
    parts: list[Job]
    num_local: int

    def part_of(self, rank: int) -> Job:
        """The part with ``rank``."""
        return self.parts[rank // self.num_local]

    def url(self) -> str:
        """The server's address on host 0."""
        return self.parts[0].url()

    def on_host0(self, act: Callable[[], Result]) -> Result:
        """The result of ``act``, whose sockets belong to host 0."""
        found: list[Result] = []

        def run() -> None:
            self.hosts[0].enter()
            found.append(act())

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        assert found, f"a request to {self.hosts[0].name} failed:\n{self.tail()}"
        return found[0]

    def ask(self, path: str, body: Mapping[str, object] | None = None) -> str:
        """The text of an answer of the server."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url() + path, data, {"Content-Type": "application/json"})
        with_answer = self.on_host0(lambda: urllib.request.urlopen(request, timeout=60).read())
        return str(with_answer.decode())

    def text(self) -> str:
        """The output of both parts."""
        return "".join(part.text() for part in self.parts)

    def tail(self) -> str:
        """The ends of both outputs."""
        return "\n".join(f"--- {host.name}\n{part.tail()}" for host, part in zip(self.hosts, self.parts, strict=True))


def meeting_of(index: int, head: Host, *, is_static: bool = True) -> tuple[str, ...]:
    """torchrun's options on host ``index``; without ``is_static``, hosts are numbered as they arrive."""
    where: tuple[str, ...]
    if is_static:
        where = ("--node-rank", str(index), "--master-addr", head.address, "--master-port", str(head.port))
    else:
        where = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{head.address}:{head.port}")
    return ("--nnodes", "2", *where)


@contextlib.contextmanager
def hosts_job(
    kind: str,
    folder: Path,
    *,
    num_local: int = 2,
    rounds: int = 1,
    options: Mapping[str, object] | None = None,
    fault: str = "",
    is_static: bool = True,
    far_options: Mapping[str, object] | None = None,
    given_hosts: list[Host] | None = None,
    delay_s: float = 0.0,
    loss: float = 0.0,
    environment: Mapping[str, str] | None = None,
) -> Iterator[HostsJob]:
    """A job of ``fault_jobs.job`` over two hosts; ``far_options`` are other options of the second one."""
    with contextlib.ExitStack() as stack:
        made = given_hosts or stack.enter_context(hosts(delay_s=delay_s, loss=loss))
        parts = []
        for index, host in enumerate(made):
            own = folder / f"host{index}"
            own.mkdir(parents=True)
            place = HostPlace(host, meeting_of(index, made[0], is_static=is_static))
            given = dict(options or {}) | (dict(far_options or {}) if index else {})
            part = job(
                kind, own, fault=fault, num_ranks=num_local, rounds=rounds, options=given, environment=environment,
                place=place,
            )  # fmt: skip
            parts.append(stack.enter_context(part))
        yield HostsJob(made, parts, num_local)
