"""A store whose waits end when the job has failed: a rank that waits for a dead one must not wait for the deadline."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch.distributed as dist

_POLL_S = 0.005


class WatchedStore(dist.Store):
    """``store``, with every wait a loop that calls ``check``, which raises when there is nothing left to wait for.

    Process groups that are made with it use it for their whole meeting (a store in Python, called from C++).
    """

    def __init__(self, store: dist.Store, check: Callable[[], None], *, timeout_s: float) -> None:
        super().__init__()
        self._store = store
        self._check = check
        self._timeout_s = timeout_s

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Until all ``keys`` are there; ``TimeoutError`` after ``timeout``, or what ``check`` raises."""
        timeout_s = self._timeout_s if timeout is None else timeout.total_seconds()
        deadline_s = time.monotonic() + timeout_s
        while not self._store.check(list(keys)):
            self._check()
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"waited {timeout_s:g} s for {', '.join(keys)}")
            time.sleep(_POLL_S)

    def get(self, key: str) -> bytes:
        """The value of ``key``, once it is there."""
        self.wait([key])
        return self._store.get(key)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """The values of ``keys``, once all are there."""
        self.wait(keys)
        return self._store.multi_get(list(keys))

    def set(self, key: str, value: str | bytes) -> None:
        self._store.set(key, value)  # type: ignore[arg-type]  # the stub knows str alone

    def multi_set(self, keys: Sequence[str], values: Sequence[str]) -> None:
        self._store.multi_set(list(keys), list(values))  # type: ignore[attr-defined]  # missing in the stub

    def add(self, key: str, amount: int) -> int:
        return self._store.add(key, amount)

    def append(self, key: str, value: str) -> None:
        self._store.append(key, value)  # type: ignore[attr-defined]  # missing in the stub

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        return self._store.compare_set(key, expected, desired)

    def check(self, keys: Sequence[str]) -> bool:
        return self._store.check(list(keys))

    def delete_key(self, key: str) -> bool:
        return self._store.delete_key(key)

    def num_keys(self) -> int:
        return self._store.num_keys()

    def has_extended_api(self) -> bool:
        return self._store.has_extended_api()  # type: ignore[attr-defined,no-any-return]  # missing in the stub

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout_s = timeout.total_seconds()
