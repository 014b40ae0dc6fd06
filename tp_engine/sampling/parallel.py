"""The sampler of several ranks: each works on its own slice of the vocabulary and sends the others little.

::

    rank 0   slice -> edits, penalties -> share -+              +-> token ids
    rank 1   slice -> edits, penalties -> share -+- all-gather -+-> token ids     (the same)
    ...                                          |              |

One collective per step for whatever mixture of rows (the alternative, rank 0 deciding on gathered logits, takes two).
Only min_p without top_k needs another one before it, of one word per row.  On CPU, top_p without top_k over a large
vocabulary needs it too, and rows whose nucleus is larger than its candidates one after it.  ``vocab_parallel`` has the
table.

All ranks decide for themselves.  They decide alike because they start from the same bits: parameters, rows and
positions come from the same plan, and shares from the same all-gather.  Greedy rows and rows without top_k and top_p
are decided by comparing integers.  The others repeat the same operations on the same numbers in the same shapes, which
gives the same bits on devices of one kind, the only case: several hosts compare their kinds at the start.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tp_engine.distributed.collectives import Communicator
from tp_engine.layers.upload import upload
from tp_engine.plan import IntArray
from tp_engine.sampling import vocab_parallel
from tp_engine.sampling.groups import RowGroup, StepGrouper, StepGroups, Way
from tp_engine.sampling.logprobs import LogprobTensors, score_rows
from tp_engine.sampling.noise import noise_keys
from tp_engine.sampling.ranking import best_keys
from tp_engine.sampling.state import SamplingState
from tp_engine.sampling.vocab_parallel import exchange


@dataclass(slots=True, kw_only=True)
class _GroupStep:
    """A group in one step: its slices (m, width), its noise keys (m, 2) and, if needed, its rows' maxima (m, 1)."""

    group: RowGroup
    logits: torch.Tensor
    keys: torch.Tensor | None
    maximum: torch.Tensor | None = None


class ParallelSampler:
    """Samples the rows of ``state`` together with the other ranks; the tokens are those of ``Sampler``."""

    def __init__(self, state: SamplingState, communicator: Communicator) -> None:
        self._state = state
        self._communicator = communicator
        self._grouper = StepGrouper(state)
        self._vocab_ids = torch.arange(state.vocab_size, dtype=torch.int32, device=state.device)

    def sample(
        self, logits: torch.Tensor, rows: IntArray, positions: IntArray
    ) -> tuple[torch.Tensor, LogprobTensors | None]:
        """``Sampler.sample`` for this rank's slice ``logits`` (n, width); all ranks get the ids, rank 0 log-probs too.

        A collective: every rank calls it with the same ``rows`` and ``positions``.
        """
        state, vocab, raw = self._state, self._state.vocab, logits
        assert logits.shape == (len(rows), vocab.width), f"logits {tuple(logits.shape)} for {len(rows)} rows"
        logits = state.masked(logits, rows)
        if state.is_plain[rows].all() and vocab.num_ids:
            (stack,) = exchange(self._communicator, [best_keys(logits[:, : vocab.num_ids], vocab.first)[:, None]])
            return vocab_parallel.merge_best(stack), None
        groups = self._grouper.groups(rows, positions)
        edited = groups.edited_logits(logits, state.penalties)
        steps = self._steps(logits, edited, groups, rows, positions)
        self._exchange_maxima(steps)
        offered = [self._share(step) for step in steps]
        if groups.processed is not None:
            offered.append(groups.processed.logits_of(logits, edited))
        elif groups.scored is not None:
            offered.append(raw.index_select(0, groups.scored))
        stacks = exchange(self._communicator, offered)
        tokens = torch.empty(len(rows), dtype=torch.int32, device=logits.device)
        for step, stack in zip(steps, stacks, strict=False):
            tokens.index_copy_(0, step.group.members, self._decide(step, stack))
        groups.record(tokens, state.penalties)
        if groups.scored is None or not self._communicator.info.is_first:
            return tokens, None
        return tokens, score_rows(vocab_parallel.whole_logits(stacks[-1], state.vocab_size), tokens, groups)

    def _steps(
        self,
        logits: torch.Tensor,
        edited: torch.Tensor | None,
        groups: StepGroups,
        rows: IntArray,
        positions: IntArray,
    ) -> list[_GroupStep]:
        keys = upload(noise_keys(self._state.seed[rows], positions), logits.device) if groups.draws else None
        return [
            _GroupStep(
                group=group,
                logits=group.logits_of(logits, edited),
                keys=None if keys is None else keys.index_select(0, group.members),
            )
            for group in groups.groups
        ]

    def _exchange_maxima(self, steps: list[_GroupStep]) -> None:
        wanting = [
            step
            for step in steps
            if vocab_parallel.needs_maximum(step.group, self._state.vocab_size, step.logits.device)
        ]
        offered = [vocab_parallel.maximum_share(self._held(step)) for step in wanting]
        for step, stack in zip(wanting, exchange(self._communicator, offered), strict=True):
            step.maximum = vocab_parallel.decide_maximum(stack)

    def _held(self, step: _GroupStep) -> torch.Tensor:
        return step.logits[:, : self._state.vocab.num_ids]

    def _share(self, step: _GroupStep) -> torch.Tensor:
        vocab, group, held = self._state.vocab, step.group, self._held(step)
        if group.way in (Way.GREEDY, Way.ANY):
            return vocab_parallel.best_share(held, group, step.keys, vocab, step.maximum)
        if group.way is Way.RANKED:
            return vocab_parallel.ranked_share(held, group.largest_top_k, vocab)
        if step.maximum is not None:
            return vocab_parallel.nucleus_share(held, group, vocab, step.maximum)
        return step.logits

    def _decide(self, step: _GroupStep, stack: torch.Tensor) -> torch.Tensor:
        if step.group.way in (Way.GREEDY, Way.ANY):
            return vocab_parallel.merge_best(stack)
        assert step.keys is not None
        if step.group.way is Way.RANKED:
            return vocab_parallel.decide_ranked(stack, step.group, step.keys)
        if step.maximum is not None:
            return self._decide_nucleus(step, stack, step.keys)
        return self._decide_from_logits(stack, step.group, step.keys)

    def _decide_nucleus(self, step: _GroupStep, stack: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Decide from the candidates; for rows whose candidates are too few, exchange the logits."""
        tokens, missing = vocab_parallel.decide_nucleus(stack, step.group, keys, self._state.vocab_size)
        if len(missing):
            (logits,) = exchange(self._communicator, [step.logits.index_select(0, missing)])
            drawn = self._decide_from_logits(logits, step.group.select(missing), keys.index_select(0, missing))
            tokens.index_copy_(0, missing, drawn)
        return tokens

    def _decide_from_logits(self, stack: torch.Tensor, group: RowGroup, keys: torch.Tensor) -> torch.Tensor:
        logits = vocab_parallel.whole_logits(stack, self._state.vocab_size)
        return vocab_parallel.decide_from_logits(logits, group, keys, self._vocab_ids)
