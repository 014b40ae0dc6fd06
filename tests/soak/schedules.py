"""Random schedules of the host tier in the scheduler's harness, until so many blocks have moved.

Arrivals, aborts, preemptions, forks, salts, priorities, grammars and resets of the cache; pools and tiers of many
sizes, layers with windows, plans ahead, and moves that end early, late or at random.
"""

from __future__ import annotations

import random
from collections import Counter

from tests.unit.features.tiers.host_tier_harness import Lag, MaskedTierWorker
from tests.unit.sched.scheduler_harness import changed
from tests.unit.sched.test_scheduler_grammar import GrammarSimulation, MixedLoad
from tests.unit.sched.test_scheduler_properties import LAYOUTS, SHAPES
from tp_engine.features.structured_output.feature import MASK_ROWS

_ACTS = 400
_POOLS = [one for one in (*SHAPES.values(), *LAYOUTS.values()) if one.max_model_len > 20]
_FAR_MORE = 50


def many_moves(least: int, seed: int) -> Counter[str]:
    """Run one random engine after the other until ``least`` blocks have moved; counts of what happened.

    The harness raises if a row reads what is not its own, if a sequence gets other tokens than alone, if unfinished
    requests cannot go on, or if the scheduler's parts disagree.
    """
    rng, count = random.Random(seed), Counter[str]()
    while count["moved blocks"] < least:
        assert count["engines"] < least // _FAR_MORE + _FAR_MORE, f"hardly any block moves: {count}"
        given = changed(
            rng.choice(_POOLS),
            num_host_slots=rng.choice((1, 3, 20, 60, 60, 400)),
            max_host_moves=rng.choice((1, 2, 3, 8, 64)),
        )
        simulation = GrammarSimulation(given, ahead=rng.choice((0, 1, 1, 2)))
        worker = simulation.worker = MaskedTierWorker(given, rng.choice(list(Lag)))
        load = MixedLoad(simulation, rng.randrange(1 << 30))
        for _ in range(_ACTS):
            load.act()
        simulation.run()
        stats = simulation.scheduler.stats()
        count["engines"] += 1
        count["moved blocks"] += worker.num_loads + worker.num_stores
        count["loaded blocks"] += worker.num_loads
        count["waits for moves"] += worker.num_waits
        count["preemptions in schedules"] += stats.num_preemptions
        count["masked rows"] += sum(len(MASK_ROWS.of(plan)) for plan in simulation.plans)
        count["requests"] += len(simulation.requests)
    return count
