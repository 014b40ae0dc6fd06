"""Every quantised format, dense and with experts, with other layers and other names of modules, on 1 and 2 ranks, and
each way of packing on 8, equals transformers on the float32 twin.

The twin has the weights that the codes and scales stand for.  Groups have 32 columns if the format lets us choose, so
shards of 96, 64 and 12 columns begin and end inside of groups and blocks.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.covers import covers
from tests.quantised.checkpoints import SAME_NUMBERS, compress, compress_alike
from tests.quantised.fake_rows import fake_rows, scale_experts
from tests.quantised.formats import FORMATS, INPUT_SCALE
from tests.ranks.test_families import (
    LEAST_MARGIN,
    VOCAB_SIZE,
    is_of_experts,
    make_prompts,
    oracle,
    problem_of,
    routing_margin,
    run_cases,
    settings_of,
    tokens_of,
)

pytestmark = pytest.mark.slow

GROUP = 32
SHAPES: dict[str, dict[str, Any]] = {
    # A seed with which no token is near the border between two experts, in any format.
    "qwen3-moe": {"moe_intermediate_size": 96, "num_experts": 4, "num_experts_per_tok": 2, "num_layers": 2, "seed": 6},
    "gpt-oss": {"intermediate_size": 288},  # 9 blocks of 32, which 2 and 8 ranks share unequally
    "gemma4-experts": {"moe_intermediate_size": 96, "seed": 38},
    "qwen3-next": {"moe_intermediate_size": 96, "shared_expert_intermediate_size": 96, "seed": 0},
    "qwen3.5-moe-vision": {"moe_intermediate_size": 96, "shared_expert_intermediate_size": 96, "seed": 7},
    "nemotron-3": {"moe_intermediate_size": 96, "moe_shared_expert_intermediate_size": 96, "seed": 12},
}
# Fused projections (phi3), biases (qwen2) and other names of experts (mixtral), once per way of packing.
OTHER_NAMES = [
    ("fp8-block", "phi3"),
    ("fp8-channel", "mixtral"),
    ("fp8-tensor-static", "phi3"),
    ("pack-quantized-asym", "phi3"),
    ("pack-quantized", "mixtral"),
    ("awq", "qwen2"),
    ("gptq", "phi3"),
    ("gptq-v2-asym", "mixtral"),
    ("nvfp4-pack-quantized", "phi3"),
    ("nvfp4-modelopt", "mixtral"),
]
# Latent attention, experts beside MLPs with layers of one projection for keys and values (gemma4-experts), the delta
# rule, with projections in turns in one module (qwen3-next) or with several modules (qwen3.5), and state space layers
# with experts without a gate between latents (nemotron-3).
OTHER_LAYERS = [
    ("fp8-block", "deepseek-v3"),
    ("fp8-block", "deepseek-v3.2"),
    ("fp8-block", "gemma4-experts"),
    ("fp8-channel", "gemma4-experts"),
    ("pack-quantized", "gemma4-experts"),
    ("nvfp4-modelopt", "gemma4-experts"),
    ("fp8-block", "qwen3-next"),
    ("fp8-block", "qwen3.5"),
    ("fp8-block", "qwen3.5-moe-vision"),
    ("pack-quantized", "qwen3-next"),
    ("awq", "qwen3.5"),
    ("gptq", "qwen3.5-moe-vision"),
    ("modelopt-fp8", "nemotron-3"),
    ("nvfp4-modelopt", "nemotron-3"),
]
HOW: dict[tuple[str, str], dict[str, Any]] = {
    ("nvfp4-modelopt", "gemma4-experts"): {"moves_experts": True},
    # What Qwen's own checkpoints leave as it is.
    ("gptq", "qwen3.5-moe-vision"): {"kept_modules": ".*attn.*|.*shared_expert.*", "with_patterns": True},
}
EVERY_FORMAT = [
    *((name, "qwen3") for name, how in FORMATS.items() if not how.fused),
    *((name, "gpt-oss" if how.fused else "qwen3-moe") for name, how in FORMATS.items()),
]
ROUNDED_INPUTS = ("w8a8-int8",)  # on CPUs, only these round activations to 8 bits
ROUNDED_TOLERANCE = 0.02  # a sum in another order may round an activation to the next code
PARTS = 2  # jobs per number of ranks: the start of 8 ranks takes most of a short one

Written = Callable[[str, str], tuple[Path, Path]]


@pytest.fixture(scope="session")
def quantised(checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Written:
    """``quantised(format, architecture)`` -> a quantised checkpoint and its twin; made once."""
    made: dict[tuple[str, str], tuple[Path, Path]] = {}

    def get(name: str, architecture: str) -> tuple[Path, Path]:
        if (name, architecture) not in made:
            folder = tmp_path_factory.mktemp(name)
            made[name, architecture] = own, twin = folder / "own", folder / "twin"
            source = checkpoint(architecture, vocab_size=VOCAB_SIZE, **SHAPES.get(architecture, {}))
            group = GROUP if FORMATS[name].group == 128 else None
            compress(source, own, twin, name, group=group, **HOW.get((name, architecture), {}))
        return made[name, architecture]

    return get


def whole_prompts(folder: Path, world_size: int) -> dict[str, dict[str, Any]]:
    """Whole prompts, with tapes or graphs."""
    return {"ahead": settings_of(folder, world_size)["ahead"]}


def table_settings(folder: Path, world_size: int) -> dict[str, dict[str, Any]]:
    """Chunks of prompts, without tapes and graphs, on 1 rank; whole prompts, with them, on several."""
    chunks = {"chunked": settings_of(folder, world_size)["chunked"]}
    return chunks if world_size == 1 else whole_prompts(folder, world_size)


def int8_rows(x: torch.Tensor, num_shards: int) -> torch.Tensor:
    """Rows (..., in) rounded to 8 bits by the largest value of each token and share of the columns."""
    parts = x.reshape(*x.shape[:-1], num_shards, -1)
    steps = parts.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 127
    return ((parts / steps).round() * steps).reshape(x.shape)


RoundRows = Callable[[torch.Tensor, int], torch.Tensor]
RoundPairs = Callable[[torch.Tensor, int, bool, int], torch.Tensor]
"""Rows of the pairs of an expert, its number, whether down reads them, and the shares of their columns."""


@contextmanager
def rounded_inputs(
    model: torch.nn.Module, world_size: int, round_rows: RoundRows, round_pairs: RoundPairs | None = None
) -> Iterator[None]:
    """Round the inputs of linear layers, and of experts by ``round_pairs``.  Where ranks share the columns, each rounds
    its own."""
    num_shards = {
        values.untyped_storage().data_ptr(): world_size if name.endswith(("o_proj.weight", "down_proj.weight")) else 1
        for name, values in model.named_parameters()
        if name.endswith("_proj.weight") and "experts" not in name
    }
    stacks = {
        values.untyped_storage().data_ptr(): name.endswith("down_proj")
        for name, values in model.named_parameters()
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")) and round_pairs is not None
    }
    linear = F.linear

    def of_rounded(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        is_down = stacks.get(weight.untyped_storage().data_ptr())
        if is_down is not None and round_pairs is not None:
            expert = weight.storage_offset() // weight.numel()
            x = round_pairs(x, expert, is_down, world_size if is_down else 1)
        if shards := num_shards.get(weight.untyped_storage().data_ptr()):
            x = round_rows(x, shards)
        return linear(x, weight, bias)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "linear", of_rounded)
        yield


def problem_of_rounded(
    architecture: str,
    twin: Path,
    result: dict[str, Any],
    world_size: int,
    round_rows: RoundRows = int8_rows,
    round_pairs: RoundPairs | None = None,
) -> str | None:
    """``problem_of`` for products whose inputs are rounded: tokens may be nearly the best."""
    model = oracle(twin, architecture)
    if round_pairs is not None:
        model.set_experts_implementation("eager")  # type: ignore[operator]  # one product for each expert
    for prompt, tokens, logprobs in zip(make_prompts(), result["tokens"], result["logprobs"], strict=True):
        with torch.inference_mode(), rounded_inputs(model, world_size, round_rows, round_pairs):
            logits = model(input_ids=torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1)
        of_tokens = expected.gather(1, torch.tensor(tokens).unsqueeze(1)).squeeze(1)
        error = max((of_tokens - torch.tensor(logprobs)).abs().max(), (expected.max(-1).values - of_tokens).max())
        if error > ROUNDED_TOLERANCE:
            return f"prompt of {len(prompt)}: log-probabilities off by {error:.1e}"
    return None


def rows_on(world_size: int) -> list[tuple[str, str]]:
    """(format, architecture) of the rows that run on so many ranks: all on 1 and 2; on 8, where shards have 12 columns,
    each way of packing, dense or with experts in turns, and each kind of layers once."""
    if world_size < 8:
        return [*EVERY_FORMAT, *OTHER_LAYERS, *OTHER_NAMES]
    packings = [(name, ("qwen3", "qwen3-moe")[place % 2]) for place, (name, _) in enumerate(OTHER_NAMES)]
    layers = {architecture: (name, architecture) for name, architecture in OTHER_LAYERS}
    return [*packings, ("mxfp4", "gpt-oss"), ("w8a8-int8", "qwen3-moe"), *layers.values()]


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("world_size", [1, 2, 8])
@covers("quantised", lambda world_size, part: [(name, world_size) for _, name in rows_on(world_size)[part::PARTS]])
def test_formats_equal_their_twins(
    world_size: int, part: int, quantised: Written, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """Oracle: transformers' logits of the twin, given our tokens."""
    rows = rows_on(world_size)[part::PARTS]
    folders = [quantised(*row) for row in rows]
    problems = []
    results = run_cases(world_size, [own for own, _ in folders], tmp_path, table_settings)
    for (name, architecture), (_, twin), found in zip(rows, folders, results, strict=True):
        for setting, result in found.items():
            if name in ROUNDED_INPUTS:
                problem = problem_of_rounded(architecture, twin, result, world_size)
            else:
                problem = problem_of(architecture, twin, result)
            if is_of_experts(twin) and (margin := routing_margin(architecture, twin, tokens_of(result))) < LEAST_MARGIN:
                problem = f"the routing margin is {margin:.1e}; choose another seed"
            record_property("parity", [f"{name}, {architecture}", world_size, setting, problem is None])
            if problem is not None:
                problems.append(f"{name}, {architecture}, {setting}: {problem}")
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_same_numbers_in_four_packings_give_equal_results(
    world_size: int, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """Oracle: one another, to the last bit; and transformers on the twin."""
    for architecture in ("qwen3", "qwen3-moe"):
        folder = tmp_path / architecture
        source = checkpoint(architecture, vocab_size=VOCAB_SIZE, **SHAPES.get(architecture, {}))
        targets = {name: folder / name for name in SAME_NUMBERS}
        compress_alike(source, targets, folder / "twin", group=GROUP)
        results = run_cases(world_size, list(targets.values()), folder, whole_prompts)
        assert all(found == results[0] for found in results)
        assert problem_of(architecture, folder / "twin", results[0]["ahead"]) is None


@pytest.mark.parametrize("world_size", [1, 2])
def test_rounded_activations_are_those_of_compressed_tensors(
    world_size: int, quantised: Written, tmp_path: Path
) -> None:
    """Oracle: transformers' logits of the twin, whose inputs compressed-tensors rounds as the checkpoint declares;
    shares of 48 columns end inside of groups of 32.  The order of a sum may move a number past a border."""
    kinds = {"nvfp4-pack-quantized": "nvfp4", "nvfp4-modelopt": "nvfp4", "quark-mxfp4": "mxfp4", "mxfp8": "mxfp8"}
    folders = [quantised(name, "qwen3") for name in kinds]

    def rounding(folder: Path, world_size: int) -> dict[str, dict[str, Any]]:
        return {"rounded": {**whole_prompts(folder, world_size)["ahead"], "round_activations": True}}

    results = run_cases(world_size, [own for own, _ in folders], tmp_path, rounding)
    for (name, kind), (_, twin), found in zip(kinds.items(), folders, results, strict=True):
        scale = INPUT_SCALE if kind == "nvfp4" else None
        round_rows = partial(fake_rows, kind=kind, scale=scale)
        problem = problem_of_rounded(
            "qwen3",
            twin,
            found["rounded"],
            world_size,
            lambda x, shards: round_rows(x, num_shards=shards),  # noqa: B023
        )
        assert problem is None, f"{name}: {problem}"
        assert problem_of("qwen3", twin, found["rounded"]) is not None, "whole inputs give other results"


@pytest.mark.parametrize("world_size", [1, 2])
def test_rounded_inputs_of_experts_are_those_of_compressed_tensors(
    world_size: int, quantised: Written, tmp_path: Path
) -> None:
    """Oracle: as above, with the rows of each expert's pairs, before gate and up and before down; each expert has its
    own scales."""
    kinds, twins = {"nvfp4-pack-quantized": "nvfp4", "nvfp4-modelopt": "nvfp4", "mxfp8": "mxfp8"}, []
    for name in kinds:
        own, twin = quantised(name, "qwen3-moe")
        shutil.copytree(own, tmp_path / name)
        twins.append(twin)
    scales = [scale_experts(tmp_path / name) for name in kinds]

    def rounding(folder: Path, world_size: int) -> dict[str, dict[str, Any]]:
        return {"rounded": {**whole_prompts(folder, world_size)["ahead"], "round_activations": True}}

    results = run_cases(world_size, [tmp_path / name for name in kinds], tmp_path, rounding)
    for (name, kind), twin, of_experts, found in zip(kinds.items(), twins, scales, results, strict=True):

        def round_rows(x: torch.Tensor, shards: int, kind: str = kind) -> torch.Tensor:
            return fake_rows(x, kind, INPUT_SCALE if kind == "nvfp4" else None, shards)

        def round_pairs(
            x: torch.Tensor, expert: int, is_down: bool, shards: int, kind: str = kind, scales: Any = of_experts
        ) -> torch.Tensor:
            return fake_rows(x, kind, scales[expert][is_down] if scales else None, shards)

        problems = [
            problem_of_rounded("qwen3-moe", twin, found["rounded"], world_size, round_rows, one)
            for one in (round_pairs, None)
        ]
        assert problems[0] is None, f"{name}: {problems[0]}"
        assert problems[1] is not None, f"{name}: whole inputs of experts give other results"
