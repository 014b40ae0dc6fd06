"""A flight record as text: cause, ranks, which rank waited for which, tracebacks, the last steps."""

from collections.abc import Iterator, Mapping, Sequence

from tp_engine.job.flight_recorder.analysis import Standing, explain, standings
from tp_engine.job.flight_recorder.record import FlightRecord, RankRecord, StepRecord

_TRACEBACK_LINES = 25
_TELLING = (
    "model", "tensor_parallel_size", "device", "dtype", "attention_backend", "block_size", "max_model_len",
    "max_num_seqs", "max_num_batched_tokens", "watchdog_warn_s", "watchdog_timeout_s",
)  # fmt: skip
_RANK_HEADER = ("rank", "pid", "state", "phase", "step started", "step done", "last sign of life", "CPU", "process")


def report_lines(record: FlightRecord, *, num_steps: int) -> list[str]:
    """Return the whole report, with the last ``num_steps`` steps of each rank."""
    rows = [_rank_row(rank, one) for rank, one in zip(record.ranks, standings(record), strict=True)]
    return [
        f"Cause: {record.cause}",
        f"Written by {record.written_by} at {record.written_at}, {record.world_size} ranks; " + _pairs(record.versions),
        f"Configuration: {_pairs({name: record.config[name] for name in _TELLING if name in record.config})}",
        "",
        *table(_RANK_HEADER, rows),
        "",
        *explain(record),
        *_failures(record),
        "",
        *_timeline(record, num_steps),
    ]


def _pairs(values: Mapping[str, object]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items()) or "unknown"


def _rank_row(rank: RankRecord, one: Standing) -> tuple[str, ...]:
    alive = "unknown" if one.silent_s is None else f"{one.silent_s:.1f} s ago"
    process = f"gone ({rank.exit})" if rank.exit else rank.process
    cpu = f"{rank.cpu_ns / 1e9:.1f} s"
    steps = (str(rank.step_started), str(rank.step_done))
    return (str(rank.rank), str(rank.pid), rank.state, rank.phase, *steps, alive, cpu, process)


def _failures(record: FlightRecord) -> Iterator[str]:
    for rank in record.ranks:
        if rank.failure:
            yield ""
            yield f"Rank {rank.rank} failed with:"
            yield from ("    " + line for line in rank.failure.rstrip().splitlines()[-_TRACEBACK_LINES:])


def _timeline(record: FlightRecord, num_steps: int) -> list[str]:
    """A line per step and rank, oldest first; times in milliseconds, ``begun`` relative to the writing of the record.

    Skew is the time from the first rank's end of a step to the last rank's.
    """
    ids = sorted({step.step_id for rank in record.ranks for step in rank.steps})[-num_steps:] if num_steps > 0 else []
    if not ids:
        return ["No steps are recorded."]
    header = ("step", "rank", "begun ms", "decodes", "prefill", "bytes", "plan wait", "run", "total", "skew")
    by_rank = [{step.step_id: step for step in rank.steps} for rank in record.ranks]
    rows = []
    for step_id in ids:
        found = [(rank, steps[step_id]) for rank, steps in enumerate(by_rank) if step_id in steps]
        done = [step.done_ns for _, step in found if step.done_ns]
        skew = f"{(max(done) - min(done)) / 1e6:.3f}" if len(done) == record.world_size else "unfinished"
        for rank, step in found:
            before = by_rank[rank].get(step_id - 1)
            rows.append((*_step_row(rank, step, before.done_ns if before else 0, record.written_ns), skew))
            skew = ""
    return ["The last steps, times in ms:", *table(header, rows)]


def _step_row(rank: int, step: StepRecord, free_ns: int, now_ns: int) -> tuple[str, ...]:
    """``free_ns``: when the rank had ended the step before, or 0."""
    begun = f"-{(now_ns - step.started_ns) / 1e6:.1f}" if step.started_ns else "never"
    counts = (step.decode_rows, step.prefill_tokens, step.plan_bytes)
    return (
        str(step.step_id),
        str(rank),
        begun,
        *map(str, counts),
        _span_ms(free_ns, max(step.received_ns, free_ns) if step.received_ns else 0),
        _span_ms(step.started_ns, step.launched_ns or step.done_ns),
        _span_ms(step.started_ns, step.done_ns),
    )


def _span_ms(start_ns: int, end_ns: int) -> str:
    return f"{(end_ns - start_ns) / 1e6:.3f}" if start_ns and end_ns else "-"


def table(header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Right-aligned columns."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = ("  ".join(map(str.rjust, row, widths)) for row in (header, *rows))
    return [line.rstrip() for line in lines]
