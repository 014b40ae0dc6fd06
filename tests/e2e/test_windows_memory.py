"""A model with Gemma 3's layers serves a long request in a quarter of the KV memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tp_engine import LLM, SamplingParams
from tp_engine.errors import RequestError
from tp_engine.model_config import kv_layout

pytestmark = pytest.mark.slow

NUM_LAYERS, WINDOW, MAX_MODEL_LEN, BLOCK_SIZE = 6, 1024, 32_768, 16
LAYERS_TIMES_BLOCKS = NUM_LAYERS * MAX_MODEL_LEN // BLOCK_SIZE  # for one request, if all layers keep all tokens
PROMPT = np.random.default_rng(0).integers(3, 200, 32_700).tolist()


def serve(folder: Path, num_blocks: int) -> tuple[Any, Any]:
    """Tokens and log-probabilities of the long prompt, from a pool of ``num_blocks``."""
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "block_size": BLOCK_SIZE, "max_num_seqs": 2}
    options |= {"max_model_len": MAX_MODEL_LEN, "max_num_batched_tokens": 1024, "num_gpu_blocks_override": num_blocks}
    with LLM(str(folder), **options) as llm:
        sample = llm.generate([PROMPT], SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, logprobs=1))
    output = sample[0].outputs[0]
    return output.token_ids, output.logprobs


def test_a_quarter_of_the_kv_memory(checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Five layers of six see 1,024 tokens.  Oracle, bit by bit: one group of all layers, which keeps all tokens in four
    times the bytes; in as few bytes that group refuses the prompt."""
    shape = {"hidden_size": 32, "num_heads": 2, "num_kv_heads": 1, "head_dim": 16, "intermediate_size": 32}
    folder = checkpoint("gemma3", sliding_window=WINDOW, max_position_embeddings=MAX_MODEL_LEN, **shape)
    found = serve(folder, LAYERS_TIMES_BLOCKS // 4)  # a block holds the tokens of one layer
    monkeypatch.setattr(kv_layout, "MAX_GROUPS", 1)
    assert found == serve(folder, LAYERS_TIMES_BLOCKS // NUM_LAYERS)  # a block holds those of all layers
    with pytest.raises(RequestError, match="maximum context length is 8193 tokens"):
        serve(folder, LAYERS_TIMES_BLOCKS // NUM_LAYERS // 4)
