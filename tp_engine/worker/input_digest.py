"""A digest of a step's inputs, to be compared among the ranks: equal plans must lead to equal inputs."""

from __future__ import annotations

import xxhash

from tp_engine.worker.step_inputs import StepInputs


def digest_inputs(inputs: StepInputs) -> int:
    """64 bits over token ids, positions, slots, block tables and lengths; waits for the device."""
    attention, layout = inputs.attention, inputs.layout
    digest = xxhash.xxh3_64()
    on_device = (inputs.input_ids, inputs.positions, attention.slot_mapping, attention.block_table, attention.seq_lens)
    for array in (*(tensor.cpu().numpy() for tensor in on_device), layout.query_lens, layout.sampled_rows):
        digest.update(str(array.shape).encode())
        digest.update(array.tobytes())
    return digest.intdigest()
