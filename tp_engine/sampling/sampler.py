"""The sampler of a rank: one new token per row, together with the other ranks, without waiting for the device.

::

    logits -> grammar                                                                                  (masked rows)
           -> fp32 -> allowed ids -> logit_bias -> min_tokens -> repetition -> frequency, presence      (edited rows)
           -> argmax where temperature is 0
           -> / temperature -> top_k -> top_p -> min_p -> argmax of logits + Gumbel noise               (the others)

Each rank works on its own slice of the vocabulary and sends the others little; a single rank has the tokens without an
exchange::

    rank 0   slice -> edits, penalties -> share -+              +-> token ids
    rank 1   slice -> edits, penalties -> share -+- all-gather -+-> token ids     (the same)
    ...                                          |              |

One collective per step for any mixture of rows (the alternative, rank 0 deciding on gathered logits, takes two).  Only
min_p without top_k needs another one before it, of one word per row.  On CPUs, top_p without top_k over a large
vocabulary needs it, too, and one after it for rows whose nucleus is larger than its candidates.  ``vocab_parallel`` has
the table.

All ranks decide for themselves.  They decide alike because they start from the same bits: parameters, rows and
positions come from the same plan, and shares from the same all-gather.  Greedy rows and rows without top_k and top_p
are decided by comparing integers.  The others repeat the same operations on the same numbers in the same shapes, which
gives the same bits on devices of one kind; hosts compare their kinds at the start.

Log-probabilities come from the raw logits, or with ``processed_logprobs`` from those that a row is drawn from, before
the noise: minus infinity for what the filters leave out; greedy rows have no temperature.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from tp_engine.cpu import best_tokens, native_library
from tp_engine.distributed.collectives import Communicator
from tp_engine.kernels.candidates import DEFAULTS, Choices
from tp_engine.kernels.steps.decode_inputs import RowTables
from tp_engine.layers.upload import upload, upload_all
from tp_engine.plan import IntArray
from tp_engine.sampling import vocab_parallel
from tp_engine.sampling.device_sampler import DeviceSampler, SamplerVariant
from tp_engine.sampling.groups import RowGroup, SamplingMethod, StepGrouper, StepGroups
from tp_engine.sampling.logprobs import LogprobTensors, score_rows
from tp_engine.sampling.noise import noise_keys
from tp_engine.sampling.ranking import row_argmax
from tp_engine.sampling.state import SamplingState
from tp_engine.sampling.vocab_parallel import exchange

_GREEDY = SamplerVariant()


@dataclass(kw_only=True)
class _GroupStep:
    """A group in one step: where its logits are, its noise keys (m, 2) and, if needed, its rows' maxima (m, 1)."""

    group: RowGroup
    raw: torch.Tensor
    edited: torch.Tensor | None
    keys: torch.Tensor | None
    maximum: torch.Tensor | None = None

    def logits(self, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Rows ``start`` to ``stop`` of the group (m, width)."""
        return self.group.logits_of(self.raw, self.edited, start, stop)

    @cached_property
    def whole(self) -> torch.Tensor:
        """All rows of the group (m, width)."""
        return self.logits()


class Sampler:
    """Samples the rows of ``state``, which knows this rank's slice of the vocabulary, together with the other ranks.

    If the state has tables, kernels sample what steps they can (``device``); the tokens are the same.
    """

    def __init__(self, state: SamplingState, communicator: Communicator, choices: Choices = DEFAULTS) -> None:
        self._state = state
        self._communicator = communicator
        self._is_alone = communicator.info.world_size == 1
        self._grouper = StepGrouper(state)
        self._vocab_ids = torch.arange(state.vocab_size, dtype=torch.int32, device=state.device)
        self.device = None if state.tables is None else DeviceSampler(state, communicator, choices)
        self._known = (0, -1, True)  # epoch, version of the state, whether all of the epoch's rows are plain

    def sample(
        self, logits: torch.Tensor, rows: IntArray, positions: IntArray
    ) -> tuple[torch.Tensor, LogprobTensors | None]:
        """Token ids (n,) int32 on the device, and rank 0's log-probabilities if any row asks for them.

        This rank's slice ``logits`` (n, width), any float type, changes only in masked rows.  On the host: ``rows``
        (n,), each once, and ``positions`` (n,), the new tokens' indices in their sequences.  Rows that did not ask for
        log-probabilities have zeros.  A collective: all ranks pass the same ``rows`` and ``positions``.
        """
        state, raw = self._state, logits
        if self.device is not None and (kind := self.device.kind_of(rows, positions)) is not None:
            on_host = (rows.astype(np.int32, copy=False), positions.astype(np.int64) - 1)
            return self.device.sample(kind, state.masked(logits, rows), *upload_all(on_host, logits.device)), None
        assert logits.shape == (len(rows), state.vocab.width), f"logits {tuple(logits.shape)} for {len(rows)} rows"
        logits = state.masked(logits, rows)
        if state.is_plain[rows].all():
            return row_argmax(logits).to(torch.int32) if self._is_alone else self._exchange_best(logits), None
        groups = self._grouper.groups(rows, positions)
        edited = groups.edited_logits(logits, state.penalties)
        steps = self._steps(logits, edited, groups, rows, positions)
        self._exchange_maxima(steps)
        scored = groups.scored_logits(raw, logits, edited)
        shares = [self._share(step) for step in steps]
        if self._is_alone:
            decided = shares
        else:
            stacks = exchange(self._communicator, shares if scored is None else [*shares, scored])
            decided = [self._decide(step, stack) for step, stack in zip(steps, stacks, strict=False)]
            scored = None if scored is None else vocab_parallel.whole_logits(stacks[-1], state.vocab_size)
        tokens = decided[0]
        if len(decided) > 1:
            tokens = torch.empty(len(rows), dtype=torch.int32, device=logits.device)
            for step, own in zip(steps, decided, strict=True):
                tokens.index_copy_(0, step.group.members, own)
        groups.record(tokens, state.penalties)
        if scored is None or not self._communicator.info.is_first:
            return tokens, None
        return tokens, score_rows(scored, tokens, groups)

    def _exchange_best(self, logits: torch.Tensor) -> torch.Tensor:
        vocab = self._state.vocab
        (stack,) = exchange(self._communicator, [vocab_parallel.greedy_share(logits[:, : vocab.num_ids], vocab)])
        return vocab_parallel.merge_best(stack)

    def _steps(
        self, logits: torch.Tensor, edited: torch.Tensor | None, groups: StepGroups, rows: IntArray, positions: IntArray
    ) -> list[_GroupStep]:
        keys = upload(noise_keys(self._state.seed[rows], positions), logits.device) if groups.draws else None
        return [
            _GroupStep(
                group=group,
                raw=logits,
                edited=edited,
                keys=None if keys is None else keys.index_select(0, group.members),
            )
            for group in groups.groups
        ]

    def _exchange_maxima(self, steps: list[_GroupStep]) -> None:
        if self._is_alone:
            return
        wanting = [
            step for step in steps if vocab_parallel.needs_maximum(step.group, self._state.vocab_size, step.raw.device)
        ]
        offered = [vocab_parallel.maximum_share(self._held(step)) for step in wanting]
        for step, stack in zip(wanting, exchange(self._communicator, offered), strict=True):
            step.maximum = vocab_parallel.decide_maximum(stack)

    def _held(self, step: _GroupStep) -> torch.Tensor:
        return step.whole[:, : self._state.vocab.num_ids]

    def _share(self, step: _GroupStep) -> torch.Tensor:
        vocab, group = self._state.vocab, step.group
        if self._is_alone:  # the share is the tokens
            return vocab_parallel.decide_from_logits(step.logits, group, step.keys, self._vocab_ids)
        if group.method in (SamplingMethod.GREEDY, SamplingMethod.ANY):
            return vocab_parallel.best_share(self._held(step), group, step.keys, vocab, step.maximum)
        if group.method is SamplingMethod.RANKED:
            return vocab_parallel.ranked_share(self._held(step), group.largest_top_k, vocab)
        if step.maximum is not None:
            return vocab_parallel.nucleus_share(self._held(step), group, vocab, step.maximum)
        return step.whole

    def _decide(self, step: _GroupStep, stack: torch.Tensor) -> torch.Tensor:
        if step.group.method in (SamplingMethod.GREEDY, SamplingMethod.ANY):
            return vocab_parallel.merge_best(stack)
        assert step.keys is not None
        if step.group.method is SamplingMethod.RANKED:
            return vocab_parallel.decide_ranked(stack, step.group, step.keys)
        if step.maximum is not None:
            return self._decide_nucleus(step, stack, step.keys)
        return self._decide_from_logits(stack, step.group, step.keys)

    def _decide_nucleus(self, step: _GroupStep, stack: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Decide from the candidates; for rows whose candidates are too few, exchange the logits."""
        tokens, missing = vocab_parallel.decide_nucleus(stack, step.group, keys, self._state.vocab_size)
        if len(missing):
            (logits,) = exchange(self._communicator, [step.whole.index_select(0, missing)])
            drawn = self._decide_from_logits(logits, step.group.select(missing), keys.index_select(0, missing))
            tokens.index_copy_(0, missing, drawn)
        return tokens

    def _decide_from_logits(self, stack: torch.Tensor, group: RowGroup, keys: torch.Tensor) -> torch.Tensor:
        logits = vocab_parallel.whole_logits(stack, self._state.vocab_size)
        return vocab_parallel.decide_from_logits(lambda start, stop: logits[start:stop], group, keys, self._vocab_ids)

    @cached_property
    def kinds(self) -> tuple[SamplerVariant, ...]:
        """The kinds of steps whose sampling can be captured; without kernels, greedy ones of a single rank on a CPU."""
        if self.device is not None:
            return self.device.kinds
        return (_GREEDY,) if self._is_alone and self._state.device.type == "cpu" and native_library() else ()

    @property
    def advancing(self) -> tuple[SamplerVariant, ...]:
        """Those of ``kinds`` that are captured with the end of the step."""
        return () if self.device is None else self.device.advancing

    def recorded_kind(self, rows: IntArray, positions: Callable[[], IntArray], epoch: int = 0) -> SamplerVariant | None:
        """The kind of this step if a recording may sample it, else None.  ``epoch`` is ``StepPlan.rows_epoch``.

        Masks come with the step, so a recording cannot hold them.
        """
        if self._state.masks.any_of(rows):
            return None
        if self.device is not None:
            return self.device.kind_of(rows, positions())
        known, version, are_greedy = self._known
        if not epoch or epoch != known or version != self._state.version:
            are_greedy = bool(self._state.is_plain[rows].all())
            self._known = epoch, self._state.version, are_greedy
        return _GREEDY if are_greedy else None

    def sample_recorded(
        self,
        kind: SamplerVariant,
        logits: torch.Tensor,
        rows: torch.Tensor,
        positions: torch.Tensor,
        *,
        advanced: RowTables | None = None,
    ) -> torch.Tensor:
        """The recorded part: token ids (n,) int32 from ``logits`` (n, width); see ``DeviceSampler.sample``."""
        if self.device is not None:
            return self.device.sample(kind, logits, rows, positions, advanced=advanced)
        library = native_library()
        assert library is not None and advanced is None, kind
        return best_tokens(library, logits)
