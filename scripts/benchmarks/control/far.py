"""The control plane with readers on another host, which is a network namespace of this machine.

::

    this process                     namespace
      PlanPublisher   == TCP ==>       reader 0: RelayReader -> RingWriter   == ring ==>   readers 1 to N - 1

CLOCK_MONOTONIC is that of the machine, so times of both sides can be compared.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import socket
import tempfile
import time
from functools import partial
from pathlib import Path

from benchmarks.control.plans import PlanContender
from benchmarks.control.readers import TIMEOUT_S, Readers, Receive
from tp_engine.ipc.handshake import watch_peer
from tp_engine.ipc.plan_channel import PlanPublisher, PlanSubscriber
from tp_engine.ipc.relay import PlanLink, RelayReader
from tp_engine.ipc.ring_buffer import RingReader, RingWriter

_CLONE_NEWNET = 0x40000000
_POLL_S = 0.01


def open_far(
    namespace: str, address: tuple[str, int], ring_file: str, num_readers: int, first_step_id: int, index: int
) -> Receive:
    """Open the channel in a reader's process: reader 0 takes plans from the network, the others from its ring."""
    if index:
        source: RelayReader | RingReader = RingReader(_await_text(Path(ring_file)), index - 1, spin_s=0.0)
    else:
        _enter(namespace)
        connection = socket.create_connection(address, TIMEOUT_S)
        watch_peer(connection, TIMEOUT_S)
        source = RelayReader(connection, _open_ring(num_readers - 1, Path(ring_file)), alive=_alive, ring_timeout_s=1.0)
    subscriber = PlanSubscriber(source, first_step_id=first_step_id)
    return partial(subscriber.receive, TIMEOUT_S)


class FarContender(PlanContender):
    """``PlanContender`` whose readers are in the network namespace ``namespace`` and connect to ``address``."""

    name = "tp_engine, far"

    def __init__(self, num_readers: int, num_rows: int, num_steps: int, *, namespace: str, address: str) -> None:
        self._namespace, self._address = namespace, address
        self._folder = tempfile.TemporaryDirectory(prefix="tp_engine-far-")
        super().__init__(num_readers, num_rows, num_steps, spin_s=0.0)

    def _start(self, num_readers: int, spin_s: float | None) -> tuple[PlanPublisher, Readers]:
        with socket.create_server((self._address, 0)) as server:
            server.settimeout(TIMEOUT_S)
            ring_file = str(Path(self._folder.name) / "ring")
            arguments = (
                self._namespace, server.getsockname(), ring_file, num_readers, self._scheduler.next_step_id,
            )  # fmt: skip
            readers = Readers(multiprocessing.get_context("spawn"), num_readers, open_far, arguments)
            connection, _ = server.accept()
        watch_peer(connection, TIMEOUT_S)
        return PlanPublisher(0, links=[PlanLink(connection, 1, alive=lambda rank: True)]), readers

    def close(self) -> None:
        super().close()
        self._folder.cleanup()


def _open_ring(num_readers: int, ring_file: Path) -> RingWriter | None:
    if num_readers == 0:
        return None
    ring = RingWriter(num_readers, first_rank=2, spin_s=0.0)
    part = ring_file.with_suffix(".part")
    part.write_text(ring.name, encoding="ascii")
    part.rename(ring_file)
    ring.wait_attached(TIMEOUT_S)
    return ring


def _await_text(path: Path) -> str:
    deadline_s = time.monotonic() + TIMEOUT_S
    while not path.exists():
        assert time.monotonic() < deadline_s, "the first reader of the far host did not start"
        time.sleep(_POLL_S)
    return path.read_text(encoding="ascii")


def _alive() -> bool:
    return True


def _enter(namespace: str) -> None:
    """Let this process's next sockets belong to a namespace that ``ip netns add`` has made."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{namespace}", "rb") as file:
        if libc.setns(file.fileno(), _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"can not enter the network namespace {namespace}; run as root")
