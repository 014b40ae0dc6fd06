"""Multi-turn chats, with and without a host tier: four times the pool, or all of them in the pool.

In each turn every chat goes on once, in random order.  Its prompt is all that was said before, and a new message::

    turn 0    | first message | answer |
    turn 1    | first message | answer | message | answer |
              |<---- cached, if still there ---->|
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from benchmarks.offline.engines import TpEngine
from benchmarks.tiers.engines import (
    WARM_UP_SEED,
    EngineMaker,
    Meter,
    Run,
    hit_rate,
    started,
    take_turns,
    throughputs,
)
from benchmarks.workloads import Workload
from tp_engine.units import ceil_div

GOAL = 2.0
"""How many times the throughput without a tier, where the chats are ``TIMES_POOL`` times the pool."""

GOAL_POINTS = 2.0
"""The hit rate's greatest distance, in points of per cent, from that of one pool of the summed size."""

FITS_GOAL = 0.95
"""The least throughput of an engine with a tier that it does not need, beside one without."""

TIMES_POOL = 4

_AT_ONCE = 3


@dataclass(frozen=True, kw_only=True)
class ChatSet:
    """``num_chats`` chats of ``num_turns`` turns, and tokens of the first message, of the others and of answers."""

    num_chats: int
    num_turns: int = 5
    first: int = 512
    message: int = 48
    answer: int = 16

    @property
    def final_tokens(self) -> int:
        """Tokens of a chat when it has ended."""
        return self.first + (self.num_turns - 1) * self.message + self.num_turns * self.answer

    def num_blocks(self, block_size: int) -> int:
        """Blocks of all chats when they have ended."""
        return self.num_chats * ceil_div(self.final_tokens, block_size)

    def shrunk(self, factor: int) -> ChatSet:
        """The same set with messages and answers of ``1 / factor`` of the length, at least one token."""
        first, message, answer = (max(1, size // factor) for size in (self.first, self.message, self.answer))
        return replace(self, first=first, message=message, answer=answer)

    def talk(self, engine: TpEngine, vocab_size: int, seed: int) -> Run:
        """Let ``engine`` answer all turns of all chats; messages and order depend on ``seed`` alone."""
        rng, meter = np.random.default_rng(seed), Meter(engine)
        histories: list[list[int]] = [[] for _ in range(self.num_chats)]
        for turn in range(self.num_turns):
            for history in histories:
                history += rng.integers(3, vocab_size, self.message if turn else self.first).tolist()
            turns = [histories[chat] for chat in rng.permutation(self.num_chats)]
            answers = meter.run(Workload("turn", [list(history) for history in turns], [self.answer] * len(turns)))
            for history, answer in zip(turns, answers, strict=True):
                history += answer
        return meter.finish()


def compare_chats(maker: EngineMaker, chats: ChatSet, runs: int, host_pools: int) -> dict[str, Any]:
    """Chats four times the pool: engines with a tier, without one, and with one pool of the summed size.

    The tier is ``host_pools`` times the pool; from ``TIMES_POOL`` on it alone holds all chats.
    """
    num_blocks = chats.num_blocks(maker.block_size) // TIMES_POOL
    num_slots = host_pools * num_blocks
    sizes = {"on": (num_blocks, num_slots), "off": (num_blocks, 0), "one_pool": (num_blocks + num_slots, 0)}
    found = _talk(maker, chats, sizes, runs)
    rates = {name: 100 * hit_rate(done) for name, done in found.items()}
    return {
        **_sizes(maker, chats, runs, num_blocks, num_slots),
        **throughputs(found),
        "goal": GOAL,
        **{f"{name}_hit_percent": round(rate, 2) for name, rate in rates.items()},
        "hit_gap_points": round(rates["one_pool"] - rates["on"], 2),
        "goal_points": GOAL_POINTS,
    }


def compare_fits(maker: EngineMaker, chats: ChatSet, runs: int) -> dict[str, Any]:
    """Chats that the pool holds: engines with a tier and without one.  ``moved_bytes`` of all runs should be 0."""
    needed = chats.num_blocks(maker.block_size)
    sizes = {"on": (2 * needed, needed), "off": (2 * needed, 0)}
    found = _talk(maker, chats, sizes, runs)
    return {
        **_sizes(maker, chats, runs, *sizes["on"]),
        **throughputs(found),
        "goal": FITS_GOAL,
        "moved_bytes": sum(run.moved_bytes for run in found["on"]),
        "goal_bytes": 0,
    }


def _talk(maker: EngineMaker, chats: ChatSet, sizes: Mapping[str, tuple[int, int]], runs: int) -> dict[str, list[Run]]:
    """Runs of engines with these numbers of blocks and slots, after one turn each that does not count."""
    longest, vocab_size, begun = chats.final_tokens + 1, maker.vocab_size, replace(chats, num_turns=1)
    with started(maker, sizes, max_model_len=longest, max_num_seqs=_AT_ONCE) as engines:
        take_turns(engines, lambda engine, seed: begun.talk(engine, vocab_size, seed), [WARM_UP_SEED])
        return take_turns(engines, lambda engine, seed: chats.talk(engine, vocab_size, seed), range(runs))


def _sizes(maker: EngineMaker, chats: ChatSet, runs: int, num_blocks: int, num_slots: int) -> dict[str, Any]:
    return {
        "chats": chats.num_chats,
        "turns": chats.num_turns,
        "chat_tokens": chats.final_tokens,
        "chat_blocks": chats.num_blocks(maker.block_size),
        "pool_blocks": num_blocks,
        "host_blocks": num_slots,
        "runs": runs,
    }
