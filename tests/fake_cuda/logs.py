"""What the processes of a job did with their GPUs, from the logs of the fake runtime, and what is wrong with it.

A log has a line of JSON per call that matters: the thread and the device of each, and an event::

    process             the first line: the last word of its command line
    context             the first call on a device that needs one
    nccl                a call of NCCL: op, comm, count, type, peer, the graph that records it (-1: none)
    capture, captured   the beginning and the end of a recording: others that there are, the memory that it takes
    replay              a recording runs
    forbidden           a call that a recording does not allow, in its thread or beside it
    kernel, unmodelled  something that the fake does not do, so values after it mean nothing
    fault               one that the job asked for
    held                events and graphs that a program still has when it has ended
    end                 a process that ended by itself, and the memory that it kept

``python -m tests.fake_cuda.logs FOLDER`` prints the first fault of a job's logs.
"""

from __future__ import annotations

import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, TypeAlias

Event: TypeAlias = dict[str, Any]

_TYPES = ("int8", "uint8", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64", "bfloat16")
_LEDGER = re.compile(r"memory: (\{.*\})")
_PAIRED = ("Send", "Recv")
_ENDS = ("CommFinalize", "CommDestroy", "CommAbort")
_WRONG = {
    "forbidden": "calls {call}, which a recording forbids",
    "kernel": "launches {name}, which the fake does not run",
    "unmodelled": "does what the fake does not: {name}",
}
_HELD = ("events", "graphs")
# Processes that are killed as soon as nothing more is wanted from them, and why that is right.
_KILLED = {"tp_engine.worker.tuning.trial_process": "the tuner ends it with all that a kernel may have left behind"}
_KEPT = ("device_bytes", "pinned_bytes", "registered_bytes", "mapped_bytes")


@dataclass(frozen=True, slots=True)
class ProcessLog:
    """The events of one process, in their order.  ``rank``: in NCCL's largest communicator; None: in none."""

    name: str
    rank: int | None
    events: Sequence[Event]

    def __str__(self) -> str:
        return f"process {self.name}" if self.rank is None else f"rank {self.rank}"

    @property
    def program(self) -> str:
        """The last word of its command line."""
        return "".join(event["name"] for event in self.of("process"))

    def of(self, *kinds: str) -> Iterator[Event]:
        """The events of these kinds."""
        return (event for event in self.events if event["event"] in kinds)


def read_logs(folder: Path) -> list[ProcessLog]:
    """The logs in ``folder``, by rank.  A process that was killed may have left half a line."""
    found = []
    for path in sorted(folder.glob("*.jsonl")):
        lines = path.read_text().splitlines(keepends=True)
        events = [json.loads(line) for line in lines if line.endswith("\n")]
        joined = [event for event in events if event.get("op") == "CommInit"]
        largest = max(joined, key=lambda event: int(event["size"]), default=None)
        found.append(ProcessLog(path.stem, None if largest is None else largest["rank"], events))
    return sorted(found, key=lambda log: (log.rank is None, log.rank or 0, log.name))


def faults(
    logs: Sequence[ProcessLog],
    *,
    ends_well: bool = True,
    shares_devices: bool = False,
    pinned_bytes: int = 0,
    device_bytes: int = 0,
) -> list[str]:
    """Everything that is wrong, the first difference of each kind; empty for a right job.

    Unless the job ``ends_well``, its ranks may have stopped at different calls and kept their memory.
    ``shares_devices``: ranks have one GPU.  ``pinned_bytes``, ``device_bytes``: what a process may keep.
    """
    return [
        *_wrong_calls(logs),
        *_stray_contexts(logs, shares_devices, ends_well),
        *_different_orders(logs, ends_well),
        *_unpaired(logs, ends_well),
        *_unshared_recordings(logs),
        *(_kept_memory(logs, {"pinned_bytes": pinned_bytes, "device_bytes": device_bytes}) if ends_well else ()),
        *(_held_handles(logs) if ends_well else ()),
    ]


def _wrong_calls(logs: Sequence[ProcessLog]) -> Iterator[str]:
    for log in logs:
        for event in log.of(*_WRONG):
            thread = "main thread" if event["main"] else f"thread {event['thread']}"
            yield f"{log} ({thread}) {_WRONG[event['event']].format(**event)}"


def _stray_contexts(logs: Sequence[ProcessLog], shares_devices: bool, ends_well: bool) -> Iterator[str]:
    """A context takes half a GiB, so a process has one; ranks have different GPUs.

    In a job that ends otherwise, torch's thread that watches NCCL's asks events without its GPU.
    """
    owners: dict[int, ProcessLog] = {}
    for log in logs:
        made = list(log.of("context"))
        for event in made[1:]:
            if not ends_well and event["name"] == "pt_nccl_heartbt":
                continue
            how = f"by {event['by']} ({event['name']})"
            yield f"{log} has GPU {made[0]['device']}, and makes a context on {event['device']} too, {how}"
        if made and log.rank is not None and not shares_devices:
            owner = owners.setdefault(made[0]["device"], log)
            if owner is not log:
                yield f"{log} and {owner} are both on GPU {made[0]['device']}"


def _different_orders(logs: Sequence[ProcessLog], ends_well: bool) -> Iterator[str]:
    """Collectives, recordings and replays come in one order on all ranks: NCCL would hang, or mix up their data."""
    ranks = [log for log in logs if log.rank is not None]
    calls = [[_call(event) for event in log.of("nccl", "replay") if _is_collective(event)] for log in ranks]
    for log, own in zip(ranks[1:], calls[1:], strict=True):
        for number, (first, other) in enumerate(zip_longest(calls[0], own)):
            if first == other or (not ends_well and None in (first, other)):
                continue
            yield f"call {number}: {ranks[0]} has {first or 'ended'}, and {log} {other or 'has ended'}"
            break


def _is_collective(event: Event) -> bool:
    return event["event"] == "replay" or event["op"] not in (*_PAIRED, *_ENDS)


def _call(event: Event) -> str:
    if event["event"] == "replay":
        return f"replay of graph {event['graph']}"
    within = "" if event["graph"] < 0 else f" in graph {event['graph']}"
    return f"{event['op']} of {_size(event)}{within} (communicator {event['comm']:08x})"


def _size(event: Event) -> str:
    return f"{event['count']} x {_TYPES[event['type']]}"


def _unpaired(logs: Sequence[ProcessLog], ends_well: bool) -> Iterator[str]:
    """What one rank sends to another, that one receives: the same sizes in the same order."""
    messages: dict[tuple[int, int, int], dict[str, list[str]]] = defaultdict(lambda: {"Send": [], "Recv": []})
    for log in logs:
        for event in log.of("nccl"):
            if event["op"] in _PAIRED and log.rank is not None:
                pair = (log.rank, event["peer"]) if event["op"] == "Send" else (event["peer"], log.rank)
                messages[event["comm"], *pair][event["op"]].append(_size(event))
    for (_, source, target), both in sorted(messages.items()):
        for number, (sent, received) in enumerate(zip_longest(both["Send"], both["Recv"])):
            if sent == received or (not ends_well and None in (sent, received)):
                continue
            yield (
                f"message {number} from rank {source} to rank {target}: sent {sent or 'nothing'}, "
                f"received {received or 'nothing'}"
            )
            break


def _kept_memory(logs: Sequence[ProcessLog], allowed: Mapping[str, int]) -> Iterator[str]:
    for log in logs:
        ends = list(log.of("end"))
        if not ends and log.program not in _KILLED:
            yield f"{log} did not end by itself"
        for event in ends:
            kept = [
                f"{event[name]} {name.removesuffix('_bytes')} bytes"
                for name in _KEPT
                if event[name] > allowed.get(name, 0)
            ]
            if kept:
                yield f"{log} kept {', '.join(kept)}"


def _held_handles(logs: Sequence[ProcessLog]) -> Iterator[str]:
    """Events and recordings live no longer than their engine."""
    for log in logs:
        for event in log.of("held"):
            held = [f"{event[name]} {name}" for name in _HELD if event[name]]
            if held:
                yield f"{log} still has {', '.join(held)}"


def _unshared_recordings(logs: Sequence[ProcessLog]) -> Iterator[str]:
    """New recordings are made when the old ones, which have run, are gone: a rank that sleeps has none.  Of the last
    ones, after all trials, most find room in the memory of those before."""
    for log in logs:
        have_run, num_made, num_taking = False, 0, 0
        for event in log.of("capture", "captured", "replay"):
            have_run = have_run or event["event"] == "replay"
            if event.get("others") == 0:
                have_run, num_made, num_taking = False, 0, 0
            elif event["event"] == "capture" and have_run:
                yield f"{log} makes recordings beside {event['others']} that have run"
                break
            num_made += event["event"] == "captured"
            num_taking += event.get("bytes", 0) > 0
        if num_made > 2 and num_taking > num_made / 2:
            yield f"{log} has recordings that do not share their memory"


def ledger_faults(logs: Sequence[ProcessLog], output: str) -> list[str]:
    """Where what the ranks have reserved for recordings, as their output says, is less than those took."""
    found = []
    for text in _LEDGER.findall(output):
        ledger = json.loads(text)
        (log,) = (one for one in logs if (one.rank or 0) == ledger["rank"] and any(one.of("captured")))
        taken = 0
        for event in log.of("capture", "captured"):
            # The first ones are trials, which are gone when the last ones begin.
            taken = 0 if event.get("others") == 0 else taken + event.get("bytes", 0)
        if ledger["cuda_graphs"] < taken:
            found.append(f"{log} has reserved {ledger['cuda_graphs']} bytes for recordings that take {taken}")
    return found


def main(folder: str) -> int:
    """Print what is wrong with the logs in ``folder``; the exit code says whether anything is."""
    found = faults(read_logs(Path(folder)))
    print("\n".join(found) or "nothing is wrong")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
