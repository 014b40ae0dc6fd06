"""Digests of each step's inputs, which the ranks compare (``--debug-compare-rank-inputs``): equal plans lead to equal
inputs."""

from collections.abc import Callable
from typing import TypeAlias

import xxhash

from tp_engine.worker.batch.step_inputs import StepInputs
from tp_engine.worker.feature import RunnerFeature, RunnerHooks
from tp_engine.worker.results.readback import PendingStep

NoteInputs: TypeAlias = Callable[[int, int], None]
"""Receives the digest of each step's inputs: ``note_inputs(step_id, digest)``."""


class InputDigests(RunnerFeature):
    """Tells ``note`` the digest of each step, which waits for the device."""

    def __init__(self, note: NoteInputs) -> None:
        self._note = note

    def attach(self, hooks: RunnerHooks) -> None:
        hooks.on_inputs.append(self.on_inputs)

    def on_inputs(self, step: PendingStep, inputs: StepInputs) -> None:
        self._note(step.plan.step_id, digest_inputs(inputs))


def digest_inputs(inputs: StepInputs) -> int:
    """Return 64 bits over token ids, positions, slots, block tables and lengths; waits for the device."""
    groups, layout = inputs.attention, inputs.layout
    digest = xxhash.xxh3_64()
    on_device = [inputs.input_ids, inputs.positions, groups[0].seq_lens]
    for group in groups:
        on_device += [group.slot_mapping, group.block_table]
    for array in (*(tensor.cpu().numpy() for tensor in on_device), layout.query_lens, layout.sampled_rows):
        digest.update(str(array.shape).encode())
        digest.update(array.tobytes())
    return digest.intdigest()
