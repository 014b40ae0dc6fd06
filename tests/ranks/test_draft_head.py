"""Drafts of a head change no bit, and are those of a plain PyTorch head over the whole text."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.covers import covers
from tests.draft_heads import ReferenceHead, make_cycle, make_draft_head
from tests.ranks import draft_head_job, parity_job
from tests.ranks.test_parity import CACHED, PLAIN, TIGHT, make_prompts
from tests.ranks.test_speculation import SAMPLERS, VOCABULARY
from tests.ranks.warm_ranks import warm_ranks

pytestmark = pytest.mark.slow

# Those that need a tokenizer are left out.
WITHOUT_TEXT = [one for one in SAMPLERS if not one.keys() & {"regex", "bad_words"}][:10]
# Draft tokens are made while at most 12 rows decode.
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {**PLAIN, "max_num_seqs": 24},
    "chunks and preemption": {**TIGHT, "max_num_seqs": 24},
    "prefix hits": {**CACHED, "max_num_seqs": 24, "num_gpu_blocks_override": 90},
    "always right": {**PLAIN, "max_num_seqs": 24},
}


def make_pairs(folder: Path, checkpoint: Callable[..., Path]) -> dict[str, tuple[Path, Path]]:
    """For each setting a head and the model."""
    sizes: dict[str, Any] = {"vocab_size": VOCABULARY, "num_layers": 4, "tie": False}
    llama, qwen3 = checkpoint("llama", **sizes), checkpoint("qwen3", **sizes)
    window = checkpoint("mistral", sliding_window=20, **sizes)
    options: dict[str, Any] = {"vocab_size": VOCABULARY, "state_layers": (0, 1, 2)}
    return {
        "plain": (make_draft_head(folder / "window", **options, has_embedding=True), window),
        "chunks and preemption": (make_draft_head(folder / "llama", **options, draft_vocab_size=41), llama),
        "prefix hits": (make_draft_head(folder / "qwen3", **options, spelling="speculators", layer="qwen3"), qwen3),
        "always right": make_cycle(folder / "cycle", checkpoint("llama", **sizes, seed=1)),
    }


@pytest.mark.parametrize("world_size", [1, 2])
@covers("draft heads", lambda world_size: [(family, world_size) for family in ("mistral", "llama", "qwen3")])
def test_drafts_change_no_bit(world_size: int, checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """Oracle: tokens, ends and log-probabilities of the engine without speculation, bit for bit; and the head in plain
    PyTorch, whose drafts are the engine's but for near ties."""
    pairs, prompts = make_pairs(tmp_path, checkpoint), make_prompts(VOCABULARY, len(WITHOUT_TEXT))
    cases: list[dict[str, Any]] = []
    for name, options in SETTINGS.items():
        head, model = pairs[name]
        own = {"model": str(model), "tensor_parallel_size": world_size, "device": "cpu", **options}
        speculation = json.dumps(
            {"method": "eagle3", "model": str(head), "num_speculative_tokens": 3, "max_step_rows": 24}
        )
        params = [{"ignore_eos": True, **sampler} for sampler in WITHOUT_TEXT]
        cases += [
            {"options": {**own, "speculative_config": config}, "prompts": prompts, "params": params}
            for config in (None, speculation)
        ]
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    arguments = tmp_path / "cases.json", tmp_path / "out.json", draft_head_job.run
    warm_ranks(world_size, parity_job.main, *arguments)
    results = json.loads((tmp_path / "out.json").read_text())
    for name, plain, drafted in zip(SETTINGS, results[::2], results[1::2], strict=True):
        assert drafted["answers"] == plain["answers"], name
        assert drafted["logprobs"] == plain["logprobs"], name
        assert drafted["num_drafted"] > 0, name
        head, model = pairs[name]
        if name != "always right":
            reference = ReferenceHead(head, model)
            num_equal = sum(reference.drafts(tokens, len(drafts)) == drafts for tokens, drafts in drafted["drafts"])
            assert num_equal >= 0.98 * len(drafted["drafts"]) > 10, name
    assert results[3]["num_preemptions"] > 0 and results[5]["num_cached_tokens"] > 0
    right = results[2 * list(SETTINGS).index("always right") + 1]
    assert right["num_accepted"] >= 0.9 * right["num_drafted"] and right["num_accepted"] > right["num_runs"]
