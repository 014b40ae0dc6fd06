"""Every family of the parity table equals transformers in fp32: greedy tokens, and their log-probabilities to 1e-4.

Each runs in three settings on 1 rank, and in one on 2, 3 or 4: settings change what rank 0 plans and
how a rank launches it, not how ranks share a model, so each setting is seen once or more, on some number of ranks.  One
job runs many families, because starting ranks costs more than running tiny models.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch

from tests.covers import covers
from tests.families import EVERY_SIZE, FAMILIES, OF_EXPERTS, families_on
from tests.ranks import parity_job
from tests.ranks.warm_ranks import warm_ranks
from tests.tiers import fast_first
from tp_engine.kernels.experts import routing
from tp_engine.model_config import load_model_config

VOCAB_SIZE, MAX_MODEL_LEN, CHUNK = 203, 200, 24
# The first prompt is longer than any window plus the tokens that kernels read before it, so blocks are freed while it
# runs.  It holds most of a tight pool, so other requests are preempted.
LENGTHS = (182, 1, 9, 30, 42, 55)
MAX_TOKENS = (14, 12, 9, 6, 11, 7)
NUM_SHARED = 25  # the first and the last two prompts share this many first tokens
HEADS_OF_3_RANKS = {"num_heads": 6, "num_kv_heads": 3, "hidden_size": 48}
TOLERANCE = 1e-4
ON_1_RANK = ("plain", "preempted", "cached")
ON_2_RANKS = ("ahead",)
ON_MORE_RANKS = ("cached",)
LEAST_MARGIN = 1e-4  # between the last expert that is chosen and the next one


def make_prompts() -> list[list[int]]:
    """Prompts of ``LENGTHS``; the first and the last two begin alike."""
    rng = np.random.default_rng(5)
    prompts = [rng.integers(3, VOCAB_SIZE, length).tolist() for length in LENGTHS]
    return prompts[:4] + [prompts[0][:NUM_SHARED] + prompt[NUM_SHARED:] for prompt in prompts[4:]]


def settings_of(folder: Path, world_size: int = 1) -> dict[str, dict[str, Any]]:
    """Name -> options.  The tight pool holds the longest request and little more."""
    spec, _ = load_model_config(str(folder))
    tight = spec.kv_layout_on(world_size).blocks_for(MAX_MODEL_LEN, 4, CHUNK)
    small = {"block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": CHUNK}
    ample = {"num_gpu_blocks_override": 4 * tight}
    uncached = {"enable_prefix_caching": False}
    return {
        "plain": {"async_scheduling": False, "num_gpu_blocks_override": 4 * tight, **uncached},
        "preempted": {
            **small,
            "max_num_seqs": 6,
            "num_gpu_blocks_override": tight,
            "enforce_eager": True,
            **uncached,
        },
        "cached": {**small, **ample, "max_num_seqs": 2},
        "chunked": {**small, **ample, **uncached, "enforce_eager": True},
        "ahead": {**ample, **uncached},
    }


Tokens: TypeAlias = tuple[tuple[int, ...], ...]
"""The tokens after each prompt."""


@lru_cache
def oracle(folder: Path, name: str) -> torch.nn.Module:
    """transformers' own model."""
    import transformers

    model: torch.nn.Module = getattr(transformers, FAMILIES[name].model).from_pretrained(folder, dtype=torch.float32)
    return model.eval()


def problem_of(name: str, folder: Path, result: dict[str, Any]) -> str | None:
    """How a result differs from transformers at each position, given the tokens before it; None if it does not.

    If each token is the best one given those before it, the tokens are those of greedy generation.
    """
    known = expected_logprobs(name, folder, tokens_of(result))
    for prompt, expected, tokens, logprobs in zip(
        make_prompts(), known, result["tokens"], result["logprobs"], strict=True
    ):
        if expected.argmax(-1).tolist() != tokens:
            return f"prompt of {len(prompt)}: {tokens} instead of {expected.argmax(-1).tolist()}"
        error = (expected.max(-1).values - torch.tensor(logprobs)).abs().max().item()
        if error > TOLERANCE:
            return f"prompt of {len(prompt)}: log-probabilities off by {error:.1e}"
    return None


