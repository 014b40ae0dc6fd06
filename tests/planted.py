"""Faults to plant in an engine, which ``tp-engine check`` must find.

Each is a function that replaces something in the engine by ``swap(owner, name, new)``; ``new`` gets the original.
The variable ``PLANT`` names the one that ranks which a test forks plant in themselves (``warm_children``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import msgspec
import numpy as np
import torch

from tests.ranks.warm_children import PLANT as PLANT
from tp_engine.attention.base import AttentionMetadata
from tp_engine.layers.attention import Attention, current_metadata
from tp_engine.layers.embedding import ParallelLMHead
from tp_engine.layers.linear import RowParallelLinear
from tp_engine.layers.norm import Norm
from tp_engine.layers.rotary import RotaryEmbedding
from tp_engine.plan import StepPlan
from tp_engine.sampling import filters
from tp_engine.sampling.state import SamplingState
from tp_engine.sched.blocks.prefix_cache import PrefixCache
from tp_engine.sched.scheduler_state import SchedulerState
from tp_engine.worker.batch.decode_batch import DecodeBatch
from tp_engine.worker.batch.input_batch import InputBatch
from tp_engine.worker.model_runner import ModelRunner


class Swap(Protocol):
    def __call__(self, owner: Any, name: str, new: Callable[[Any], Any]) -> None: ...


def set_swap(owner: Any, name: str, new: Callable[[Any], Any]) -> None:
    """Replace for good, in a process that ends with the test."""
    setattr(owner, name, new(getattr(owner, name)))


def plant(name: str, swap: Swap = set_swap) -> None:
    """Plant the fault of a name."""
    PLANTS[name](swap)


Plant = Callable[[Swap], None]


def _attention(change: Callable[..., tuple[torch.Tensor, Any, Any]]) -> Plant:
    """Change queries, keys and values before attention; ``change`` also gets the step's metadata."""

    def new(old: Any) -> Any:
        def forward(self: Attention, query: torch.Tensor, key: Any, value: Any) -> Any:
            return old(self, *change(current_metadata(self.group), query, key, value))

        return forward

    return lambda swap: swap(Attention, "forward", new)


def _attended(change: Callable[[AttentionMetadata, torch.Tensor], torch.Tensor]) -> Plant:
    """Change the output of attention."""

    def new(old: Any) -> Any:
        return lambda self, *given: change(current_metadata(self.group), old(self, *given))

    return lambda swap: swap(Attention, "forward", new)


def _sampling(**changes: Callable[[Any], Any]) -> Plant:
    """Change parameters of requests before the sampler."""

    def new(old: Any) -> Any:
        def admit(self: SamplingState, row: int, sampling: Any, *known: Any) -> None:
            changed = {name: change(getattr(sampling, name)) for name, change in changes.items()}
            old(self, row, msgspec.structs.replace(sampling, **changed), *known)

        return admit

    return lambda swap: swap(SamplingState, "admit", new)


def _prompt_positions(which: Callable[[InputBatch, StepPlan, Any], Any], shift: int) -> Plant:
    """Shift the rotary positions of prompts' tokens, in rows that ``which`` gives."""

    def new(old: Any) -> Any:
        def prepare(self: InputBatch, plan: StepPlan) -> Any:
            inputs = old(self, plan)
            layout = inputs.layout
            if not layout.is_decode_only:
                first = layout.num_decodes
                later = torch.from_numpy(which(self, plan, layout).repeat(layout.prefill_tokens))
                inputs.positions[first:][later] += shift
            return inputs

        return prepare

    return lambda swap: swap(InputBatch, "prepare", new)


def _later_chunks(batch: InputBatch, plan: StepPlan, layout: Any) -> Any:
    return batch.num_computed[layout.prefill_rows] > 0


def _behind_hits(batch: InputBatch, plan: StepPlan, layout: Any) -> Any:
    hits = [one.row for one in plan.admitted if one.num_computed_tokens > 0]
    return np.isin(layout.prefill_rows, hits)


