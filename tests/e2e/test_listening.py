"""Which sockets a job opens: no stranger on the network reaches one that the user has not asked for."""

from __future__ import annotations

import ipaddress
import os
import shutil
import socket
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from tests.e2e.serving import Server, serving

pytestmark = pytest.mark.slow

SMALL = ("--device", "cpu", "--num-gpu-blocks-override", "64", "--max-model-len", "128")


def listening(root: psutil.Process) -> dict[int, set[str]]:
    """The addresses on which ``root`` and its descendants listen for TCP, by process."""
    found: dict[int, set[str]] = {}
    for process in (root, *root.children(recursive=True)):
        for one in process.net_connections("tcp"):
            if one.status == psutil.CONN_LISTEN:
                found.setdefault(process.pid, set()).add(one.laddr.ip)
    return found


def beyond_this_host(server: Server) -> dict[str, set[str]]:
    """Addresses of the job that other hosts can reach, by the names of the processes' modules."""
    root = psutil.Process(server.process.pid)
    found = listening(root)
    assert len(found) >= 3, f"rank 0, another rank and the HTTP process listen: {found}"
    outside = {}
    for pid, addresses in found.items():
        if reached := {one for one in addresses if not ipaddress.ip_address(one).is_loopback}:
            outside["the launcher" if pid == root.pid else " ".join(psutil.Process(pid).cmdline())] = reached
    return outside


def named_by_the_network(folder: Path) -> Sequence[str]:
    """A command's prefix: this machine's own name leads to an address that other hosts reach, as in containers."""
    addresses = [one.address for of in psutil.net_if_addrs().values() for one in of if one.family == socket.AF_INET]
    outer = next((one for one in addresses if not ipaddress.ip_address(one).is_loopback), None)
    if outer is None or os.geteuid() != 0 or shutil.which("unshare") is None:
        return ()
    names = folder / "hosts"
    names.write_text(f"127.0.0.1 localhost\n{outer} reachable\n")
    setup = f'hostname reachable && mount --bind {names} /etc/hosts && exec "$@"'
    return ("unshare", "--uts", "--mount", "sh", "-c", setup, "sh")


@pytest.mark.parametrize("num_ranks", [0, 2], ids=["own_ranks", "torchrun"])
def test_a_job_on_one_host_listens_on_the_loopback_interface(num_ranks: int, tmp_path: Path) -> None:
    """Oracle: the kernel's table of sockets: HTTP, the ranks' store and gloo; torchrun's own store alone is outside."""
    more = () if num_ranks else ("--tensor-parallel-size", "2")
    with serving(num_ranks, *SMALL, *more, prefix=named_by_the_network(tmp_path)) as server:
        outside = beyond_this_host(server)
        assert set(outside) <= ({"the launcher"} if num_ranks else set()), outside
