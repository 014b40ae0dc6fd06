"""The schema of a flight record, the JSON file that a job leaves when it ends abnormally.

::

    FlightRecord            the job: when, by whom, versions, configuration, cause
      RankRecord            one per rank: where it is, since when, whether it lives
        StepRecord          its last steps, oldest first

Every field that ends in ``_ns`` is a time of CLOCK_MONOTONIC in nanoseconds, which all processes of one host share, so
that the times of different ranks can be compared; 0 means "not yet" or "not known".  ``cpu_ns`` alone is a duration.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

FORMAT = 1


class StepRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One step of one rank.

    The rank waits for the plan until ``received_ns`` (on rank 0: until it is published), begins with it at
    ``started_ns``, has launched the model and the sampler at ``launched_ns`` and is done at ``done_ns``.
    ``plan_checksum`` (64 bits) is that of the plan as the rank received it, ``input_digest`` (32 bits, only with
    ``check_inputs``) that of what it made of it; 0 where they are not known.
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
    collectives that the rank has entered, or 1 where it has done its part of a start-up phase.  ``process`` is what the
    kernel says: ``alive``, ``stopped`` (SIGSTOP), ``gone``, or ``none`` for a rank that never came.  ``exit`` is how it
    ended, where its parent knows it, such as ``signal 9``.  ``failure`` is the traceback that a failing rank left,
    ``blamed_rank`` another rank that caused its failure.
    """

    rank: int
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
    blamed_rank: int | None = None
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
    config: dict[str, str | int | float | bool | None] = {}
    ranks: list[RankRecord]


class BadRecordError(ValueError):
    """A file that is no flight record, or one of another version."""


def load_record(path: Path) -> FlightRecord:
    """Read a record.  ``BadRecordError`` names the file, what is wrong with it and what to do."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise BadRecordError(f"{path} can not be read: {error.strerror or error}") from error
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
