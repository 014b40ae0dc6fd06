"""Which rank ended the job and why, found on the job's board, and the flight record of the job for people to read."""

import dataclasses
import datetime
import importlib.metadata
import operator
import platform
import signal
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from tp_engine.config import EngineConfig
from tp_engine.errors import RankError
from tp_engine.ipc.job_board import JobBoard
from tp_engine.ipc.rank_slot import (
    NUM_RECORDS,
    RECORD_FIELDS,
    Ended,
    RankSlot,
    State,
    process_start,
    process_vitals,
    split_echo,
)
from tp_engine.job.flight_recorder.record import FORMAT, FlightRecord, RankRecord, StepRecord, save_record
from tp_engine.job.progress import RankPhase
from tp_engine.system.log import get_logger
from tp_engine.system.version import __version__

ExitCode: TypeAlias = Callable[[int], int | None]
"""How a rank's process ended (negative: by a signal) if this process is its parent, else None."""

_TAIL_LINES = 25
_AS_THEY_ARE = (
    "rank", "pid", "count", "step_received", "step_started", "step_done", "busy_since_ns", "heartbeat_ns", "cpu_ns",
    "failed_ns", "failed_rank", "device",
)  # fmt: skip
_GPU_ERRORS = ("CUDA error", "CUDA failure", "AcceleratorError", "DistBackendError")
_STEP_ID = operator.itemgetter("step_id")

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Incident:
    """``rank`` ended the job; ``message`` says how, ``details`` is its traceback, or empty."""

    rank: int
    message: str
    details: str = ""

    def error(self) -> RankError:
        """Return the error for the caller, with the end of ``details``."""
        lines = self.details.rstrip().splitlines()[-_TAIL_LINES:]
        return RankError(self.rank, "\n  | ".join([self.message, *lines]))


def find_incident(board: JobBoard, own_rank: int, gone: Collection[int], exit_code: ExitCode) -> Incident | None:
    """Return the cause of what the board shows now; None while no other rank has failed.  ``gone``: ranks whose process
    ended.

    ::

        a process that ended without a report (killed)        is the cause, whatever the others report
        else the first rank that failed by itself             is the cause; later failures follow from it
        else the rank that the first failure names            is the cause; it may be this rank
    """
    silent = [rank for rank in gone if board.slots[rank].state not in (State.LEFT, State.FAILED)]
    if silent:
        return _told(board, board.slots[silent[0]], silent[0] in gone, exit_code)
    failed = sorted((slot for slot in board.slots if slot.state == State.FAILED), key=lambda slot: slot.failed_ns)
    cause = next((slot for slot in failed if slot.failed_rank is None), None)
    if cause is not None:
        return None if cause.rank == own_rank else _told(board, cause, cause.rank in gone, exit_code)
    if not failed or all(slot.rank == own_rank for slot in failed):
        return None
    first = next(slot for slot in failed if slot.rank != own_rank)
    culprit = first.failed_rank
    assert culprit is not None
    place = on_host(board, board.slots[culprit])
    return Incident(culprit, f"{place}{where(board.slots[culprit])}; rank {first.rank} reports:", first.failure_text)


def where(slot: RankSlot) -> str:
    """``'in load'``, ``'in collective 3 of step 12'``, ``'waiting for step 13'``."""
    if slot.state == State.ABSENT:
        return "not there yet"
    phase, step = slot.phase, slot.step_started
    if phase >= RankPhase.STEP_BEGIN and phase != RankPhase.SHUTDOWN:
        if slot.busy_since_ns == 0:
            return f"waiting for step {slot.step_done + 1} (last phase: {phase.label})"
        which = f" {slot.count}" if phase == RankPhase.COLLECTIVE else ""
        return f"in {phase.label}{which} of step {step}"
    return f"in {phase.label}"


def describe_exit(code: int) -> str:
    """``-9`` -> ``'signal 9'``, ``1`` -> ``'exit code 1'``."""
    return f"signal {-code}" if code < 0 else f"exit code {code}"


def about_gpu(slot: RankSlot, exit_code: int | None = None) -> str:
    """``', on GPU 1 (...); ...'`` for a rank that its GPU may have stopped: CUDA's error, or an abort by CUDA's or
    NCCL's own threads, which name no GPU.  Empty for any other end."""
    is_suspect = exit_code == -signal.SIGABRT or any(word in slot.failure_text for word in _GPU_ERRORS)
    if not slot.device.startswith("GPU") or not is_suspect:
        return ""
    return f", on {slot.device}; if the driver lost this GPU, the kernel's log says so: dmesg | grep -i xid"


