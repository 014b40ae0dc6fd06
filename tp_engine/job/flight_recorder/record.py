"""The schema of a flight record, the JSON file that a job leaves when it ends abnormally.

::

    FlightRecord            the job: when, written by which rank, versions, configuration, cause
      RankRecord            one per rank: where it is, since when, whether it lives
        StepRecord          its last steps, oldest first

Every field that ends in ``_ns`` is a time of the writer's CLOCK_MONOTONIC in nanoseconds, which all processes of one
host share; times of other hosts are converted, so that the times of all ranks can be compared.  0 means "not yet" or
"not known".  ``cpu_ns`` alone is a duration.
"""

import os
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import msgspec

from tp_engine.system.files import read_bytes
from tp_engine.system.log import get_logger
from tp_engine.system.units import MIB

FORMAT = 1

logger = get_logger(__name__)

_PATIENCE_S = 2.0


class StepRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One step of one rank.

    The rank waits for the plan until ``received_ns`` (on rank 0: until it is published), begins with it at
    ``started_ns``, has launched the model and the sampler at ``launched_ns`` and is done at ``done_ns``.
    ``plan_checksum`` (64 bits) is that of the plan as received, ``input_digest`` (32 bits, only with
    ``debug_compare_rank_inputs``) that of the inputs made from it; 0 if not known.
    """

    step_id: int
    plan_bytes: int = 0
    plan_checksum: int = 0
    input_digest: int = 0
    decode_rows: int = 0
    prefill_tokens: int = 0
    received_ns: int = 0
    started_ns: int = 0
    launched_ns: int = 0
    done_ns: int = 0


class RankRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One rank as it was last seen.

    ``state`` and ``phase`` are those of the job board, in lower case; ``count`` is the number of this step's
    collectives that the rank has entered, or 1 once it has done its part of a start-up phase.  ``process`` is what the
    kernel says: ``alive``, ``stopped`` (SIGSTOP), ``gone``, or ``none`` for a rank that never came; ``lost`` for the
    first rank of a host that does not answer.  ``exit`` is how it ended, if its parent knows, such as ``signal 9``.
    ``device`` is the GPU that it computes on, or the kind of CPU and its kernels.
    ``failure`` is the traceback that a failing rank left, ``failed_rank`` another rank that caused its failure.
    ``host`` counts from 0; on hosts other than 0, only rank 0's record has all steps.
    """

    rank: int
    host: int = 0
    host_name: str = ""
    pid: int = 0
    process: str
    exit: str | None = None
    state: str
    phase: str
    count: int = 0
    step_received: int = 0
    step_started: int = 0
    step_done: int = 0
    busy_since_ns: int = 0
    heartbeat_ns: int = 0
    cpu_ns: int = 0
    failed_ns: int = 0
    failed_rank: int | None = None
    device: str = ""
    failure: str = ""
    steps: list[StepRecord] = []


class FlightRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The whole job.

    ``cause`` is the error that ended it and ``culprit`` the rank that it names, if any.  ``written_at`` is UTC in ISO
    8601, ``written_ns`` the same moment on the clock of the other times, ``created_ns`` the start of the job.
    """

    format: int
    written_at: str
    written_ns: int
    written_by: str
    created_ns: int = 0
    cause: str
    culprit: int | None = None
    world_size: int
    versions: dict[str, str] = {}
    config: dict[str, Any] = {}
    ranks: list[RankRecord]


_MOST_BYTES = 256 * MIB  # of a record of 64 ranks, many times over


class BadRecordError(ValueError):
    """A file that is not a flight record, or is one of another version."""


def load_record(path: Path) -> FlightRecord:
    """Read a record.  ``BadRecordError`` names the file, what is wrong with it and what to do."""
    try:
        data = read_bytes(path, _MOST_BYTES)
    except OSError as error:
        raise BadRecordError(f"{path} cannot be read: {error.strerror or error}") from error
    remedy = "give the file whose name the final error of a job has logged (tp_engine-flight-*.json)"
    try:
        found = msgspec.json.decode(data, type=dict[str, msgspec.Raw]).get("format")
        if found is not None and bytes(found) != str(FORMAT).encode():
            raise BadRecordError(
                f"{path} has format {bytes(found).decode()}, this version of tp_engine reads {FORMAT}; "
                "read it with the version that wrote it"
            )
        record = msgspec.json.decode(data, type=FlightRecord)
    except msgspec.DecodeError as error:
        raise BadRecordError(f"{path} is no flight record ({error}); {remedy}") from error
    if [rank.rank for rank in record.ranks] != list(range(record.world_size)):
        raise BadRecordError(
            f"{path} is damaged: it has ranks {[rank.rank for rank in record.ranks]}, its world size is "
            f"{record.world_size}; {remedy}"
        )
    return record


def save_record(record: FlightRecord, folder: str | None) -> Path | None:
    """Write ``record`` into ``folder`` (None: the system's temporary folder; empty: nowhere) and return its path.

    None if it could not be written, which is only logged, because the job ends for another reason.  A folder that does
    not answer, such as one on a dead network disk, costs two seconds; a daemon thread goes on trying.
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
    """Write the file, readable by this user only; it gets its name when it is complete."""
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
    """``name.json``, with a number if the process has written another one in the same second."""
    path, number = folder / f"{name}.json", 1
    while path.exists():
        number += 1
        path = folder / f"{name}-{number}.json"
    return path
