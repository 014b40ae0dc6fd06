"""Many requests at once that share a prefix, which the pool has lost.

A run, of which only the last part counts; a new prefix and new prompts in each::

    compute the prefix | fill the pool with other prompts | 50 requests: prefix, own tokens |
                                                            on:  the prefix is loaded once
                                                            off: it is computed once
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.offline.engines import TpEngine
from benchmarks.tiers.engines import WARM_UP_SEED, EngineMaker, Meter, Run, started, take_turns, throughputs
from benchmarks.workloads import Workload
from tp_engine.units import ceil_div

GOAL = 1.0
"""The least throughput beside an engine without a tier."""

GOAL_LOADS = 1.0
"""How often a block of the prefix is loaded, for all requests together."""

_OWN, _ANSWER, _SPARE_BLOCKS = 16, 8, 16


@dataclass(frozen=True, kw_only=True)
class Sharers:
    """``num_requests`` that share ``prefix_blocks`` whole blocks and have a few tokens of their own."""

    num_requests: int
    prefix_blocks: int
    block_size: int

    @property
    def prefix_tokens(self) -> int:
        """Tokens of the prefix."""
        return self.prefix_blocks * self.block_size

    @property
    def num_blocks(self) -> int:
        """Blocks of a pool that all requests fit into at once."""
        return self.prefix_blocks + self.num_requests * ceil_div(_OWN + _ANSWER, self.block_size) + _SPARE_BLOCKS

    def arrive(self, engine: TpEngine, vocab_size: int, seed: int) -> Run:
        """One run; ids depend on ``seed`` alone."""
        rng = np.random.default_rng(seed)
        prefix = rng.integers(3, vocab_size, self.prefix_tokens).tolist()
        num_others = ceil_div(self.num_blocks, self.prefix_blocks) + 1
        others = rng.integers(3, vocab_size, (num_others, self.prefix_tokens)).tolist()
        for prompt in (prefix, *others):
            engine.run(Workload("one prompt", [prompt], [1]))
        meter = Meter(engine)
        prompts = [prefix + rng.integers(3, vocab_size, _OWN).tolist() for _ in range(self.num_requests)]
        meter.run(Workload("sharers", prompts, [_ANSWER] * len(prompts)))
        return meter.finish()


def compare_sharers(maker: EngineMaker, sharers: Sharers, runs: int) -> dict[str, Any]:
    """Engines with a tier and without one.  ``loads_per_block`` is the largest of all runs.

    Raises ``RuntimeError`` if the engine without a tier still had the prefix, so that nothing was compared.
    """
    num_blocks = sharers.num_blocks
    sizes = {"on": (num_blocks, 4 * num_blocks), "off": (num_blocks, 0)}
    options = {"max_model_len": sharers.prefix_tokens + _OWN + _ANSWER + 1, "max_num_seqs": sharers.num_requests}
    with started(maker, sizes, **options) as engines:
        found = take_turns(
            engines,
            lambda engine, seed: sharers.arrive(engine, maker.vocab_size, seed),
            [WARM_UP_SEED, *range(runs)],
        )
    found = {name: done[1:] for name, done in found.items()}
    most = (sharers.num_requests - 1) * sharers.prefix_tokens
    if max(run.num_hit_tokens for run in found["off"]) > most:
        raise RuntimeError("the pool still had the prefix without a tier; the prompts between must fill it")
    loads = max(run.num_loaded_blocks for run in found["on"])
    return {
        "requests": sharers.num_requests,
        "prefix_tokens": sharers.prefix_tokens,
        "prefix_blocks": sharers.prefix_blocks,
        "pool_blocks": num_blocks,
        "host_blocks": 4 * num_blocks,
        "runs": runs,
        **throughputs(found),
        "goal": GOAL,
        "loaded_blocks": loads,
        "loads_per_block": round(loads / sharers.prefix_blocks, 3),
        "goal_loads": GOAL_LOADS,
    }
