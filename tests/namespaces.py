"""Hosts on one machine: network namespaces with a cable between them, each with its own name.

The cable is a pair of veth devices.  A slow one (``Cable``) is a pair of TUN devices, between which a thread carries
packets late and loses some: not every kernel has netem.  Without the right to make namespaces, two hosts that share
the loopback interface (``on_loopback``) show all but a cable that fails.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import heapq
import os
import random
import select
import shutil
import socket
import struct
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.e2e.serving import free_port

_CLONE_NEWNET = 0x40000000
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
NO_NAMESPACES = "this machine does not let a test make network namespaces"


@cache
def can_make_namespaces() -> bool:
    """Whether this process has the right and the tools to make namespaces with a cable."""
    if os.geteuid() != 0 or not all(map(shutil.which, ("ip", "unshare", "hostname"))):
        return False
    try:
        with _in_namespaces(delay_s=0.0, loss=0.0):
            return True
    except (OSError, subprocess.CalledProcessError):
        return False


@dataclass(frozen=True, slots=True)
class Host:
    """One namespace, its address, its end of the cable, and the file with the names of all hosts.

    Without ``names`` it is this machine, reached by the loopback interface.  ``port`` is free there, for torchrun.
    """

    name: str
    address: str
    device: str
    names: Path | None
    port: int = 29500

    def command(self, command: Sequence[str]) -> list[str]:
        """``command``, run on this host."""
        if self.names is None:
            return list(command)
        setup = f'hostname {self.name} && mount --bind {self.names} /etc/hosts && exec "$@"'
        named = ["unshare", "--uts", "--mount", "sh", "-c", setup, "sh"]
        return ["ip", "netns", "exec", self.name, *named, *command]

    def enter(self) -> None:
        """Make this thread's next sockets belong to this host."""
        if self.names is None:
            return
        libc = ctypes.CDLL(None, use_errno=True)
        with open(f"/run/netns/{self.name}", "rb") as namespace:
            if libc.setns(namespace.fileno(), _CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), "setns")

    def set_link(self, state: str) -> None:
        """Take this host's end of the cable ``up`` or ``down``."""
        assert self.names is not None, NO_NAMESPACES
        _ip("-n", self.name, "link", "set", self.device, state)


def hosts(*, delay_s: float = 0.0, loss: float = 0.0) -> contextlib.AbstractContextManager[list[Host]]:
    """Two hosts that reach each other; with ``delay_s`` (one way) or ``loss``, through a slow cable.

    They share the loopback interface if this machine does not let a test make namespaces.
    """
    if delay_s or loss or can_make_namespaces():
        return _in_namespaces(delay_s=delay_s, loss=loss)
    return contextlib.nullcontext(on_loopback())


def on_loopback() -> list[Host]:
    """Two hosts in name only, for torchrun's agents of one machine."""
    return [Host(socket.gethostname(), "127.0.0.1", "lo", None, free_port()) for _ in range(2)]


@contextlib.contextmanager
def _in_namespaces(*, delay_s: float, loss: float) -> Iterator[list[Host]]:
    mark = f"{os.getpid() & 0xFFFF:x}{int(time.monotonic_ns()) & 0xFFFF:x}"
    with tempfile.NamedTemporaryFile("w", prefix="tp_engine-hosts-") as names:
        made = [
            Host(f"tpe{mark}{index}", f"10.213.7.{index + 1}", f"tpv{mark}{index}", Path(names.name))
            for index in range(2)
        ]
        names.write("127.0.0.1 localhost\n" + "".join(f"{host.address} {host.name}\n" for host in made))
        names.flush()
        with _cabled(made, delay_s=delay_s, loss=loss):
            yield made


@contextlib.contextmanager
def _cabled(made: Sequence[Host], *, delay_s: float, loss: float) -> Iterator[None]:
    cable = None
    try:
        for host in made:
            _ip("netns", "add", host.name)
            _ip("-n", host.name, "link", "set", "lo", "up")
        if delay_s or loss:
            cable = Cable(made, delay_s=delay_s, loss=loss)
        else:
            _ip("link", "add", made[0].device, "netns", made[0].name, "type", "veth",
                "peer", "name", made[1].device, "netns", made[1].name)  # fmt: skip
        for host, peer in zip(made, reversed(made), strict=True):
            _ip("-n", host.name, "addr", "add", f"{host.address}/32", "peer", peer.address, "dev", host.device)
            _ip("-n", host.name, "link", "set", host.device, "up")
        yield
    finally:
        if cable is not None:
            cable.close()
        for host in made:
            if Path(f"/run/netns/{host.name}").exists():
                _ip("netns", "del", host.name)


class Cable:
    """Carries packets between TUN devices of two hosts, ``delay_s`` late, and loses the share ``loss`` of them."""

    def __init__(self, ends: Sequence[Host], *, delay_s: float, loss: float) -> None:
        self._ends = [_open_tun(host) for host in ends]
        self._delay_s, self._loss = delay_s, loss
        self._rng = random.Random(30)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="cable", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Cut the cable."""
        self._over.set()
        self._thread.join()
        for end in self._ends:
            os.close(end)

    def _run(self) -> None:
        due: list[tuple[float, int, int, bytes]] = []
        count = 0
        while not self._over.is_set():
            wait_s = min(0.1, max(0.0, due[0][0] - time.monotonic())) if due else 0.1
            for end in select.select(self._ends, [], [], wait_s)[0]:
                packet = os.read(end, 65536)
                if self._rng.random() >= self._loss:
                    count += 1
                    other = self._ends[1 - self._ends.index(end)]
                    heapq.heappush(due, (time.monotonic() + self._delay_s, count, other, packet))
            while due and due[0][0] <= time.monotonic():
                _, _, other, packet = heapq.heappop(due)
                with contextlib.suppress(OSError):  # the device is down
                    os.write(other, packet)


def _open_tun(host: Host) -> int:
    """A TUN device of ``host``, opened by a thread that visits its namespace."""
    found: list[int] = []

    def visit() -> None:
        host.enter()
        end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(end, _TUNSETIFF, struct.pack("16sH22x", host.device.encode(), _IFF_TUN | _IFF_NO_PI))
        found.append(end)

    thread = threading.Thread(target=visit)
    thread.start()
    thread.join()
    if not found:
        raise OSError(f"no TUN device for {host.name}")
    return found[0]


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=20)
