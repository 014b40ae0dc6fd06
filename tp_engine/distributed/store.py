"""How the ranks of a job find each other: stores, and the file in which torchrun collects errors.

A ``WatchedStore`` ends its waits when the job has failed, so that no rank waits until the deadline for a dead rank.
"""

import errno
import functools
import itertools
import socket
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeAlias

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from tp_engine.system import env
from tp_engine.system.interfaces import is_loopback
from tp_engine.system.log import get_logger

logger = get_logger(__name__)

Store: TypeAlias = dist.Store

_POLL_S = 0.005
_SERVE_S = 60.0
_LOOPBACK = "127.0.0.1"
_engine_count = itertools.count()


class WatchedStore(dist.Store):
    """``store``, but a wait is a loop that calls ``check``, which raises if the job has failed.

    Process groups that are created with it use it for their whole rendezvous (C++ calls this Python store).
    """

    def __init__(self, store: dist.Store, check: Callable[[], None], *, timeout_s: float) -> None:
        super().__init__()
        self._store = store
        self._check = check
        self._timeout_s = timeout_s

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all ``keys`` exist; raises ``TimeoutError`` after ``timeout``, and what ``check`` raises."""
        timeout_s = self._timeout_s if timeout is None else timeout.total_seconds()
        deadline_s = time.monotonic() + timeout_s
        while not self._store.check(list(keys)):
            self._check()
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"waited {timeout_s:g} s for {', '.join(keys)}")
            time.sleep(_POLL_S)

    def get(self, key: str) -> bytes:
        """The value of ``key``, once it exists."""
        self.wait([key])
        return self._store.get(key)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """The values of ``keys``, once all exist."""
        self.wait(keys)
        return self._store.multi_get(list(keys))

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout_s = timeout.total_seconds()


def _passed_on(name: str) -> Callable[..., Any]:
    def act(self: WatchedStore, *arguments: Any) -> Any:
        return getattr(self._store, name)(*arguments)

    return act


for _name in "set multi_set add append compare_set check delete_key num_keys has_extended_api".split():  # noqa: SIM905
    setattr(WatchedStore, _name, _passed_on(_name))  # in the class, where C++ looks them up


def host_store(*, timeout_s: float) -> dist.TCPStore:
    """Rank 0's store for the ranks that it starts, on a free port of the loopback interface."""
    return _serve(_LOOPBACK, 0, timeout_s=timeout_s)


def join_store(host: str, port: int, *, timeout_s: float) -> dist.TCPStore:
    """Another rank's connection to ``host_store``."""
    return dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_s))


def launched_store(*, timeout_s: float) -> Store:
    """The store of this process's torchrun job, with a prefix for each engine.

    The engines of one job are numbered in the order of their creation, which is the same on every rank.
    """
    return dist.PrefixStore(f"tp_engine/{next(_engine_count)}", _store_of_job(timeout_s))


def job_store(*, timeout_s: float) -> Store:
    """The store of this process's torchrun job, for what outlives an engine."""
    return dist.PrefixStore("tp_engine", _store_of_job(timeout_s))


def store_of_job() -> Store:
    """The store of the torch.distributed job that this process has joined, or would join by its variables."""
    if dist.is_initialized():
        found: Store = _get_default_store()
        return found
    return _store_of_job(_SERVE_S)


def _store_of_job(timeout_s: float) -> Store:
    launched = env.launched_rank()
    assert launched is not None
    if launched.rank == 0 and env.AGENT_STORE.read() != "True":
        _serve_launched(launched.master_addr, launched.master_port)
    store, _, _ = next(iter(dist.rendezvous("env://", timeout=timedelta(seconds=timeout_s))))
    found: Store = store
    return found


@functools.cache
def _serve_launched(host: str, port: int) -> dist.TCPStore | None:
    """The server for a job whose launcher has none, on the address of ``host`` alone; torch's rendezvous finds it.

    None, and the rendezvous listens on all interfaces, if ``host`` may be another address on other hosts: no interface
    of this machine has it, or it is a name for the loopback interface here, like a Debian machine's own host name.
    """
    try:
        address = str(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0])
        if not is_loopback(address) or host in (address, "localhost"):
            return _serve(address, port, timeout_s=_SERVE_S)
    except OSError as error:
        if not isinstance(error, socket.gaierror) and error.errno != errno.EADDRNOTAVAIL:
            raise OSError(error.errno, f"the ranks cannot meet at {host}:{port} (MASTER_PORT): {error}") from error
    logger.warning("the ranks meet at port %d of all interfaces: %s is no address of one of them", port, host)
    return None


def _serve(address: str, port: int, *, timeout_s: float) -> dist.TCPStore:
    """A store that listens on one address; torch by itself would listen on all."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, port), family=family)
    return dist.TCPStore(
        address,
        listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
        multi_tenant=True,  # a second server of this process at the port is this one
        master_listen_fd=listener.detach(),
    )


def record_error(error: BaseException) -> None:
    """Write ``error`` with its traceback to this process's torchrun error file; does nothing without torchrun.

    Torchrun's summary of a failed job shows each rank's error from that file.
    """
    get_error_handler().record_exception(error)
