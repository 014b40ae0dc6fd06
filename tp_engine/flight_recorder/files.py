"""Writing a record to its file: never raises, never blocks its caller for long."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from pathlib import Path

import msgspec

from tp_engine.flight_recorder.record import FlightRecord
from tp_engine.log import get_logger

logger = get_logger(__name__)

_PATIENCE_S = 2.0


def save_record(record: FlightRecord, folder: str | None) -> Path | None:
    """Write ``record`` into ``folder`` (None: the system's temporary folder; empty: nowhere) and return its path.

    None if it could not be written, which is logged and nothing more: the job ends because of something else.  A folder
    that does not answer, such as one on a dead network disk, costs two seconds and is then left to a daemon thread.
    """
    if folder == "":
        return None
    written: list[Path] = []

    def write() -> None:
        try:
            written.append(_write(record, Path(folder or tempfile.gettempdir())))
        except Exception as error:
            logger.warning("the flight record could not be written: %s", error)

    writer = threading.Thread(target=write, name="flight-record", daemon=True)
    try:
        writer.start()
    except RuntimeError as error:  # the interpreter is ending, or the machine has no thread left
        logger.warning("the flight record could not be written: %s", error)
        return None
    writer.join(_PATIENCE_S)
    if writer.is_alive():
        logger.warning("the flight record is not written after %g s; the job ends without it", _PATIENCE_S)
    return written[0] if written else None


def _write(record: FlightRecord, folder: Path) -> Path:
    """The file appears under its name when it is complete, readable by this user only."""
    folder.mkdir(parents=True, exist_ok=True)
    name = f"tp_engine-flight-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{os.getpid()}"
    descriptor, partial = tempfile.mkstemp(prefix=name + "-", suffix=".partial", dir=folder)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(msgspec.json.encode(record))
        path = _unused(folder, name)
        os.replace(partial, path)
    except BaseException:
        os.unlink(partial)
        raise
    return path


def _unused(folder: Path, name: str) -> Path:
    """``name.json``, numbered where one process writes several within a second."""
    path, number = folder / f"{name}.json", 1
    while path.exists():
        number += 1
        path = folder / f"{name}-{number}.json"
    return path
