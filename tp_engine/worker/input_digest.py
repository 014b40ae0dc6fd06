"""A digest of a step's inputs, to be compared among the ranks: equal plans must lead to equal inputs."""

from __future__ import annotations

import xxhash

from tp_engine.worker.step_inputs import StepInputs


def digest_inputs(inputs: StepInputs) -> int:
    """64 bits over token ids, positions, slots, block tables and lengths; waits for the device."""
    groups, layout = inputs.attention, inputs.layout
    digest = xxhash.xxh3_64()
    on_device = [inputs.input_ids, inputs.positions, groups[0].seq_lens]
    for group in groups:
        on_device += [group.slot_mapping, group.block_table]
    for array in (*(tensor.cpu().numpy() for tensor in on_device), layout.query_lens, layout.sampled_rows):
        digest.update(str(array.shape).encode())
        digest.update(array.tobytes())
    return digest.intdigest()
