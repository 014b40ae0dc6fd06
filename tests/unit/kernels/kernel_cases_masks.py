"""A row with a grammar beside a plain row, on recorded decode steps, interpreted: a recording holds no masks.

Run in a process of its own with TRITON_INTERPRET=1.  Oracle: the same engine on plain PyTorch, its tokens.
"""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.repeating_recorder import RepeatingRecorder
from tests.text_tokenizers import byte_level_tokenizer
from tests.tiny_models import make_checkpoint
from tests.unit.kernels.kernel_harness import AGREEMENT
from tp_engine import LLM, SamplingParams, StructuredOutputsParams
from tp_engine.attention.triton_backend import TritonBackend
from tp_engine.sampling.state import SamplingState
from tp_engine.worker.graphs.captured_steps import CapturedSteps
from tp_engine.worker.graphs.step_runner import GraphPlan

RECORDED = GraphPlan(sizes=(1, 2), make_recorder=RepeatingRecorder)
PARAMS = [
    SamplingParams(temperature=0, max_tokens=6, structured_outputs=StructuredOutputsParams(regex="[0-9]{4}")),
    SamplingParams(temperature=0, max_tokens=7, ignore_eos=True),
]


def generate(folder: Path) -> list[list[int]]:
    options: dict[str, Any] = {
        "max_model_len": 32,
        "num_gpu_blocks_override": 8,
        "max_num_batched_tokens": 16,
        "max_num_seqs": 2,
    }
    with LLM(str(folder), device="cpu", dtype="float32", attention_backend="torch", **options) as llm:
        return [output.outputs[0].token_ids for output in llm.generate([[5, 9], [7]], PARAMS, use_tqdm=False)]


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = make_checkpoint(Path(name) / "model", num_layers=1, hidden_size=32, num_heads=2, num_kv_heads=1,
                                 vocab_size=384, eos_token_id=1)  # fmt: skip
        byte_level_tokenizer().save_pretrained(folder)
        expected = generate(folder)
        with (
            patch("tp_engine.worker.worker.SamplingState", partial(SamplingState, has_tables=True)),
            patch("tp_engine.worker.worker.select_backend", lambda *_: TritonBackend()),
            patch("tp_engine.worker.worker.graph_plan", lambda *_: RECORDED),
            patch.object(CapturedSteps, "run", autospec=True, side_effect=CapturedSteps.run) as run,
        ):
            recorded = generate(folder)
    assert run.call_count >= 4, run.call_count
    assert recorded == expected, (recorded, expected)
    digits = byte_level_tokenizer().decode(expected[0])
    assert len(digits) == 4 and digits.isdigit(), digits
    print(AGREEMENT)


if __name__ == "__main__":
    main()
