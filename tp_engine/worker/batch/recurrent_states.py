"""The recurrent states of one rank: a slot for each row of the batch, with the states of all layers of the state group,
then for each draft row, then slots for snapshots (``sched/blocks/snapshots.py``), and one that padding rows may write
to.

::

    raw    (slots, slot_elements) float32     | row 0                                       | row 1 ...
                                              | layer 0: conv, recurrent | layer 1: ...     |
    a layer's views (kernels/gated_delta_net.py):    conv (slots, taps - 1, channels), recurrent (slots, VH, DK, DV)

A row's slot has its number, so nothing has to be allocated.  The first chunk of a prompt begins with zeros whatever the
slot holds, unless the plan has copied another slot there.  The one token too many that is computed
of a sequence that has ended changes a slot that nothing reads any more.

An update is not idempotent.  What runs a step twice, such as the comparison of a tape, keeps the rows' states before it
and puts them back in between.
"""

from collections.abc import Callable, Sequence

import torch

from tp_engine.kernels.recurrent import LayerStates
from tp_engine.layers.attention import Attention
from tp_engine.layers.recurrent import KeepsState
from tp_engine.model_config.kv_layout import STATE_BYTES, StateGroup
from tp_engine.models.language_model import LanguageModel
from tp_engine.plan import StepPlan
from tp_engine.worker.feature import RunnerFeature, RunnerHooks
from tp_engine.worker.memory.kv_cache import allocate_zeros, copy_rows


class RecurrentStatePool(RunnerFeature):
    """``num_slots`` zeroed slots of a state group on ``device``, and one more.

    Raises ``MemoryBudgetError`` if there is no memory for them.
    """

    def __init__(self, group: StateGroup, num_slots: int, device: torch.device) -> None:
        num_slots += 1
        raw = allocate_zeros(
            num_slots * group.slot_bytes,
            device,
            content=f"the states of {num_slots} rows, draft rows and snapshots",
            options="max_num_seqs, num_state_snapshots or gpu_memory_utilization",
        )
        self.raw = raw.view(torch.float32).view(num_slots, group.slot_bytes // STATE_BYTES)
        self._group = group

    def attach(self, hooks: RunnerHooks) -> None:
        hooks.apply.append(self.apply)
        hooks.take_model.append(self.take_model)
        hooks.keep_rows.append(self.keep_rows)
        hooks.memory.append(self.memory)

    def bind(self, layers: Sequence[KeepsState]) -> None:
        """Give each layer the views of its states."""
        first = 0
        for (_, kind), layer in zip(self._group.kinds, layers, strict=True):
            assert layer.kind == kind, (layer.kind, kind)
            middle, end = first + kind.num_conv_elements, first + kind.num_elements
            conv = self.raw[:, first:middle].view(len(self.raw), kind.taps - 1, kind.num_channels)
            matrices = (len(self.raw), kind.num_value_heads, kind.key_dim, kind.value_dim)
            layer.bind_states(LayerStates(conv, self.raw[:, middle:end].view(matrices)))
            first = end

    def take_model(self, model: LanguageModel) -> list[Attention]:
        self.bind(model.state_layers)
        return []

    def apply(self, plan: StepPlan) -> None:
        """Copy slots by the plan's pairs of source and target; all are read before any is written."""
        if len(plan.state_copies):
            copy_rows(self.raw, plan.state_copies)

    def memory(self) -> tuple[torch.Tensor, ...]:
        return (self.raw,)

    def keep_rows(self, rows: torch.Tensor) -> Callable[[], None]:
        used = rows[rows >= 0].long()
        kept = self.raw.index_select(0, used)

        def put_back() -> None:
            self.raw.index_copy_(0, used, kept)

        return put_back
