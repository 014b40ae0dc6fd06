"""Attention of prompts by packages: what each is called with, by stand-ins that read the same arguments."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tp_engine.kernels.attention import paged_candidates, prompt_packages
from tp_engine.kernels.attention.paged_candidates import PROMPT
from tp_engine.kernels.attention.plain_attention import paged_attention
from tp_engine.kernels.attention.prompt_packages import PACKAGES, runner
from tp_engine.kernels.candidates import Shape
from tp_engine.kernels.kv_cache.layer_kv import LayerKv

CPU = torch.device("cpu")
SHAPE: Shape = {
    "heads": 4, "kv_heads": 2, "dim": 16, "type": "bfloat16", "cache": "bfloat16", "block": 16, "window": 0, "cap": "",
    "sinks": 0, "fixed": 0,
}  # fmt: skip
GPU: Any = SimpleNamespace(type="cuda")
BY_NAME = {one.name: one for one in PACKAGES}


def attend(query: Any, keys: Any, values: Any, table: Any, lengths: Any, starts: Any, scale: float, window: Any) -> Any:
    """A package's function: causal from the lower right, by the twin; ``window`` counts keys to the left."""
    left = None if window == (-1, 0) else window[0] + 1
    kv = LayerKv(torch.stack((keys, values)))
    return paged_attention(query, kv, table, lengths, starts, scale=scale, window=left)


class FlashAttn:
    """Versions 2 and 3."""

    @staticmethod
    def flash_attn_varlen_func(q: Any, k: Any, v: Any, **given: Any) -> Any:
        lengths, counts = given["cu_seqlens_k"].diff(), given["cu_seqlens_q"].diff()
        assert given["causal"] and (given["max_seqlen_q"], given["max_seqlen_k"]) == (counts.max(), lengths.max())
        starts, scale = given["cu_seqlens_q"], given["softmax_scale"]
        return attend(q, k, v, given["block_table"], lengths, starts, scale, given["window_size"])

    @staticmethod
    def flash_attn_with_kvcache(q: Any, k: Any, v: Any, **given: Any) -> Any:
        assert given["causal"] and given["max_seqlen_q"] == given["cu_seqlens_q"].diff().max()
        starts, scale = given["cu_seqlens_q"], given["softmax_scale"]
        return attend(q, k, v, given["page_table"], given["cache_seqlens"], starts, scale, given["window_size"])


def varlen_attn(q: Any, k: Any, v: Any, starts: Any, ends: Any, max_q: int, max_k: int, **given: Any) -> Any:
    """PyTorch's."""
    lengths = given["seqused_k"]
    assert given["enable_gqa"] and given["num_splits"] == 1 and torch.equal(ends.diff(), lengths)
    assert (max_q, max_k) == (starts.diff().max(), lengths.max())
    return attend(q, k, v, given["block_table"], lengths, starts, given["scale"], given["window_size"])


@pytest.mark.parametrize("window", [0, 20])
@pytest.mark.parametrize("name", ["flash_attn 2", "flash_attn 3", "varlen"])
def test_packages_with_blocks(name: str, window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the twin; one prompt goes on behind a prefix, and a decode's token stands before both."""
    for module in ("flash_attn", "flash_attn_interface"):
        monkeypatch.setitem(sys.modules, module, FlashAttn)
    monkeypatch.setattr(prompt_packages, "flash_attn_version", lambda device: int(name[-1]))
    monkeypatch.setattr(prompt_packages, "_varlen_attn", lambda: varlen_attn)
    query, out, kv, step, scale, sinks = PROMPT.inputs(SHAPE, 17, CPU, torch.Generator().manual_seed(0))
    expected = paged_attention(
        query, kv, step.block_table, step.seq_lens, step.query_start, scale=scale, window=window or None
    )

    def one_more(tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat((tensor[:1], tensor))

    starts = torch.cat((step.query_start[:1], step.query_start + 1))
    behind = step._replace(
        block_table=one_more(step.block_table), seq_lens=one_more(step.seq_lens), query_start=starts, first_request=1
    )
    run = runner(BY_NAME[name.split()[0]], pytest.fail, window or None)
    found = run(one_more(query), one_more(out), kv, behind, scale, sinks)
    assert found[:1].isnan().all() and torch.equal(found[1:], expected)


def test_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the twin, for prompts that are padded; a step with a prompt behind a prefix is left to the own kernel."""
    monkeypatch.setattr(prompt_packages, "sdpa_kernel", lambda backend: nullcontext())
    monkeypatch.setattr(prompt_packages, "LEAST_TOKENS", 16)
    monkeypatch.setattr(paged_candidates, "_LEAST_ROWS_OF_ONE", 30)
    inputs = PROMPT.inputs(SHAPE, 37, CPU, torch.Generator().manual_seed(0))
    query, _, kv, step, scale, _ = inputs
    expected = paged_attention(query, kv, step.block_table, step.seq_lens, step.query_start, scale=scale)
    found = runner(BY_NAME["cudnn"], pytest.fail, None)(*inputs)
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)
    others = PROMPT.inputs(SHAPE, 29, CPU, torch.Generator().manual_seed(0))
    assert runner(BY_NAME["cudnn"], lambda *given: given[1], None)(*others) is others[1]


def test_what_packages_need(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: by hand; the reason of each refusal."""

    def reasons(**changes: Any) -> dict[str, str | None]:
        shape = {**SHAPE, **changes}
        return {one.name: one.why_not(shape, GPU) for one in PROMPT.candidates if one.name in BY_NAME}

    monkeypatch.setattr(prompt_packages, "flash_attn_version", lambda device: None)
    monkeypatch.setattr(prompt_packages, "_varlen_attn", lambda: None)
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    assert reasons() == {
        "flash_attn": "the flash-attn package is not installed",
        "varlen": "this PyTorch's varlen_attn takes no block table",
        "cudnn": None,
    }
    monkeypatch.setattr(prompt_packages, "flash_attn_version", lambda device: 2)
    monkeypatch.setattr(prompt_packages, "_varlen_attn", lambda: varlen_attn)
    assert reasons()["flash_attn"] == reasons()["varlen"] == "it needs blocks of a multiple of 256 tokens"
    assert set(reasons(block=256).values()) == {None}
    assert "without a window" in str(reasons(window=9)["cudnn"])
    for changes, reason in (
        ({"cap": "2.0"}, "no caps"),
        ({"cache": "int8"}, "of 16 bits"),
        ({"dim": 260}, "up to 256"),
    ):
        assert all(reason in str(one) for one in reasons(**changes).values())
    assert all(one.why_not(SHAPE, CPU) == "it needs a GPU" for one in PROMPT.candidates)
