"""Functions that tests call in a process that may die."""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
from pathlib import Path

from tp_engine.errors import RequestError

prepared = ""


def prepare(text: str) -> None:
    global prepared
    prepared = text


def told(data: bytes) -> bytes:
    """What the process itself was told before it forked."""
    return prepared.encode() + data


def echo(data: bytes) -> bytes:
    return data


def zeros(data: bytes) -> bytearray:
    return bytearray(int(data))


def busy(data: bytes) -> bytes:
    while True:
        pass


def idle(data: bytes) -> bytes:
    """Tell that it runs, by a file that the data names, and never end."""
    if data:
        Path(os.fsdecode(data)).write_text(str(os.getpid()))
    while True:
        time.sleep(60.0)


def refuse(data: bytes) -> bytes:
    raise RequestError("no: " + data.decode() * 3, param="field", code="bad_field")


def fail(data: bytes) -> bytes:
    raise KeyError("x" * 100_000)


def exhaust(data: bytes) -> bytes:
    return b"".join([bytes(1 << 20) for _ in range(1 << 20)])


def crash(data: bytes) -> bytes:
    ctypes.string_at(0)
    return b""


def abort(data: bytes) -> bytes:
    os.abort()


def write_into(data: bytes, descriptor: int) -> bytes:
    return b"%d" % (os.pwrite(descriptor, data, 0) + os.pwrite(descriptor, data, len(data)))


def descriptors(data: bytes) -> bytes:
    """What the process has open."""
    links = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the list itself
            links.append(os.readlink(f"/proc/self/fd/{name}"))
    return "\n".join(links).encode()
