"""Answers of classes in files, so that the next start asks nobody.

The folder may belong to several users, be read-only, full, or on a file system without locks: then the class is asked
without it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import importlib.metadata
import json
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from tp_engine.model_config.asked_decoder import ClassAnswer
from tp_engine.system import env
from tp_engine.system.log import get_logger

logger = get_logger(__name__)

_WAIT_S = 600.0
_POLL_S = 0.05


def kept(values: Mapping[str, Any], ask: Callable[[], ClassAnswer]) -> ClassAnswer:
    """Return the answer for a config.json of these ``values``: the one that is kept, or that of ``ask``, for which
    other processes that want the same wait."""
    file = _folder() / f"{_key(values)}.json"
    if (found := _read(file)) is not None:
        return found
    with _turn(file.with_suffix(".lock")):
        if (found := _read(file)) is not None:
            return found
        answer = ask()
        if answer.is_lasting:
            _keep(file, answer)
        return answer


def _folder() -> Path:
    return env.cache_dir() / "classes"


def _key(values: Mapping[str, Any]) -> str:
    """Of all that the answer depends on: the configuration, the programs that read it, and this package, which asks,
    verifies the answer by its layers, and makes the model of it."""
    versions = [importlib.metadata.version(name) for name in ("transformers", "torch")]
    digest = hashlib.sha256(json.dumps([values, versions], sort_keys=True, default=str).encode())
    for source in sorted(Path(__file__).parents[1].rglob("*.py")):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:32]


def _read(file: Path) -> ClassAnswer | None:
    """The answer in ``file`` if it has every field of one, and no other: an unknown one would be dropped silently."""
    try:
        data = file.read_bytes()
        found = msgspec.json.decode(data, type=ClassAnswer)
    except (OSError, msgspec.DecodeError):
        return None
    return found if msgspec.json.encode(found) == data else None


def _keep(file: Path, answer: ClassAnswer) -> None:
    """Write the file whole or not at all, readable as this process's umask says; a cache that cannot be written to is
    none."""
    part = file.with_suffix(f".{secrets.token_hex(4)}.part")
    try:
        part.write_bytes(msgspec.json.encode(answer))
        part.replace(file)
    except OSError as error:
        logger.warning("the class's answer is not kept: %s", error)
        with contextlib.suppress(OSError):
            part.unlink()


@contextmanager
def _turn(lock: Path) -> Iterator[None]:
    """Within, no other process asks the same, unless it has waited for ``_WAIT_S``, or nothing can be locked here."""
    with contextlib.ExitStack() as stack:
        try:
            lock.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(lock, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
            stack.callback(os.close, descriptor)
            _wait(descriptor)
        except OSError as error:
            logger.warning("nothing is locked in %s: %s", lock.parent, errno.errorcode.get(error.errno or 0, error))
        yield


def _wait(descriptor: int) -> None:
    deadline, has_said = time.monotonic() + _WAIT_S, False
    while time.monotonic() < deadline:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        if not has_said:
            logger.info("another process asks the same class of transformers; this one waits for its answer")
        has_said = True
        time.sleep(_POLL_S)
