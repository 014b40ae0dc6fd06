"""The demo model with int8 weights solves its tasks, on one rank and on two."""

from __future__ import annotations

from typing import Any

import pytest

from tp_engine import LLM, SamplingParams

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("warm_children")]

QUESTIONS = {"12+34=": "46", "reverse: 3 1 4": "4 1 3", "sort: 3 1 2": "1 2 3", "copy: hello world": "hello world"}


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_demo_model_answers(num_ranks: int) -> None:
    """Oracle: the right answers."""
    options: dict[str, Any] = {
        "max_num_seqs": 8,
        "num_gpu_blocks_override": 64,
        "max_model_len": 128,
        "max_num_batched_tokens": 256,
    }
    with LLM(device="cpu", quantization="int8", tensor_parallel_size=num_ranks, **options) as llm:
        chats = [[{"role": "user", "content": text}] for text in QUESTIONS]
        outputs = llm.chat(chats, SamplingParams(temperature=0, max_tokens=16), use_tqdm=False)
        assert [output.outputs[0].text for output in outputs] == list(QUESTIONS.values())
