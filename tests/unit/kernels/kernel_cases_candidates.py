"""The candidates of operations on GPUs: each is right by the proof that it gets on a user's device, interpreted and on
CUDA (``CASES``), and those that only a full search tries are compiled (``launch_all``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from unittest.mock import patch

import torch

from tests.unit.kernels.kernel_cases_layer_ops import Case
from tp_engine.attention import expanded
from tp_engine.kernels.attention import latent_candidates, paged_candidates, paged_trials
from tp_engine.kernels.attention.prompt_packages import PACKAGES
from tp_engine.kernels.candidates import MANY, Shape, Twin, operation, why_no_triton
from tp_engine.kernels.ops import implementation
from tp_engine.kernels.quantization.scaled_products import has_fp8_units
from tp_engine.worker.tuning import proof
from tp_engine.worker.tuning.guards import copied
from tp_engine.worker.tuning.proof import ProofQuestions, largest_error

CPU = torch.device("cpu")
_QUANTISED: Shape = {
    "in": 128, "out": 64, "type": "bfloat16", "codes": "int4", "scales": "uint8", "group": 32, "row_block": 1,
    "zeros": 1, "factors": 1, "parts": 0, "rows": "whole",
}  # fmt: skip
_FORMAT = ("codes", "scales", "group", "row_block", "zeros", "factors")
_DENSE: Shape = {"in": 384, "out": 128, "type": "bfloat16", "parts": 0}
_WHOLE: Shape = {**_QUANTISED, "scales": "none", "group": 0, "zeros": 0}
_BLOCKS: Shape = {
    **_WHOLE, "codes": "e4m3", "scales": "float32", "group": 32, "row_block": 32, "factors": 0, "rows": "e4m3",
}  # fmt: skip
_EXPERTS: Shape = {
    "experts": 3, "of": 4, "top_k": 2, "hidden": 64, "inner": 64, "type": "bfloat16", "parts": 2, "bias": 1,
    "codes": "none", "rows": "whole",
}  # fmt: skip
_RECURRENT: Shape = {"key_heads": 1, "value_heads": 2, "key": 16, "value": 8, "taps": 4, "type": "bfloat16"}
_ATTENTION: Shape = {
    "heads": 4, "kv_heads": 2, "dim": 32, "type": "float32", "cache": "float32", "block": 16, "window": 0, "cap": "",
    "sinks": 0, "fixed": 0,
}  # fmt: skip
_LATENTS: Shape = {
    "heads": 4, "dim": 40, "rank": 32, "type": "bfloat16", "cache": "bfloat16", "block": 16, "chosen": 0,
}  # fmt: skip
_EXPANDED: Shape = {"heads": 3, "nope": 22, "rope": 6, "value": 40, "type": "bfloat16"}
_MAPS: Shape = {"heads": 3, "nope": 22, "rope": 6, "rank": 70, "value": 40, "type": "bfloat16"}
# tests/unit/kernels/test_prompt_packages.py has these, with stand-ins.
OF_PACKAGES = {one.name for one in PACKAGES}
# Operation, shape, numbers of rows; None: the fewest of each candidate, and one more than a tile has.
SHAPES: dict[str, tuple[str, Shape, tuple[int, ...] | None]] = {
    "dense": ("dense_linear", _DENSE, None),
    "dense, gate and up": ("dense_linear", {**_DENSE, "in": 256, "parts": 2}, None),
    "int4": ("quantised_linear", _QUANTISED, None),
    "int4, gate and up": ("quantised_linear", {**_QUANTISED, "parts": 2}, None),
    "e4m3": ("quantised_linear", {**_WHOLE, "codes": "e4m3"}, None),
    "e4m3, blocks": (
        "quantised_linear",
        {**_WHOLE, "codes": "e4m3", "scales": "float32", "group": 64, "row_block": 32, "factors": 0},
        None,
    ),
    "int8, relu2": ("quantised_linear", {**_WHOLE, "codes": "int8", "parts": 1}, None),
    "e4m3, rows as well": ("quantised_linear", {**_WHOLE, "codes": "e4m3", "parts": 2, "rows": "e4m3"}, None),
    "e4m3, blocks, rows as well": ("quantised_linear", _BLOCKS, None),
    "mxfp4": (
        "quantised_linear",
        {**_WHOLE, "codes": "e2m1", "scales": "float8_e8m0fnu", "group": 32, "factors": 0},
        None,
    ),
    "nvfp4": ("quantised_linear", {**_WHOLE, "codes": "e2m1", "scales": "float8_e4m3fn", "group": 16}, None),
    "nvfp4, rows as well": (
        "quantised_linear",
        {**_WHOLE, "codes": "e2m1", "scales": "float8_e4m3fn", "group": 16, "parts": 2, "rows": "nvfp4"},
        None,
    ),
    "experts": ("experts", _EXPERTS, (17,)),
    "experts, e4m3, rows as well": (
        "experts",
        {**_EXPERTS, **{name: _BLOCKS[name] for name in (*_FORMAT, "rows")}},
        (17,),
    ),
    "experts, mxfp4": (
        "experts",
        {
            **_EXPERTS,
            **{name: _WHOLE[name] for name in _FORMAT},
            "codes": "e2m1",
            "scales": "float8_e8m0fnu",
            "group": 32,
            "factors": 0,
        },
        (17,),
    ),
    "experts, nvfp4, relu2": (
        "experts",
        {
            **_EXPERTS,
            **{name: _WHOLE[name] for name in _FORMAT},
            "codes": "e2m1",
            "scales": "float8_e4m3fn",
            "group": 16,
            "parts": 1,
            "bias": 0,
        },
        (17,),
    ),
    "experts, nvfp4, rows as well": (
        "experts",
        {
            **_EXPERTS,
            **{name: _WHOLE[name] for name in _FORMAT},
            "codes": "e2m1",
            "scales": "float8_e4m3fn",
            "group": 16,
            "rows": "nvfp4",
        },
        (17,),
    ),
    "gated_delta_net": ("gated_delta_net_prefill", _RECURRENT, (1, 40)),
    "mamba2": ("mamba2_prefill", _RECURRENT, (1, 40)),
    "short_conv": (
        "short_conv_prefill",
        {**_RECURRENT, "value_heads": 1, "key": 0, "value": 30, "taps": 3, "type": "float32"},
        (1, 40),
    ),
    "decodes": ("decode_attention", _ATTENTION, (3,)),
    "decodes, int8": ("decode_attention", {**_ATTENTION, "cache": "int8", "window": 20, "sinks": 1}, (3,)),
    "prompts": ("prompt_attention", _ATTENTION, (17,)),
    "prompts, window": ("prompt_attention", {**_ATTENTION, "window": 20, "cap": "1.5", "sinks": 1}, (17,)),
    "latent decodes": ("latent_decode_attention", _LATENTS, (3,)),
    "latent decodes, chosen keys": ("latent_decode_attention", {**_LATENTS, "chosen": 20}, (3,)),
    "latent decodes, int8": ("latent_decode_attention", {**_LATENTS, "type": "float32", "cache": "int8"}, (3,)),
    "latent prompts": ("latent_prompt_attention", _LATENTS, (17, 130)),
    "latent prompts, int8": ("latent_prompt_attention", {**_LATENTS, "cache": "int8"}, (17,)),
    "expanded prompts": ("expanded_prompt_attention", _EXPANDED, (128, 150)),
    "expanded prompts, float32": ("expanded_prompt_attention", {**_EXPANDED, "type": "float32", "value": 16}, (130,)),
    **{
        f"{name}, {dtype}": (name, {**_MAPS, "type": dtype}, rows)
        for name in ("absorb_w_uk", "project_w_uv")
        for dtype, rows in (("bfloat16", (1, 17, 65)), ("float32", (3,)))
    },
    "draws of 2 ranks": ("draw_of_shares", {"ranks": 2, "width": 64}, (1, 48)),
    "draws of 8 ranks": ("draw_of_shares", {"ranks": 8, "width": 64}, (48,)),
}


def check_candidates(device: str, name: str) -> None:
    """Every candidate for such weights is within its bound, but a library's, which GPUs have; the code's own choice
    names candidates of the table.  Products of codes are for rows that may be rounded."""
    table, shape, where = operation(SHAPES[name][0]), SHAPES[name][1], torch.device(device)
    weights = table.weights(shape, where, torch.Generator().manual_seed(0))
    asked: dict[Twin | None, ProofQuestions] = {None: ProofQuestions(table, weights, shape, where)}
    default = table.default(shape, where)
    assert default[-1][0] == MANY and all(table.named(one) for _, one in default)
    for candidate in table.candidates:
        reason = candidate.why_not(shape, where)
        if reason not in (None, why_no_triton(shape, where)) or (where.type == "cpu" and "library" in candidate.name):
            continue
        if candidate.name in OF_PACKAGES:
            continue
        if candidate.twin is not None and candidate.twin not in asked:
            asked[candidate.twin] = ProofQuestions(replace(table, twin=candidate.twin), weights, shape, where)
        rows = SHAPES[name][2] or sorted({candidate.least_rows, min(candidate.most_rows, 17)} - {0})
        run = candidate.build(weights, shape)
        with patch.object(proof, "_INPUTS", 1 if device == "cpu" else 3):  # an interpreter takes its time
            error, at = largest_error(run, asked[candidate.twin], filter(candidate.takes, rows), where)
        assert error <= 1, (candidate.name, error, at)
    has_codes = len(asked) == 2
    assert has_codes == (shape.get("rows") == "e4m3") or (where.type == "cuda" and not has_fp8_units(where))


def check_attention(device: str, name: str) -> None:
    """With few keys, which an interpreter reads in time."""
    with (
        patch.multiple(paged_trials, MOST_KEYS=50, _LEAST_KEYS=50),
        patch.object(paged_candidates, "_BEFORE", 30),
        patch.object(latent_candidates, "_BEFORE", 30),
        patch.object(expanded, "_BEFORE", 30),
    ):
        check_candidates(device, name)


CASES: dict[str, Case] = {
    f"candidates-{name}": partial(check_attention if "attention" in place else check_candidates, name=name)
    for name, (place, _, _) in SHAPES.items()
}


def launch_latents(name: str, candidates: Sequence[str], **changes: int | str) -> list[str]:
    """Launch ``candidates`` for latent attention of DeepSeek-V3 on one of 8 ranks; returns those that take it."""
    table, shape = operation(name), {**_LATENTS, "dim": 576, "rank": 512, "heads": 16, **changes}
    with patch.object(paged_trials, "MOST_KEYS", 256):
        inputs = table.inputs(shape, 64, CPU, torch.Generator().manual_seed(0))
    on_meta = copied(inputs, lambda one: torch.empty_strided(one.shape, one.stride(), dtype=one.dtype, device="meta"))
    taken = [one for one in table.candidates if one.name in candidates]
    taken = [one for one in taken if one.why_not(shape, CPU) == why_no_triton(shape, CPU)]
    for candidate in taken:
        candidate.build(None, shape)(*on_meta)
    return [one.name for one in taken]


def launch_all() -> None:
    """What ``kernel_cases_quantised`` and others do not launch: tiles that ``--tune full`` tries, and products of few
    rows, of weights of Qwen3-8B."""
    for name, shape in (("quantised_linear", _QUANTISED), ("dense_linear", _DENSE)):
        table, device, large = operation(name), torch.device("meta"), {**shape, "in": 4096, "out": 6144}
        weights = table.weights(large, device, torch.Generator())
        for candidate in table.candidates:
            is_wanted = not candidate.is_quick or candidate.name.startswith("few")
            if is_wanted and candidate.why_not(large, CPU) == why_no_triton(large, CPU):
                run = candidate.build(weights, large)
                run(*table.inputs(large, min(candidate.most_rows, 128), device, torch.Generator()))
    for name in ("absorb_w_uk", "project_w_uv"):
        table, large = operation(name), {**_MAPS, "heads": 16, "nope": 128, "rope": 64, "rank": 512, "value": 128}
        for num_rows in (1, 64):
            inputs = table.inputs(large, num_rows, torch.device("meta"), torch.Generator())
            implementation(name, "triton")(*inputs)