def tokens_of(result: dict[str, Any]) -> Tokens:
    """A result's tokens."""
    return tuple(map(tuple, result["tokens"]))


@lru_cache
def expected_logprobs(name: str, folder: Path, tokens: Tokens) -> list[torch.Tensor]:
    """transformers' log-probabilities (tokens, vocabulary) at each position, given the tokens before it; most settings
    and numbers of ranks give the same ``tokens``."""
    model, found = oracle(folder, name), []
    for prompt, own in zip(make_prompts(), tokens, strict=True):
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([prompt + list(own)])).logits[0, len(prompt) - 1 : -1]
        found.append(logits.log_softmax(-1))
    return found


def is_of_experts(folder: Path) -> bool:
    """Whether some of the model's layers have experts."""
    return any(layer.experts is not None for layer in load_model_config(str(folder))[0].layers)


@lru_cache
def routing_margin(name: str, folder: Path, tokens: Tokens) -> float:
    """The least difference between the last chosen score and the next one, over all tokens and layers.

    If scores are a softmax, their logits are compared, or the logarithms of given ones.  With a margin as small as a
    rounding error, the choice would depend on the order of a sum.
    """
    spec, _ = load_model_config(str(folder))
    experts = [layer.experts for layer in spec.layers if layer.experts is not None]
    rules = [one.rule for one in experts if one.by_id is None]
    model, logits = oracle(folder, name), []
    routers = [module for module in model.modules() if type(module).__name__.lower().endswith("router")]
    routers = [one for one in routers if not hasattr(one, "tid2eid")]  # with a table, scores choose nothing
    stored = [*model.named_buffers(), *model.named_parameters()]
    corrections = [values for key, values in stored if key.endswith(("e_score_correction_bias", ".expert_bias"))]
    assert len(routers) == len(rules) and len(corrections) in (0, len(rules))
    hooks = [one.register_forward_hook(lambda _m, _i, output: logits.append(output[0])) for one in routers]
    margins = []
    for prompt, own in zip(make_prompts(), tokens, strict=True):
        logits.clear()
        with torch.inference_mode():
            model(input_ids=torch.tensor([prompt + list(own)]))
        for index, (found, rule) in enumerate(zip(logits, rules, strict=True)):
            if type(routers[index]).__name__ == "Gemma4TextRouter":
                found = found.log()
            correction = corrections[index].flatten() if corrections else None
            choice = routing.score(found, replace(rule, num_groups=1), correction)[1]
            if rule.num_groups > 1:
                groups = choice.view(len(choice), rule.num_groups, -1).topk(rule.group_best, 2).values.sum(2)
                margins.append(_margin(groups, rule.top_groups))
                choice = routing.score(found, rule, correction)[1]
            if rule.scores != "sigmoid" and not corrections:
                choice = found if rule.num_groups == 1 else choice.log()
            margins.append(_margin(choice, rule.top_k))
    for hook in hooks:
        hook.remove()
    return min(margins)


def _margin(values: torch.Tensor, count: int) -> float:
    """The least difference between the ``count``-th largest value of a row and the next one."""
    best = values.sort(1, descending=True).values
    return (best[:, count - 1] - best[:, count]).min().item()


def table_settings(folder: Path, world_size: int) -> dict[str, dict[str, Any]]:
    """The settings of the parity table."""
    settings = settings_of(folder, world_size)
    return {name: settings[name] for name in {1: ON_1_RANK, 2: ON_2_RANKS}.get(world_size, ON_MORE_RANKS)}


def run_cases(
    world_size: int,
    folders: list[Path],
    tmp_path: Path,
    choose: Callable[[Path, int], dict[str, dict[str, Any]]] = table_settings,
) -> list[dict[str, dict[str, Any]]]:
    """Each folder's results by setting."""
    settings = [choose(folder, world_size) for folder in folders]
    common = {"tensor_parallel_size": world_size, "device": "cpu", "dtype": "float32", "max_model_len": MAX_MODEL_LEN}
    cases = [
        {
            "options": {"model": str(folder), **common, **options},
            "prompts": make_prompts(),
            "max_tokens": MAX_TOKENS,
            "params": {"temperature": 0.0, "ignore_eos": True, "logprobs": 1},
            "is_batch_only": True,
        }
        for folder, found in zip(folders, settings, strict=True)
        for options in found.values()
    ]
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    warm_ranks(world_size, parity_job.main, tmp_path / "cases.json", tmp_path / "out.json")
    results = iter(json.loads((tmp_path / "out.json").read_text()))
    return [dict(zip(found, results, strict=False)) for found in settings]


