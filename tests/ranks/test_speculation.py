"""Draft tokens change no bit, whatever the source of the draft tokens.  Oracle: the same job without speculation."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.covers import covers
from tests.ranks import parity_job, speculation_job
from tests.ranks.speculation_job import KINDS
from tests.ranks.test_parity import CACHED, PLAIN, TIGHT, make_prompts
from tests.ranks.warm_ranks import warm_ranks
from tests.text_tokenizers import byte_level_tokenizer

pytestmark = pytest.mark.slow

VOCABULARY = 263
SPECULATION = '{"method": "suffix", "num_speculative_tokens": 5, "prompt_lookup_min": 1, "max_step_rows": 40}'
ROWS = {"max_num_seqs": 40, "max_num_batched_tokens": 44}
SETTINGS = {
    "plain": {**PLAIN, **ROWS},
    "chunks and preemption": {**TIGHT, **ROWS},
    "prefix hits": {**CACHED, **ROWS, "num_gpu_blocks_override": 90},
}
# A family with recurrent states runs in each setting once.
SETTINGS_OF = {
    ("qwen3", 1): [*SETTINGS],
    ("qwen3", 2): ["chunks and preemption", "prefix hits"],
    ("qwen3.5", 1): ["plain"],
    ("qwen3.5", 2): ["chunks and preemption", "prefix hits"],
    ("qwen3-next", 4): ["chunks and preemption"],
    ("nemotron-h", 2): ["chunks and preemption", "prefix hits"],
    ("lfm2", 2): ["chunks and preemption", "prefix hits"],
}
SAMPLERS: list[dict[str, Any]] = [
    {"temperature": 0.0, "max_tokens": 40},
    {"temperature": 0.0, "max_tokens": 30, "logprobs": 2},
    {"temperature": 0.8, "seed": 1, "max_tokens": 30},
    {"temperature": 0.7, "seed": 2, "top_k": 5, "max_tokens": 30, "logprobs": 0},
    {"temperature": 0.6, "seed": 3, "top_p": 0.7, "max_tokens": 30, "logprobs": 3},
    {"temperature": 0.5, "seed": 4, "min_p": 0.2, "max_tokens": 30, "n": 2},
    {"temperature": 0.3, "seed": 5, "logit_bias": {"5": 4.0, "9": 3.0}, "max_tokens": 30},
    {"temperature": 0.9, "seed": 6, "min_tokens": 9, "stop_token_ids": [3, 8, 13, 21, 34, 55], "max_tokens": 30},
    {"temperature": 0.4, "seed": 7, "repetition_penalty": 1.2, "max_tokens": 40},
    {"temperature": 0.0, "frequency_penalty": 0.02, "presence_penalty": -0.3, "max_tokens": 40, "logprobs": 1},
    {"temperature": 0.4, "seed": 8, "allowed_token_ids": [4, 5, 6, 7], "max_tokens": 30, "logprobs": 1},
    {"temperature": 0.0, "regex": r"(NAME:[A-Z]{2,4};AGE:[0-9]{1,2}\.)+", "max_tokens": 40, "logprobs": 1},
    {"temperature": 0.9, "seed": 9, "regex": r"(NAME:[A-Z]{2,4};AGE:[0-9]{1,2}\.)+", "max_tokens": 40},
    {"temperature": 0.9, "seed": 10, "regex": r"ID=[0-9A-F]{4};(YES|NO);END", "max_tokens": 40, "n": 2},
    {"temperature": 0.9, "seed": 11, "regex": r"[A-Z]{1,9}=[0-9]{2,9}", "max_tokens": 20, "ignore_eos": False},
    {"temperature": 0.2, "seed": 12, "bad_words": ["A", "F", "QR", "!"], "max_tokens": 30, "logprobs": 0},
    {"temperature": 0.6, "seed": 13, "bad_words": ["7", "AB"], "regex": r"(X[0-9]Y[A-C]{2}Z)+", "max_tokens": 30},
]


@pytest.mark.parametrize(("family", "world_size"), SETTINGS_OF)
@covers("text drafts", lambda family, world_size: [(family, world_size)])
@covers("grammars", lambda family, world_size: [(family, world_size)])
def test_no_draft_token_changes_a_bit(
    family: str, world_size: int, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """Oracle: tokens, ends and log-probabilities of the engine without speculation, bit for bit, for all samplers; of
    layers that attend, with windows too, and of those with recurrent states."""
    if family == "qwen3":
        window = checkpoint("mistral", num_kv_heads=2, vocab_size=VOCABULARY, sliding_window=20)
        full = checkpoint("qwen3", num_kv_heads=2, vocab_size=VOCABULARY, head_dim=16)
    else:
        window = full = checkpoint(family, vocab_size=VOCABULARY)
    settings = SETTINGS_OF[family, world_size]
    for folder in (window, full):
        byte_level_tokenizer().save_pretrained(folder)
    prompts = make_prompts(VOCABULARY, len(SAMPLERS))
    cases = [
        {
            "options": {
                **SETTINGS[name],
                "model": str(folder),
                "tensor_parallel_size": world_size,
                "device": "cpu",
                "speculative_config": speculation,
            },
            "prompts": prompts,
            "params": [{"ignore_eos": True, **sampler} for sampler in SAMPLERS],
            "vocab_size": VOCABULARY,
        }
        for name in settings
        for folder in [window if name == "plain" else full]
        for speculation in (None, SPECULATION)
    ]
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    arguments = tmp_path / "cases.json", tmp_path / "out.json", speculation_job.run_kinds
    warm_ranks(world_size, parity_job.main, *arguments)
    results = json.loads((tmp_path / "out.json").read_text())
    for plain, drafted in zip(results[::2], results[1::2], strict=True):
        for kind in KINDS:
            assert drafted[kind]["answers"] == plain["none"]["answers"], kind
            assert drafted[kind]["logprobs"] == plain["none"]["logprobs"], kind
            assert drafted[kind]["num_drafted"] > 0, kind
        assert drafted["wrong"]["accepted_by"]["grammar"] > 10
        assert drafted["own again"]["num_accepted"] > drafted["own"]["num_accepted"]
        assert drafted["right"]["num_accepted"] > drafted["wrong"]["num_accepted"]
    for name, drafted in zip(settings, results[1::2], strict=True):
        assert name != "chunks and preemption" or drafted["right"]["num_preemptions"] > 0
        assert name != "prefix hits" or drafted["right"]["num_cached_tokens"] > 0