def _decode_positions(swap: Swap) -> None:
    def new(old: Any) -> Any:
        def prepare(self: DecodeBatch, size: int) -> Any:
            inputs = old(self, size)
            inputs.positions.add_(1)
            return inputs

        return prepare

    swap(DecodeBatch, "prepare", new)


def _decodes(change: Callable[[torch.Tensor], torch.Tensor]) -> Plant:
    def changed(metadata: AttentionMetadata, out: torch.Tensor) -> torch.Tensor:
        out[: metadata.num_decodes] = change(out[: metadata.num_decodes])
        return out

    return _attended(changed)


def _norm_eps(swap: Swap) -> None:
    def new(old: Any) -> Any:
        def init(self: Norm, spec: Any, *given: Any, **named: Any) -> None:
            old(self, dataclasses.replace(spec, eps=spec.eps * 100), *given, **named)

        return init

    swap(Norm, "__init__", new)


def _rope_theta(swap: Swap) -> None:
    def new(old: Any) -> Any:
        def init(self: RotaryEmbedding, spec: Any, *given: Any, **named: Any) -> None:
            old(self, dataclasses.replace(spec, theta=spec.theta * 1.1), *given, **named)

        return init

    swap(RotaryEmbedding, "__init__", new)


def _top_p_short(swap: Swap) -> None:
    """The token that reaches top_p is not kept."""

    def new(old: Any) -> Any:
        def keep_mask(scaled: torch.Tensor, group: Any, total: torch.Tensor | None = None) -> Any:
            keep = old(scaled, group, total)
            weights = filters.fixed_weights(scaled, scaled[:, :1])
            whole = weights.sum(-1, keepdim=True) if total is None else total
            keep &= (weights.cumsum(-1).double() < group.top_p * whole.double()) | (group.top_p >= 1.0)
            keep[:, 0] = True
            return keep

        return keep_mask

    swap(filters, "keep_mask", new)


def _top_p_tail(swap: Swap) -> None:
    """The tokens outside the nucleus are kept, and those inside are not."""

    def new(old: Any) -> Any:
        def keep_mask(scaled: torch.Tensor, group: Any, total: torch.Tensor | None = None) -> Any:
            keep = old(scaled, group, total)
            return keep if bool((group.top_p >= 1.0).all()) else ~keep | (keep.long().cumsum(-1) == keep.sum(-1, True))

        return keep_mask

    swap(filters, "keep_mask", new)


def _logits(change: Callable[[torch.Tensor], torch.Tensor]) -> Plant:
    def new(old: Any) -> Any:
        return lambda self, hidden: change(old(self, hidden))

    return lambda swap: swap(ParallelLMHead, "forward", new)


def _row_parallel(change: Callable[[RowParallelLinear, torch.Tensor], torch.Tensor]) -> Plant:
    def new(old: Any) -> Any:
        return lambda self, x: change(self, old(self, x))

    return lambda swap: swap(RowParallelLinear, "part", new)