def on_host(board: JobBoard, slot: RankSlot) -> str:
    """``'on host 1 (beta), '``; empty if all ranks are on one host."""
    if board.topology.num_hosts == 1:
        return ""
    return f"on host {board.topology.host_of(slot.rank)} ({slot.host.name or 'name unknown'}), "


def _told(board: JobBoard, slot: RankSlot, is_gone: bool, exit_code: ExitCode) -> Incident:
    code, process = exit_code(slot.rank), f"process {slot.pid}" if slot.pid else "its process"
    if slot.host.ended == Ended.LOST:
        how = "the host, or the network to it, does not answer any more"
    elif slot.state == State.ABSENT and slot.pid == 0 and code is None:
        how = "its process ended before it came to this engine; every rank of the launched script must start it"
    elif code is not None:
        how = f"{process} ended with {describe_exit(code)}"
    else:
        how = f"{process} is gone" if is_gone else f"{process} failed"
    message = f"{on_host(board, slot)}{how}, {where(slot)}{about_gpu(slot, code)}"
    return Incident(slot.rank, message, slot.failure_text)


class FlightRecorder:
    """Writes at most one record of one engine, from any thread of one process, which ``writer`` names."""

    def __init__(self, board: JobBoard, config: EngineConfig, *, writer: str) -> None:
        self._board, self._config, self._writer = board, config, writer
        self._lock = threading.Lock()
        self._written = False
        self._path: Path | None = None

    def write(self, cause: str, culprit: int | None = None) -> Path | None:
        """Save the board and log the path; later calls only return the path of the first.  Never raises, and takes
        seconds at most.  None if no record is wanted or if it could not be written."""
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
                logger.error("flight record: python -m tp_engine.job.flight_recorder %s", self._path)
            return self._path


def read_board(board: JobBoard, config: EngineConfig, *, cause: str, culprit: int | None, writer: str) -> FlightRecord:
    """Return all that the board shows now."""
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
            "tp_engine": __version__,
            "torch": importlib.metadata.version("torch"),
            "numpy": importlib.metadata.version("numpy"),
            "python": platform.python_version(),
            "system": platform.platform(),
        },
        config=dataclasses.asdict(config),
        ranks=[_rank(board, slot) for slot in board.slots],
    )


def _rank(board: JobBoard, slot: RankSlot) -> RankRecord:
    code = slot.exit_code
    return RankRecord(
        host=board.topology.host_of(slot.rank),
        host_name=slot.host.name,
        process=_far_process_state(slot) if slot in board.far_slots else process_state(slot.pid, slot.started_ticks),
        exit=None if code is None else describe_exit(code),
        state=slot.state.name.lower(),
        phase=slot.phase.label,
        failure=slot.failure_text,
        steps=_steps(slot),
        **{name: getattr(slot, name) for name in _AS_THEY_ARE},
    )


def _steps(slot: RankSlot) -> list[StepRecord]:
    """The records in the order of their steps, without those of steps more than ``NUM_RECORDS`` before the last."""
    digests = dict(map(split_echo, slot.inputs.tolist()))
    rows = sorted((dict(zip(RECORD_FIELDS, row, strict=True)) for row in slot.records.tolist()), key=_STEP_ID)
    first = max(1, rows[-1]["step_id"] - NUM_RECORDS + 1)
    return [
        StepRecord(
            **row | {"plan_checksum": row["plan_checksum"] & (1 << 64) - 1}, input_digest=digests.get(row["step_id"], 0)
        )
        for row in rows
        if row["step_id"] >= first
    ]


def process_state(pid: int, started_ticks: int) -> str:
    """``alive``, ``stopped``, ``gone``, or ``none`` if no process has registered; see ``RankRecord.process``."""
    if pid == 0:
        return "none"
    state, _ = process_vitals(pid)
    try:
        is_same = process_start(pid) == started_ticks
    except ProcessLookupError:
        return "gone"
    if state in "ZX" or not is_same:
        return "gone"
    return "stopped" if state in "Tt" else "alive"


def _far_process_state(slot: RankSlot) -> str:
    """``process_state`` of another host's rank, as that host last said; ``lost`` if the host does not answer."""
    if slot.pid == 0:
        return "none"
    if slot.host.ended:
        return "lost" if slot.host.ended == Ended.LOST else "gone"
    return "stopped" if slot.host.vitals[0] in "Tt" else "alive"
