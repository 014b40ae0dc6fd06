"""Prompts with images equal transformers in float32: greedy tokens, and their log-probabilities to 1e-4."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.covers import covers
from tests.image_models import IMAGE_FAMILIES, Oracle, make_image_model, pixel_files, write_hub_form_of_kimi
from tests.ranks import image_job
from tests.ranks.warm_ranks import warm_ranks
from tests.tiers import fast_first

MAX_MODEL_LEN, MAX_TOKENS = 400, 7
FEW_TOKENS, WHOLE_IMAGE = 7, 76  # Gemma's images are in one chunk


def make_prompts() -> list[list[Any]]:
    """No image to four of different sizes, two equal ones, an image in the first and the last place."""
    rng = np.random.default_rng(3)
    sizes = {"a": [64, 64], "b": [64, 64], "c": [40, 100], "d": [90, 50]}
    image = {name: {"size": size, "seed": seed} for seed, (name, size) in enumerate(sizes.items())}

    def text(count: int) -> list[int]:
        return [int(one) for one in rng.integers(3, 290, count)]

    a, b, c, d = image.values()
    return [
        [text(9), a, text(5)],
        [text(12)],
        [c, text(3), d, text(1), a, text(2)],
        [text(3), b, text(1), c],
        [text(4), a, text(1), a, text(2), b, text(1), d, text(7)],
    ]


def settings_of(name: str) -> dict[str, dict[str, Any]]:
    """Chunks that cut images, unless none may; a tight pool; images that leave the encoder cache between chunks."""
    few = FEW_TOKENS if cuts_images(name) else WHOLE_IMAGE
    small = {"max_num_seqs": 4, "max_num_batched_tokens": few, "block_size": 4}
    return {
        "plain": {"num_gpu_blocks_override": 2000, "async_scheduling": False, "block_size": 4},
        "chunked": {**small, "num_gpu_blocks_override": 2000},
    }


def more_settings_of(name: str) -> dict[str, dict[str, Any]]:
    """Other sizes of chunks and blocks, and sums that do not depend on the number of ranks."""
    sizes = {"max_num_seqs": 4, "num_gpu_blocks_override": 3000}
    few = {"max_num_seqs": 1, "max_num_batched_tokens": 1} if cuts_images(name) else {}
    some = 16 if cuts_images(name) else WHOLE_IMAGE + 5
    return {
        "chunks of 1, blocks of 1": {**sizes, "block_size": 1, **few},
        "chunks of 16, blocks of 16": {**sizes, "block_size": 16, "max_num_batched_tokens": some},
        "tp invariant": {**sizes, "block_size": 4, "tp_invariant": True, "max_num_batched_tokens": some},
    }


def cuts_images(name: str) -> bool:
    """Whether a chunk may end within an image."""
    return not name.startswith("gemma") or name in ("gemma4-causal", "gemma4-e-vision")


@pytest.fixture(scope="module")
def image_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a family's checkpoint, made once."""
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            made[name] = make_image_model(tmp_path_factory.mktemp(name), name)
        return made[name]

    return get


def run_cases(world_size: int, cases: list[dict[str, Any]], tmp_path: Path) -> list[dict[str, Any]]:
    """What each case gave, on so many ranks."""
    common = {
        "tensor_parallel_size": world_size,
        "device": "cpu",
        "dtype": "float32",
        "max_model_len": MAX_MODEL_LEN,
    }
    cases = [{**case, "options": {**common, **case["options"]}} for case in cases]
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    warm_ranks(world_size, image_job.main, tmp_path / "cases.json", tmp_path / "out.json")
    found: list[dict[str, Any]] = json.loads((tmp_path / "out.json").read_text())
    return found


FAST = ("qwen3.5-vision", "gemma3-vision")
MORE = (
    "qwen3.5-vision", "qwen2.5-vl", "qwen3-vl", "mistral3-vision", "gemma3-vision", "gemma4-narrow", "kimi-k2.5-vision",
)  # fmt: skip
MORE_ON_2_RANKS = ("qwen3-vl", "gemma4-narrow")


@pytest.mark.parametrize(
    ("name", "world_size"),
    fast_first(2, [(name, 1) for name in (*FAST, *(one for one in IMAGE_FAMILIES if one not in FAST))])
    + [
        pytest.param("qwen3.5-vision", 2),
        *(pytest.param(name, 2, marks=pytest.mark.slow) for name in ("mistral3-vision", "gemma4-vision")),
    ]
    + [
        pytest.param(name, 4, marks=pytest.mark.slow) for name in ("qwen3.5-moe-vision", "qwen3-vl", "kimi-k2.5-vision")
    ],
)
@covers("images", lambda world_size, name: [(name, world_size)])
def test_images_equal_transformers(
    name: str,
    world_size: int,
    image_model: Callable[[str], Path],
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    """Oracle: transformers' logits, given our tokens; in the second round all images are cached, and none is encoded
    again."""
    problems = compare(name, world_size, settings_of(name), image_model(name), tmp_path)
    record_property("parity", [name, world_size, "images", not problems])
    assert not problems, "\n".join(problems)


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE)
def test_chunks_and_blocks_of_any_size_equal_transformers(
    name: str, image_model: Callable[[str], Path], tmp_path: Path
) -> None:
    """Oracle: as above."""
    problems = compare(name, 2 if name in MORE_ON_2_RANKS else 1, more_settings_of(name), image_model(name), tmp_path)
    assert not problems, "\n".join(problems)


