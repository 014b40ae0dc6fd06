"""From the job's board to a flight record: what whoever ends a job abnormally leaves for people to read."""

from __future__ import annotations

import dataclasses
import datetime
import importlib.metadata
import platform
import threading
import time
from pathlib import Path

import tp_engine
from tp_engine.config import EngineConfig
from tp_engine.engine.incident import describe_exit
from tp_engine.flight_recorder.files import save_record
from tp_engine.flight_recorder.record import FORMAT, FlightRecord, RankRecord, StepRecord
from tp_engine.ipc.job_board import NUM_RECORDS, RECORD_FIELDS, JobBoard, RankSlot, split_echo
from tp_engine.log import get_logger

logger = get_logger(__name__)


class FlightRecorder:
    """Writes at most one record of one engine, from any thread of one process; ``writer`` is who that is."""

    def __init__(self, board: JobBoard, config: EngineConfig, *, writer: str) -> None:
        self._board = board
        self._config = config
        self._writer = writer
        self._lock = threading.Lock()
        self._written = False
        self._path: Path | None = None

    def write(self, cause: str, culprit: int | None = None) -> Path | None:
        """Save the board as it is, and log where; later calls only return the path of the first.

        Never raises, and takes seconds at most.  None if no record is wanted or it could not be written.
        """
        with self._lock:
            if self._written:
                return self._path
            self._written = True
            try:
                record = read_board(self._board, self._config, cause=cause, culprit=culprit, writer=self._writer)
                self._path = save_record(record, self._config.flight_recorder_dir)
            except Exception as error:
                logger.warning("the flight record could not be made: %s: %s", type(error).__name__, error)
            if self._path is not None:
                logger.error("flight record: python -m tp_engine.flight_recorder %s", self._path)
            return self._path


def read_board(board: JobBoard, config: EngineConfig, *, cause: str, culprit: int | None, writer: str) -> FlightRecord:
    """Everything that the board says now."""
    now = datetime.datetime.now(datetime.UTC)
    return FlightRecord(
        format=FORMAT,
        written_at=now.isoformat(timespec="milliseconds"),
        written_ns=time.monotonic_ns(),
        written_by=writer,
        created_ns=board.created_ns,
        cause=cause,
        culprit=culprit,
        world_size=board.world_size,
        versions={
            "tp_engine": tp_engine.__version__,
            "torch": importlib.metadata.version("torch"),
            "numpy": importlib.metadata.version("numpy"),
            "python": platform.python_version(),
            "system": platform.platform(),
        },
        config=dataclasses.asdict(config),
        ranks=[_rank(slot, board.inputs[slot.rank].tolist()) for slot in board.slots],
    )


def _rank(slot: RankSlot, input_echoes: list[int]) -> RankRecord:
    code = slot.exit_code
    return RankRecord(
        rank=slot.rank,
        pid=slot.pid,
        process=process_state(slot.pid, slot.started_ticks),
        exit=None if code is None else describe_exit(code),
        state=slot.state.name.lower(),
        phase=slot.phase.label,
        count=slot.count,
        step_received=slot.step_received,
        step_started=slot.step_started,
        step_done=slot.step_done,
        busy_since_ns=slot.busy_since_ns,
        heartbeat_ns=slot.heartbeat_ns,
        cpu_ns=slot.cpu_ns,
        failed_ns=slot.failed_ns,
        blamed_rank=slot.blamed_rank,
        failure=slot.failure_text,
        steps=_steps(slot, dict(split_echo(echo) for echo in input_echoes)),
    )


def _steps(slot: RankSlot, digests: dict[int, int]) -> list[StepRecord]:
    """The records in the order of their steps; rows that an earlier step has left are no longer its neighbours'."""
    rows = [dict(zip(RECORD_FIELDS, row, strict=True)) for row in slot.records.copy().tolist()]
    last = max(row["step_id"] for row in rows)
    rows = sorted((row for row in rows if row["step_id"] > max(0, last - NUM_RECORDS)), key=lambda row: row["step_id"])
    return [
        StepRecord(
            **row | {"plan_checksum": row["plan_checksum"] & (1 << 64) - 1},
            input_digest=digests.get(row["step_id"], 0),
        )
        for row in rows
    ]


def process_state(pid: int, started_ticks: int) -> str:
    """``alive``, ``stopped``, ``gone``, or ``none`` where no process has registered; see ``RankRecord.process``."""
    if pid == 0:
        return "none"
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return "gone"
    fields = stat.rpartition(")")[2].split()
    if fields[0] in "ZX" or int(fields[19]) != started_ticks:
        return "gone"
    return "stopped" if fields[0] in "Tt" else "alive"
