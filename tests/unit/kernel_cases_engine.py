"""A whole engine on the GPU's data path, interpreted: every Triton kernel of a step, inputs made on the device.

Run in a process of its own with TRITON_INTERPRET=1.  Oracle: the same engine on plain PyTorch, its tokens.
"""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from unittest.mock import patch

from tests.tiny_models import make_checkpoint
from tests.unit.kernel_harness import AGREEMENT
from tp_engine import LLM, SamplingParams
from tp_engine.attention.triton_backend import TritonBackend
from tp_engine.kernels.decode_inputs import triton_decode_ops
from tp_engine.kernels.layer_ops import LayerOps, triton_ops
from tp_engine.sampling.state import SamplingState
from tp_engine.worker.captured_decodes import CapturedDecodes
from tp_engine.worker.graph_capture import GraphPlan
from tp_engine.worker.graph_recorder import RepeatingRecorder
from tp_engine.worker.input_batch import InputBatch

PROMPTS = [[5, 9, 13, 7], list(range(20, 50)), [7] * 17]
NUM_TOKENS = (6, 3, 9)
RECORDED = GraphPlan(sizes=(1, 2, 4), make_recorder=RepeatingRecorder)
SAMPLING = ({"temperature": 0}, {"temperature": 1.0, "seed": 3}, {"temperature": 0.8, "top_k": 5, "seed": 4})


def generate(folder: Path) -> list[list[int]]:
    """Chunked prefills beside decodes, and sequences that end at different steps."""
    options = {"max_model_len": 64, "num_gpu_blocks_override": 32, "max_num_batched_tokens": 16, "max_num_seqs": 4}
    params = [
        SamplingParams(max_tokens=count, ignore_eos=True, **sampling)
        for count, sampling in zip(NUM_TOKENS, SAMPLING, strict=True)
    ]
    with LLM(str(folder), device="cpu", dtype="float32", attention_backend="torch", **options) as llm:
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        llm.engine.check_integrity()
    return [output.outputs[0].token_ids for output in outputs]


def main() -> None:
    used: list[LayerOps] = []

    def kernels(device_type: str) -> LayerOps:
        used.append(triton_ops())
        return used[-1]

    with tempfile.TemporaryDirectory() as name:
        folder = make_checkpoint(Path(name) / "model", "qwen3", vocab_size=101)
        expected = generate(folder)
        with (
            patch("tp_engine.layers.context.layer_ops", kernels),
            patch("tp_engine.worker.decode_batch.decode_ops", lambda device_type: triton_decode_ops()),
            patch("tp_engine.worker.runner_parts.InputBatch", partial(InputBatch, decodes_on_device=True)),
            patch("tp_engine.worker.runner_parts.SamplingState", partial(SamplingState, has_tables=True)),
            patch("tp_engine.worker.worker.select_backend", lambda *_: TritonBackend()),
        ):
            found = generate(folder)
            with (
                patch("tp_engine.worker.worker.graph_plan", lambda *_: RECORDED),
                patch.object(CapturedDecodes, "run", autospec=True, side_effect=CapturedDecodes.run) as replays,
            ):
                recorded = generate(folder)
    assert used, "no layer took its operations from the table"
    assert found == expected, (found, expected)
    assert recorded == expected, (recorded, expected)
    assert replays.call_count >= 6
    assert [len(tokens) for tokens in found] == list(NUM_TOKENS)
    print(AGREEMENT)


if __name__ == "__main__":
    main()