@pytest.mark.slow
def test_kimis_form_on_the_hub_equals_transformers(image_model: Callable[[str], Path], tmp_path: Path) -> None:
    """Oracle: as above, for the model whose tensors were renamed, reordered and fused as the hub has them."""
    folder, name = image_model("kimi-k2.5-vision"), "kimi-k2.5-vision"
    hub = write_hub_form_of_kimi(folder, tmp_path / "hub")
    problems = compare(name, 2, settings_of(name), folder, tmp_path, stored=hub)
    assert not problems, "\n".join(problems)


def compare(
    name: str,
    world_size: int,
    settings: dict[str, dict[str, Any]],
    folder: Path,
    tmp_path: Path,
    stored: Path | None = None,
) -> list[str]:
    """How the answers of engines with these settings differ from transformers'; ``stored`` is what engines read, if it
    is another folder."""
    prompts = make_prompts()
    cases = [
        {"options": {"model": str(stored or folder), **options}, "prompts": prompts, "max_tokens": MAX_TOKENS}
        for options in settings.values()
    ]
    results = run_cases(world_size, cases, tmp_path)
    oracle, problems = Oracle(folder, name), list[str]()
    with pixel_files(folder) as files:
        made = image_job.prompts_of(files, folder, prompts)
        for setting, result in zip(settings, results, strict=True):
            found: list[str | None] = []
            for first, second, prompt in zip(*result["rounds"], made, strict=True):
                found.append(oracle.problem(prompt, first["tokens"][0], first["logprobs"][0]))
                if second["tokens"] != first["tokens"]:
                    found.append(f"then {second['tokens']}")
                if second["cached"] < len(prompt.ids) - 2 * settings[setting]["block_size"]:
                    found.append(f"only {second['cached']} of {len(prompt.ids)} were cached")
            problems += [f"{setting}: {one}" for one in found if one is not None]
    return problems


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma4-narrow", "gemma3-vision", "qwen3-vl"])
@covers("8-bit KV", lambda name: [(name, 1)])
def test_quantised_kv_equals_transformers_with_it(
    name: str, image_model: Callable[[str], Path], tmp_path: Path
) -> None:
    """Oracle: transformers' logits with K/V in the same 8 bits.  Differences of one bit become steps of the rounding
    now and then, so a part of what the quantisation changes is allowed: a tenth of the most, a fiftieth usually."""
    folder, prompts, kinds = image_model(name), make_prompts(), {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
    options = {**settings_of(name)["chunked"], "model": str(folder)}
    cases = [
        {"options": {**options, "kv_cache_dtype": kind}, "prompts": prompts, "max_tokens": MAX_TOKENS, "num_rounds": 1}
        for kind in kinds
    ]
    exact = Oracle(folder, name)
    for dtype, result in zip(kinds.values(), run_cases(1, cases, tmp_path), strict=True):
        oracle, errors, changes = Oracle(folder, name, kv_dtype=dtype), list[torch.Tensor](), list[torch.Tensor]()
        with pixel_files(folder) as files:
            made = image_job.prompts_of(files, folder, prompts)
            for prompt, answer in zip(made, result["rounds"][0], strict=True):
                tokens, logprobs = answer["tokens"][0], torch.tensor(answer["logprobs"][0])
                for one, found in ((oracle, errors), (exact, changes)):
                    expected = one.logprobs(prompt, tokens)[range(len(tokens)), tokens]
                    found.append((expected - logprobs).abs())
        error, change = torch.cat(errors), torch.cat(changes)
        assert error.max() < 0.1 * change.max() and error.median() < 0.02 * change.median(), (dtype, error, change)


@pytest.mark.slow
def test_preempted_and_forked_images(image_model: Callable[[str], Path], tmp_path: Path) -> None:
    """Oracle: the same prompts with room for all; on 2 ranks the pool holds little more than one prompt, each has two
    answers, and drafts are verified."""
    folder, prompts = image_model("qwen3-vl"), make_prompts()[:4]
    ample = {"model": str(folder), "block_size": 4, "num_gpu_blocks_override": 2000}
    tight = {**ample, "num_gpu_blocks_override": 21, "max_num_seqs": 8, "max_num_batched_tokens": 16}
    tight["max_model_len"] = 80
    tight["speculative_config"] = json.dumps({"method": "ngram", "num_speculative_tokens": 3})
    case = {"prompts": [*prompts, *prompts, *prompts], "max_tokens": 24, "params": {"n": 2}, "num_rounds": 1}
    (expected,) = run_cases(1, [{**case, "options": ample}], tmp_path)
    (found,) = run_cases(2, [{**case, "options": tight}], tmp_path)
    assert found["num_preemptions"] > 0
    assert [one["tokens"] for one in found["rounds"][0]] == [one["tokens"] for one in expected["rounds"][0]]