def _no_part_in_decodes(self: RowParallelLinear, part: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(part) if len(part) == 1 else part


def _hits(change: Callable[[Any], Any]) -> Plant:
    def new(old: Any) -> Any:
        def match(self: PrefixCache, *given: Any) -> Any:
            blocks, place = old(self, *given)
            return change(blocks), place

        return match

    return lambda swap: swap(PrefixCache, "match", new)


def _first_block_twice(blocks: Any) -> Any:
    if len(blocks) > 1:
        blocks = blocks.copy()
        blocks[1] = blocks[0]
    return blocks


def _hits_without_parent(swap: Swap) -> None:
    """After the first block of a hit, a block is found by its own tokens, whatever precedes it."""
    known: dict[bytes, Any] = {}

    def inserting(old: Any) -> Any:
        def insert(self: PrefixCache, blocks: Any, place: Any, token_bytes: bytes) -> Any:
            size = self._block_bytes
            known.update({token_bytes[size * at : size * at + size]: one.copy() for at, one in enumerate(blocks)})
            return old(self, blocks, place, token_bytes)

        return insert

    def finding(old: Any) -> Any:
        def match(self: PrefixCache, salt: str, token_bytes: bytes, max_blocks: int) -> Any:
            blocks, place = old(self, salt, token_bytes, max_blocks)
            size = self._block_bytes
            while 0 < len(blocks) < max_blocks:
                found = known.get(token_bytes[size * len(blocks) : size * len(blocks) + size])
                if found is None:
                    break
                blocks = np.concatenate((blocks, found[None]))
            return blocks, place

        return match

    swap(PrefixCache, "insert", inserting)
    swap(PrefixCache, "match", finding)


def _copies_are_lost(swap: Swap) -> None:
    """A fork's last block is not copied from its donor's."""

    def new(old: Any) -> Any:
        def run(self: Any, plan: StepPlan) -> Any:
            return old(self, msgspec.structs.replace(plan, copies=plan.copies[:0]))

        return run

    swap(ModelRunner, "run", new)


def _stale_after_preemption(swap: Swap) -> None:
    """A resumed sequence writes into the first block of another row, and reads it."""

    def new(old: Any) -> Any:
        def admit(self: InputBatch, admitted: Any) -> None:
            for one in admitted:
                others = [row for row in np.flatnonzero(self.num_blocks) if row != one.row]
                if len(one.token_ids) > one.num_prompt_tokens and others:
                    one.block_ids[0] = self._block_table.host[0, others[0], 0]
            old(self, admitted)

        return admit

    swap(InputBatch, "_admit", new)


def _resumes_with_another_token(swap: Swap) -> None:
    def new(old: Any) -> Any:
        def preempt(self: SchedulerState, sequence: Any, *why: str) -> None:
            old(self, sequence, *why)
            if len(sequence.token_ids) - sequence.num_prompt_tokens > 1:
                sequence.token_ids = sequence.token_ids.copy()
                sequence.token_ids[-1] = (sequence.token_ids[-1] + 1) % 200

        return preempt

    swap(SchedulerState, "preempt", new)


PLANTS: dict[str, Plant] = {
    "rope theta": _rope_theta,
    "norm eps": _norm_eps,
    "scale of q": _attention(lambda _, q, k, v: (q * 1.02, k, v)),
    "heads rolled": _attention(lambda _, q, k, v: (q.roll(1, 1), k, v)),
    "positions of later chunks": _prompt_positions(_later_chunks, -1),
    "positions behind a hit": _prompt_positions(_behind_hits, 1),
    "positions of decodes": _decode_positions,
    "decodes attend otherwise": _decodes(lambda out: out * 1.02),
    "rank's part missing in decodes": _row_parallel(_no_part_in_decodes),
    "logits rolled": _logits(lambda logits: logits.roll(1, -1)),
    "hit's second block is the first": _hits(_first_block_twice),
    "hit without parent": _hits_without_parent,
    "copies are lost": _copies_are_lost,
    "stale after preemption": _stale_after_preemption,
    "resumes with another token": _resumes_with_another_token,
    "temperature ignored": _sampling(temperature=lambda t: 1.0 if t > 0 else t),
    "temperature doubled": _sampling(temperature=lambda t: 2 * t),
    "top_p ignored": _sampling(top_p=lambda _: 1.0),
    "top_p one short": _top_p_short,
    "top_p of the other side": _top_p_tail,
    "top_k one more": _sampling(top_k=lambda k: k + 1 if k > 0 else k),
    "min_p ignored": _sampling(min_p=lambda _: 0.0),
    "repetition penalty ignored": _sampling(repetition_penalty=lambda _: 1.0),
    "presence penalty turned": _sampling(presence_penalty=lambda p: -p),
    "seeds alike": _sampling(seed=lambda _: 7),
}