PARTS = 2  # parts of the table: several jobs run at once, each well within its time limit


def names_of(world_size: int, part: int | None) -> list[str]:
    """The families of a part of the table; None: those of ``EVERY_SIZE``."""
    if part is None:
        return list(EVERY_SIZE)
    return [name for name in families_on(world_size) if name not in EVERY_SIZE][part::PARTS]


def runs_in(setting: str, world_size: int, part: int | None) -> list[tuple[str, int]]:
    """The families of a part and the number of ranks, if they run in the setting there."""
    is_run = setting in {1: ON_1_RANK, 2: ON_2_RANKS}.get(world_size, ON_MORE_RANKS)
    return [(name, world_size) for name in names_of(world_size, part) if is_run]


@pytest.mark.parametrize("part", fast_first(1, [None, *range(PARTS)]))
@pytest.mark.parametrize("world_size", fast_first(3, [1, 2, 3, 4]))
@covers("tokens", lambda world_size, part: [(name, world_size) for name in names_of(world_size, part)])
@covers("preemption", lambda world_size, part: runs_in("preempted", world_size, part))
@covers("prefix cache", lambda world_size, part: runs_in("cached", world_size, part))
def test_families_equal_transformers(
    world_size: int,
    part: int | None,
    checkpoint: Callable[..., Path],
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    """Oracle: transformers' logits, given our tokens; preemptions and cached tokens occur in the settings for them."""
    names = names_of(world_size, part)
    shape = HEADS_OF_3_RANKS if world_size == 3 else {}
    folders = [checkpoint(name, vocab_size=VOCAB_SIZE, **shape) for name in names]
    problems = []
    for name, folder, results in zip(names, folders, run_cases(world_size, folders, tmp_path), strict=True):
        found = {setting: problem_of(name, folder, result) for setting, result in results.items()}
        last, tokens = list(results)[-1], tokens_of(list(results.values())[-1])
        if is_of_experts(folder) and (margin := routing_margin(name, folder, tokens)) < LEAST_MARGIN:
            found[last] = f"the routing margin is {margin:.1e}; choose another seed in tests/families.py"
        if "preempted" in results and results["preempted"]["num_preemptions"] == 0:
            found["preempted"] = "nothing was preempted"
        if "cached" in results and results["cached"]["num_cached_tokens"] == 0:
            found["cached"] = "nothing was cached"
        for setting, problem in found.items():
            record_property("parity", [name, world_size, setting, problem is None])
        problems += [f"{name}, {setting}: {problem}" for setting, problem in found.items() if problem is not None]
    assert not problems, "\n".join(problems)


@pytest.mark.slow
@covers("split experts", lambda: [(name, 3) for name in OF_EXPERTS])
def test_expert_parallel_equals_transformers(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """Oracle: transformers' logits, given our tokens; each of 3 ranks has whole experts, in unequal numbers."""

    def choose(folder: Path, world_size: int) -> dict[str, dict[str, Any]]:
        return {"ahead": settings_of(folder, world_size)["ahead"] | {"enable_expert_parallel": True}}

    folders = {name: checkpoint(name, vocab_size=VOCAB_SIZE, **HEADS_OF_3_RANKS) for name in OF_EXPERTS}
    results = run_cases(3, list(folders.values()), tmp_path, choose)
    found = {
        name: problem_of(name, folder, result["ahead"])
        for (name, folder), result in zip(folders.items(), results, strict=True)
    }
    assert len(found) == 29 and not any(found.values()), found


def test_every_architecture_is_in_the_table() -> None:
    """Oracle: the readers' own list."""
    from tp_engine.model_config.families import families

    known = {name for family in FAMILIES.values() for name in (family.model, family.hub_name) if name is not None}
    assert known == set(families())
