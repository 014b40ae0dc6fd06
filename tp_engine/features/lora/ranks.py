"""Adapters on one rank: its share of each loaded one on the host, the slots on the device, and which rows use them.

::

    order     read: file -> this rank's share of each layer's pair, on the host       may fail, and changes nothing
              remember: it has a number, its generation
    plan      lora.loads:    from the host into a slot                                cannot fail
              lora.rows:     a row uses a slot until the next sequence is admitted there
              lora.drops:    the share on the host is freed
    step      tokens of rows with an adapter are grouped by slot, once for all layers
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch

from tp_engine.features.lora.feature import DROPS, LOADS, ROWS
from tp_engine.layers.lora import LocalPair, LoRALayerSlots, StepAdapters, adapting, group_step
from tp_engine.model_config.names import CheckpointNames
from tp_engine.plan import IntArray, StepPlan
from tp_engine.system.units import MIB
from tp_engine.weights.lora import check_all_used, read_adapter
from tp_engine.worker.batch.step_inputs import BatchLayout, StepInputs
from tp_engine.worker.feature import RunnerFeature, RunnerHooks
from tp_engine.worker.features import RankFeature, RankParts, RunnerParts
from tp_engine.worker.model_runner import ModelRunner
from tp_engine.worker.orders import Prepare, Prepared
from tp_engine.worker.results.readback import PendingStep
from tp_engine.worker.trial_steps import Variation

# The largest file of an adapter, over the bytes of all slots of a rank: 8 ranks, each with its part in 16 bits of what
# the file has in 32, and a slot for one adapter alone.
_MAX_TIMES = 16

HostAdapter: TypeAlias = tuple[LocalPair | None, ...]
"""A rank's share of an adapter, layer by layer; None for a layer that it leaves alone."""


def make(parts: RankParts) -> Iterator[AdaptersOfRank]:
    """Make a rank's half if adapters are served."""
    if parts.effective.adapters is not None:
        yield AdaptersOfRank(
            parts.effective.adapters.max_rank, sum(one.num_bytes for one in parts.model.adapted_layers)
        )


class AdaptersOfRank(RankFeature):
    """The slots of adapters up to ``max_rank``, which take ``num_bytes``."""

    def __init__(self, max_rank: int, num_bytes: int) -> None:
        self._max_rank, self._num_bytes = max_rank, num_bytes

    def reserved(self) -> Counter[str]:
        return Counter(adapters=self._num_bytes)

    def runner(self, parts: RunnerParts) -> Iterator[RankAdapters]:
        effective = parts.rank.effective
        yield RankAdapters(
            parts.rank.model.adapted_layers,
            effective.model.names,
            max_rank=self._max_rank,
            num_rows=effective.config.max_num_seqs + effective.num_spare_rows,
            device=parts.rank.device,
        )

    def variations(self) -> tuple[Variation]:
        return (with_adapters,)

    def orders(self, runner: ModelRunner) -> dict[str, Prepare]:
        return {"load_lora_adapter": lambda given: load_lora_adapter(runner.required(RankAdapters), **given)}


def with_adapters(plan: StepPlan) -> StepPlan:
    """Return a trial step whose rows have an adapter, that of a slot which is still empty."""
    rows = np.array([(admission.row, 1) for admission in plan.admitted], dtype=np.int32)
    return plan.extended({ROWS.name: rows})


def load_lora_adapter(adapters: RankAdapters, *, path: str, generation: int) -> Prepared:
    """Prepare the order to load the adapter in the folder ``path``: this rank can follow if it can read its share.

    ``ConfigError`` or ``WeightError`` if the adapter cannot be served.
    """
    shares = adapters.read(Path(path).expanduser())
    return Prepared(lambda: {"num_bytes": adapters.remember(generation, shares)})


class RankAdapters(RunnerFeature):
    """The adapters of a batch of ``num_rows`` rows, draft rows included; ``layers`` are the model's, in order."""

    def __init__(
        self,
        layers: Sequence[LoRALayerSlots],
        names: CheckpointNames,
        *,
        max_rank: int,
        num_rows: int,
        device: torch.device,
    ) -> None:
        self._layers, self._names, self._max_rank, self._device = layers, names, max_rank, device
        self._kept: dict[int, HostAdapter] = {}
        self._slots = np.full(num_rows, -1, dtype=np.int32)  # of each row, from 0 on; -1: none
        self._last: tuple[int, StepAdapters | None] = (0, None)  # of decodes: epoch and grouping

    def attach(self, hooks: RunnerHooks) -> None:
        hooks.apply.append(self.apply)
        hooks.mirror_rows.append(self.mirror_rows)
        hooks.must_launch.append(self.must_launch)
        hooks.around_model.append(self.around_model)

    def read(self, folder: Path) -> HostAdapter:
        """Return this rank's share of the adapter in ``folder``.  ``ConfigError`` or ``WeightError`` if there can be
        none."""
        pairs = read_adapter(folder, self._max_rank, _MAX_TIMES * sum(layer.num_bytes for layer in self._layers) + MIB)
        usual = {spelled: name for name in self._modules() for spelled in self._names.spell(name)}
        names = {usual[stored]: stored for stored in pairs if stored in usual}
        used: set[str] = set()
        shares = tuple(layer.take(pairs, used, names) for layer in self._layers)
        check_all_used(folder, pairs, used)
        return shares

    def remember(self, generation: int, adapter: HostAdapter) -> int:
        """Remember what ``read`` returned; returns its bytes on the host."""
        self._kept[generation] = adapter
        return sum(pair.num_bytes for pair in adapter if pair is not None)

    def apply(self, plan: StepPlan) -> None:
        """Apply the plan's loads, admissions and drops."""
        for generation, slot in LOADS.of(plan).tolist():
            for layer, pair in zip(self._layers, self._kept[generation], strict=True):
                layer.put(slot - 1, pair)
        for generation in DROPS.of(plan).tolist():
            del self._kept[generation]
        if plan.admitted:
            self._slots[[admission.row for admission in plan.admitted]] = -1
            rows, slots = ROWS.of(plan).T
            self._slots[rows] = slots - 1

    def mirror_rows(self, spare_rows: IntArray, rows: IntArray) -> None:
        """Let each spare row have its row's adapter in this step."""
        self._slots[spare_rows] = self._slots[rows]

    def must_launch(self, plan: StepPlan) -> bool:
        """Return whether a row of this step has an adapter."""
        slots = self._slots
        return bool((slots[plan.decode_rows] >= 0).any() or (slots[plan.prefill_rows] >= 0).any())

    def around_model(self, step: PendingStep, inputs: StepInputs) -> AbstractContextManager[object]:
        if not self.must_launch(step.plan):
            return nullcontext()
        return adapting(self.group(inputs.layout, step.plan.rows_epoch))

    def group(self, layout: BatchLayout, epoch: int) -> StepAdapters:
        """Return the rows of a step with adapters; ``epoch`` is ``StepPlan.rows_epoch``."""
        if layout.is_decode_only and epoch and epoch == self._last[0] and self._last[1] is not None:
            return self._last[1]
        of_request = self._slots[layout.rows]
        if layout.is_decode_only:
            step = group_step(of_request, None, self._device)
            self._last = epoch, step
            return step
        of_wanted = of_request[layout.samples] if layout.samples.any() else of_request[:1]  # as ``layout.wanted``
        return group_step(of_request.repeat(layout.query_lens), of_wanted, self._device)

    def _modules(self) -> list[str]:
        return [name for layer in self._layers for name in layer.modules]
