"""Engines whose pool and host tier have given numbers of blocks, and what they do in runs of the same work.

Engines take turns: each run is done by one engine after the other, and the next run in the opposite order::

    run 0   | on  | off |
    run 1   | off | on  |
    run 2   | on  | off |
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from benchmarks.offline.engines import TpEngine
from benchmarks.workloads import Workload
from tp_engine.advice.sizes import block_bytes
from tp_engine.engine.report import EngineReport
from tp_engine.model_config import load_model_config
from tp_engine.units import GIB

WARM_UP_SEED = 1_000_000


class EngineMaker:
    """Starts engines of one model; ``options`` are ``LLM``'s, with ``dtype`` and ``block_size``."""

    def __init__(self, model: str, options: Mapping[str, Any]) -> None:
        self._model, self._options = model, options
        spec, _ = load_model_config(model)
        self.vocab_size = spec.vocab_size
        self.block_size: int = options["block_size"]
        self._block_bytes = block_bytes(spec, 1, self.block_size, options["dtype"])

    def start(self, *, num_blocks: int, num_slots: int = 0, **more: Any) -> TpEngine:
        """An engine with so many blocks in the pool and on the host.  ``RuntimeError`` if the host has another number.

        ``more`` are further options; the maker's have priority.
        """
        options = {**more, **self._options, "num_gpu_blocks_override": num_blocks}
        if num_slots:
            options["kv_offloading_size"] = (num_slots + 0.5) * self._block_bytes / GIB
        engine = TpEngine(self._model, options)
        found = engine.llm.engine.report().stats.num_host_slots
        if found != num_slots:
            engine.close()
            raise RuntimeError(f"the engine has {found} host blocks, not {num_slots}: set no option that changes them")
        return engine


@dataclass(slots=True, kw_only=True)
class Run:
    """Seconds and answers of an engine's run, and by how much its counters grew."""

    seconds: float
    answers: list[list[int]]
    num_query_tokens: int
    num_hit_tokens: int
    num_loaded_blocks: int
    moved_bytes: int

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens per second."""
        return sum(map(len, self.answers)) / self.seconds


class Meter:
    """Measures one run, from now to ``finish``, that consists of workloads."""

    def __init__(self, engine: TpEngine) -> None:
        self._engine = engine
        self._before = engine.llm.engine.report()
        self._seconds = 0.0
        self._answers: list[list[int]] = []

    def run(self, workload: Workload) -> list[list[int]]:
        """The answers of all requests of ``workload``."""
        found = self._engine.run(workload)
        self._seconds += found.total_s
        self._answers += found.token_ids
        return found.token_ids

    def finish(self) -> Run:
        """What the engine did since the start."""
        before, after = self._before, self._engine.llm.engine.report()
        return Run(
            seconds=self._seconds,
            answers=self._answers,
            num_query_tokens=after.stats.num_prefix_query_tokens - before.stats.num_prefix_query_tokens,
            num_hit_tokens=after.stats.num_prefix_hit_tokens - before.stats.num_prefix_hit_tokens,
            num_loaded_blocks=after.stats.num_loaded_blocks - before.stats.num_loaded_blocks,
            moved_bytes=_moved_bytes(after) - _moved_bytes(before),
        )


def take_turns(
    engines: Mapping[str, TpEngine], work: Callable[[TpEngine, int], Run], seeds: Iterable[int]
) -> dict[str, list[Run]]:
    """Every engine's runs of ``work(engine, seed)``, each of which begins with nothing cached."""
    runs: dict[str, list[Run]] = {name: [] for name in engines}
    names = list(engines)
    for seed in seeds:
        for name in names:
            if not engines[name].llm.reset_prefix_cache():
                raise RuntimeError(f"the engine {name!r} still has running requests: its cache can not be emptied")
            runs[name].append(work(engines[name], seed))
        names.reverse()
    return runs


def throughputs(runs: Mapping[str, list[Run]]) -> dict[str, Any]:
    """Each engine's median of generated tokens per second, the ratio of ``on`` to ``off``, and the share of answers
    that are the same from all engines."""
    medians = {name: statistics.median(run.tokens_per_s for run in found) for name, found in runs.items()}
    answers = [[answer for run in found for answer in run.answers] for found in runs.values()]
    same = [all(answer == others[0] for answer in others) for others in zip(*answers, strict=True)]
    return {
        **{f"{name}_tokens_per_s": round(value, 1) for name, value in medians.items()},
        "ratio": round(medians["on"] / medians["off"], 3),
        "same_answers": round(sum(same) / len(same), 4),
    }


def hit_rate(runs: list[Run]) -> float:
    """The part of all prompt tokens that was cached."""
    return sum(run.num_hit_tokens for run in runs) / sum(run.num_query_tokens for run in runs)


@contextmanager
def started(maker: EngineMaker, sizes: Mapping[str, tuple[int, int]], **options: Any) -> Iterator[dict[str, TpEngine]]:
    """An engine for each name, with so many blocks in the pool and on the host; all are closed at the end."""
    with ExitStack() as stack:
        engines = {}
        for name, (num_blocks, num_slots) in sizes.items():
            engines[name] = maker.start(num_blocks=num_blocks, num_slots=num_slots, **options)
            stack.callback(engines[name].close)
        yield engines


def _moved_bytes(report: EngineReport) -> int:
    return 0 if report.moves is None else report.moves.stored_bytes + report.moves.loaded_bytes
