"""Loads for requests that still wait: what the host tier has of their prompts comes in while others run.

::

    waiting   A  B  C  D ...                    no row or no room for A yet
              |  |  |
              +--+--+--> hits on the host ----> blocks of the pool, cached, held by no row ----> loads of the next plans

Such blocks may be taken again at any time, as cached blocks may, so prefetching holds nothing that a running row needs.
When the request enters, it finds them like any others.
"""

from __future__ import annotations

import numpy as np

from tp_engine.sched.host_tier import HostTier
from tp_engine.sched.sequence import NEVER, Sequence, Shared
from tp_engine.sched.step_builder import Batch

_NUM_CANDIDATES = 3
_STEPS_BETWEEN = 32  # looks at the same sequence
_IDLE_SHARE = _NUM_CANDIDATES + 1


class Prefetcher:
    """Looks at the first sequences of the queue between two plans."""

    def __init__(self, batch: Batch, tier: HostTier) -> None:
        self._batch = batch
        self._tier = tier

    def look(self, step_id: int) -> None:
        """Begin the loads of at most one waiting sequence, if those that were begun have gone out."""
        if self._tier.is_loading:
            return
        for sequence in self._batch.waiting.first(_NUM_CANDIDATES):
            if sequence.looked_at_step + _STEPS_BETWEEN <= step_id:
                sequence.looked_at_step = step_id
                if self._load(sequence):
                    return

    def _load(self, sequence: Sequence) -> bool:
        """Begin the loads of the first blocks that are missing, as many as there is room for; whether there are any.

        With the blocks before them they may take a quarter of the idle blocks, besides one for each row, so that the
        candidates do not push each other out.  Nothing is dropped for them.
        """
        blocks, tier = self._batch.blocks, self._tier
        shared = blocks.find_hits(sequence).shared
        on_host = tier.on_host(shared.held)
        if not on_host.any():
            return False
        is_wanted = on_host.copy()
        is_wanted[~on_host] = blocks.pool.are_idle(shared.held[~on_host])
        num_idle = blocks.pool.num_available - self._batch.rows.num_running * blocks.num_groups
        fits = (is_wanted.cumsum() <= num_idle // _IDLE_SHARE) & (on_host.cumsum() <= tier.num_moves_left)
        count = int(np.count_nonzero(fits))  # both sums only grow
        if not on_host[:count].any():
            return False
        if count < len(on_host):
            sequence.looked_at_step = NEVER  # for the rest
        part = shared.held[:count]
        num_loaded = int(np.count_nonzero(on_host[:count]))
        sequence.num_prefetched_tokens += num_loaded * blocks.block_size // blocks.num_groups
        blocks.pool.release(tier.hold(Shared(part[:, None], shared.first, part)).held)
        return True
