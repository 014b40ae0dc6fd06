"""Drafts of a model's own head change no bit, and are those of transformers' head over the whole text."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.covers import covers
from tests.draft_heads import make_draft_head
from tests.mtp_heads import FAMILIES, ReferenceMtp, make_mtp, make_mtp_cycle
from tests.quantised.checkpoints import compress
from tests.ranks import draft_head_job, parity_job
from tests.ranks.test_draft_head import SETTINGS, WITHOUT_TEXT
from tests.ranks.test_parity import make_prompts
from tests.ranks.test_speculation import VOCABULARY
from tests.ranks.warm_ranks import warm_ranks
from tp_engine import LLM, SamplingParams
from tp_engine.errors import RequestError
from tp_engine.features.speculation.feature import COUNTERS
from tp_engine.models.draft_head import DraftHead
from tp_engine.models.mtp_head import MtpHead

pytestmark = pytest.mark.slow

# Each family in one of the settings on so many ranks; hybrids in all of them.
CASES = {
    1: [
        ("qwen3.5", "plain"),
        ("qwen3.5", "chunks and preemption"),
        ("qwen3-next", "prefix hits"),
        ("deepseek-v3", "plain"),
        ("glm4-moe", "chunks and preemption"),
        ("ernie4.5-moe", "prefix hits"),
    ],
    2: [
        ("qwen3.5-moe", "plain"),
        ("qwen3-next", "chunks and preemption"),
        ("qwen3.5", "prefix hits"),
        ("glm4-moe-lite", "chunks and preemption"),
        ("deepseek-v3.2", "prefix hits"),
    ],
    4: [("qwen3-next", "chunks and preemption"), ("glm4-moe", "plain")],
}


@pytest.mark.parametrize("world_size", CASES)
@covers("draft heads", lambda world_size: [(family, world_size) for family, _ in CASES[world_size]])
def test_drafts_change_no_bit(world_size: int, checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """Oracle: tokens, ends and log-probabilities of the engine without speculation, bit for bit; and transformers'
    head, whose drafts are the engine's but for near ties."""
    prompts, made = make_prompts(VOCABULARY, len(WITHOUT_TEXT)), dict[str, Path]()
    cases: list[dict[str, Any]] = []
    for family, name in CASES[world_size]:
        if family not in made:
            target = checkpoint(family, vocab_size=VOCABULARY, **FAMILIES[family])
            made[family] = make_mtp(tmp_path / family, target)
        own = {"model": str(made[family]), "tensor_parallel_size": world_size, "device": "cpu", **SETTINGS[name]}
        speculation = json.dumps({"method": "mtp", "num_speculative_tokens": 3, "max_step_rows": 24})
        params = [{"ignore_eos": True, **sampler} for sampler in WITHOUT_TEXT]
        cases += [
            {"options": {**own, "speculative_config": config}, "prompts": prompts, "params": params}
            for config in (None, speculation)
        ]
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    arguments = tmp_path / "cases.json", tmp_path / "out.json", draft_head_job.run
    warm_ranks(world_size, parity_job.main, *arguments)
    results = json.loads((tmp_path / "out.json").read_text())
    for (family, name), plain, drafted in zip(CASES[world_size], results[::2], results[1::2], strict=True):
        assert drafted["answers"] == plain["answers"], (family, name)
        assert drafted["logprobs"] == plain["logprobs"], (family, name)
        assert drafted["num_drafted"] > 0, (family, name)
        reference = ReferenceMtp(made[family])
        seen = drafted["drafts"][:200]
        num_equal = sum(reference.drafts(tokens, len(drafts)) == drafts for tokens, drafts in seen)
        assert num_equal >= 0.98 * len(seen) > 10, (family, name, num_equal, len(seen))


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_head_that_knows_all_is_always_right(
    world_size: int, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """Oracle: an engine without speculation; and a head with the model's own logits, whose drafts are what the model
    samples at any temperature, because both have the same noise."""
    model = make_mtp_cycle(tmp_path / "cycle", checkpoint("qwen3.5", tie=False, **FAMILIES["qwen3.5"]))
    params = [{"ignore_eos": True, "max_tokens": 40, "temperature": one, "seed": 3} for one in (0.0, 0.7, 1.0, 1.5)]
    options = {"model": str(model), "tensor_parallel_size": world_size, "device": "cpu", **SETTINGS["plain"]}
    speculation = json.dumps({"method": "mtp", "num_speculative_tokens": 4, "max_step_rows": 24})
    cases: list[dict[str, Any]] = [
        {"options": {**options, "speculative_config": config}, "prompts": make_prompts(203, 4), "params": params}
        for config in (None, speculation)
    ]
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    arguments = tmp_path / "cases.json", tmp_path / "out.json", draft_head_job.run
    warm_ranks(world_size, parity_job.main, *arguments)
    plain, drafted = json.loads((tmp_path / "out.json").read_text())
    assert drafted["answers"] == plain["answers"]
    tokens = plain["answers"][2][0]
    assert sum((second - first) % 203 != 1 for first, second in pairwise(tokens)) > 10
    assert drafted["num_accepted"] >= 0.97 * drafted["num_drafted"] > 90


@pytest.mark.parametrize("kind", ["qwen3.5", "deepseek-v3", "eagle3"])
def test_recorded_passes_give_the_drafts_of_launched_ones(
    kind: str, checkpoint: Callable[..., Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Oracle: the engine that records nothing, bit for bit, drafts too; tapes hold all passes of the head."""
    speculation = {"method": "mtp", "num_speculative_tokens": 3, "max_step_rows": 24}
    if kind == "eagle3":
        model = checkpoint("llama", vocab_size=VOCABULARY, num_layers=4, tie=False)
        head = make_draft_head(tmp_path / "head", vocab_size=VOCABULARY, state_layers=(0, 1, 2))
        speculation |= {"method": "eagle3", "model": str(head)}
    else:
        model = make_mtp(tmp_path / kind, checkpoint(kind, vocab_size=VOCABULARY, **FAMILIES[kind]))
    # Greedy drafts are recorded for two rows before steps of more rows are, whose tokens must outlive them.
    params: list[dict[str, Any]] = [{"ignore_eos": True, "temperature": 0.0, "max_tokens": 24} for _ in range(2)]
    params.append({"ignore_eos": True, "temperature": 0.8, "seed": 5, "max_tokens": 5})
    case = {"prompts": make_prompts(VOCABULARY, len(params)), "params": params}
    columns_of, results, num_calls = DraftHead.columns_of, list[dict[str, Any]](), list[int]()
    for is_eager in (True, False):
        own = {"device": "cpu", "enforce_eager": is_eager, "speculative_config": speculation, **SETTINGS["plain"]}
        with LLM(str(model), **own) as llm, patch.object(DraftHead, "columns_of", autospec=True) as columns:
            columns.side_effect = columns_of
            results.append(draft_head_job.run(llm, case))
            num_calls.append(columns.call_count)
    assert results[0] == results[1] and len(results[0]["drafts"]) > 10
    assert num_calls[0] > 2 * num_calls[1] and "not recorded" not in caplog.text


@pytest.mark.parametrize("kind", ["qwen3.5", "deepseek-v3"])
def test_a_step_without_drafts_ends_behind_the_heads_attention(
    kind: str, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """By hand: of more rows than may have draft tokens no output of the head is asked; K/V are stored nevertheless, by
    which the row that is left alone gets drafts of transformers' head."""
    model = make_mtp(tmp_path / kind, checkpoint(kind, vocab_size=VOCABULARY, **FAMILIES[kind]))
    speculation = {"method": "mtp", "num_speculative_tokens": 3, "max_step_rows": 4}
    lengths = (24, 8, 8, 8, 8)
    params = [{"ignore_eos": True, "temperature": 0.0, "max_tokens": one} for one in lengths]
    asked, forward = list[int](), MtpHead.forward

    def noted(self: MtpHead, input_ids: torch.Tensor, *given: Any) -> Any:
        asked.append(len(input_ids))
        return forward(self, input_ids, *given)

    options = {"device": "cpu", "enforce_eager": True, "speculative_config": speculation, **SETTINGS["plain"]}
    with LLM(str(model), **options) as llm, patch.object(MtpHead, "forward", noted):
        case = {"prompts": make_prompts(VOCABULARY, len(params)), "params": params}
        seen = draft_head_job.run(llm, case)["drafts"]
    assert asked and max(asked) <= 4
    reference = ReferenceMtp(model)
    assert len(seen) > 3 and all(reference.drafts(tokens, len(drafts)) == drafts for tokens, drafts in seen)


@covers("new weights", lambda: [("qwen3.5", 1)])
def test_new_weights_are_the_heads_too(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """Oracle: an engine that starts with the new weights; drafts are always right, so the head is theirs, after a sleep
    too.  A checkpoint without the head is refused, and nothing changes."""
    target = checkpoint("qwen3.5", tie=False, **FAMILIES["qwen3.5"])
    first, second = (make_mtp_cycle(tmp_path / f"cycle {seed}", target, seed=seed) for seed in (0, 9))
    params = [SamplingParams(temperature=one, seed=3, max_tokens=30, ignore_eos=True) for one in (0.0, 1.0)]
    config = {"method": "mtp", "num_speculative_tokens": 4, "max_step_rows": 24}

    def run(llm: LLM) -> list[list[int]]:
        before = COUNTERS.get(llm.engine.stats())
        outputs = llm.generate(make_prompts(203, 2), params, use_tqdm=False)
        after = COUNTERS.get(llm.engine.stats())
        assert before is not None and after is not None
        num_drafted = after.num_draft_tokens - before.num_draft_tokens
        assert after.num_accepted_tokens - before.num_accepted_tokens >= 0.97 * num_drafted > 30
        return [output.outputs[0].token_ids for output in outputs]

    with LLM(str(second), device="cpu", speculative_config=config, **SETTINGS["plain"]) as llm:
        expected = run(llm)
    with LLM(str(first), device="cpu", speculative_config=config, **SETTINGS["plain"]) as llm:
        assert run(llm) != expected
        llm.update_weights_from_disk(second)
        assert run(llm) == expected
        llm.sleep()
        llm.wake_up()
        assert run(llm) == expected
        with pytest.raises(RequestError, match=r"missing: mtp\.fc\.weight"):
            llm.update_weights_from_disk(target)
        assert run(llm) == expected


@pytest.mark.parametrize("name", ["fp8-block", "awq"])
def test_a_head_that_is_not_used_may_be_absent_from_new_weights(
    name: str, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """Oracle: an engine that starts with the new weights, whose quantised checkpoint was stored without the head; with
    a head in use its tensors are missing."""
    made: list[Path] = []
    for seed in (11, 12):
        target = checkpoint("qwen3-next", seed=seed, vocab_size=VOCABULARY, **FAMILIES["qwen3-next"])
        dense = make_mtp(tmp_path / f"dense {seed}", target)
        made.append(tmp_path / f"own {seed}")
        compress(dense, made[-1], tmp_path / f"twin {seed}", name, group=8, kept_modules=r"mtp\.fc")
        config = json.loads((made[-1] / "config.json").read_text())
        listed = config["quantization_config"]["modules_to_not_convert"]
        config["quantization_config"]["modules_to_not_convert"] = [one for one in listed if "mtp" not in one]
        (made[-1] / "config.json").write_text(json.dumps(config))
    (second,) = made[1].glob("*.safetensors")
    save_file({key: one for key, one in load_file(second).items() if not key.startswith("mtp.")}, second)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=1)

    def run(llm: LLM) -> list[Any]:
        outputs = llm.generate(make_prompts(VOCABULARY, 2), params, use_tqdm=False)
        return [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs]

    with LLM(str(made[1]), device="cpu", **SETTINGS["plain"]) as llm:
        expected = run(llm)
    with LLM(str(made[0]), device="cpu", **SETTINGS["plain"]) as llm:
        assert run(llm) != expected
        llm.update_weights_from_disk(made[1])
        assert run(llm) == expected
    drafting = {"method": "mtp", "num_speculative_tokens": 2}
    options: dict[str, Any] = {"device": "cpu", "speculative_config": drafting, **SETTINGS["plain"]}
    with LLM(str(made[0]), **options) as llm, pytest.raises(RequestError, match=r"missing: mtp\.fc\.weight"):
        llm.update_weights_from_disk(made[1])
