"""Drafts of a Gemma 4 assistant change no bit, and are those of transformers' assistant over the whole text."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.assistants import ReferenceAssistant, make_assistant
from tests.covers import covers
from tests.ranks import draft_head_job, parity_job
from tests.ranks.test_draft_head import SETTINGS, WITHOUT_TEXT
from tests.ranks.test_parity import make_prompts
from tests.ranks.test_speculation import VOCABULARY
from tests.ranks.warm_ranks import warm_ranks

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("world_size", "name", "family"),
    [(1, "plain", "gemma4"), (2, "prefix hits", "gemma4-experts"), (4, "chunks and preemption", "gemma4")],
)
@covers("draft heads", lambda family, world_size: [(family, world_size)])
def test_drafts_change_no_bit(
    world_size: int, name: str, family: str, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """Oracle: tokens, ends and log-probabilities of the engine without speculation, bit for bit, recorded and launched;
    and transformers' assistant, whose drafts are the engine's but for near ties."""
    target = checkpoint(family, vocab_size=VOCABULARY)
    assistant = make_assistant(tmp_path / "assistant", target)
    params = [{"ignore_eos": True, **sampler} for sampler in WITHOUT_TEXT]
    speculation = {"method": "mtp", "model": str(assistant), "num_speculative_tokens": 3, "max_step_rows": 24}
    own = {"model": str(target), "tensor_parallel_size": world_size, "device": "cpu", **SETTINGS[name]}
    own["num_gpu_blocks_override"] = 160  # of several groups
    ways: list[dict[str, Any]] = [{}, {"speculative_config": speculation}]
    ways += [ways[1] | {"enforce_eager": True}] if world_size == 1 else []
    cases = [
        {"options": own | more, "prompts": make_prompts(VOCABULARY, len(params)), "params": params} for more in ways
    ]
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    arguments = tmp_path / "cases.json", tmp_path / "out.json", draft_head_job.run
    warm_ranks(world_size, parity_job.main, *arguments)
    plain, *drafted = json.loads((tmp_path / "out.json").read_text())
    for found in drafted:
        assert found["answers"] == plain["answers"] and found["logprobs"] == plain["logprobs"]
        assert found["drafts"] == drafted[0]["drafts"] and found["num_drafted"] > 0
    reference, seen = ReferenceAssistant(assistant, target), drafted[0]["drafts"][:150]
    num_equal = sum(reference.drafts(tokens, len(drafts)) == drafts for tokens, drafts in seen)
    assert num_equal >= 0.98 * len(seen) > 10, (num_equal, len(seen))
