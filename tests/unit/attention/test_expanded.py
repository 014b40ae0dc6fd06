"""The expanded form of latent attention: what libraries and the backend are called with, and for which shapes."""

from __future__ import annotations

import re
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.unit.attention.test_mla import Maps, expected
from tests.unit.kernels.kernel_harness import needs_triton
from tp_engine.attention import expanded
from tp_engine.attention.base import AttentionShape
from tp_engine.attention.expanded import OPERATION, attend_by_torch, tile_bytes
from tp_engine.attention.triton_mla import TritonMLABackend, kernels_of_latents
from tp_engine.kernels.attention import prompt_packages
from tp_engine.kernels.candidates import Shape, key_of

DEEPSEEK: Shape = {"heads": 16, "nope": 128, "rope": 64, "value": 128, "type": "bfloat16"}
GPU: Any = SimpleNamespace(type="cuda")
CANDIDATES = {one.name: one for one in OPERATION.candidates}


@pytest.mark.parametrize("num_queries", [40, 41, 16, 15])
def test_cudnn_takes_chunks_that_begin_their_request(num_queries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: plain PyTorch, in float64.  A stand-in for cuDNN is called with widths as they are, and one of four
    lengths between powers of two; what has a prefix, or is short, is a kernel's."""
    monkeypatch.setattr(prompt_packages, "sdpa_kernel", lambda _: nullcontext())
    monkeypatch.setattr(expanded, "LEAST_TOKENS", 16)
    monkeypatch.setattr(expanded, "_tiles", lambda *_: attend_by_torch)
    lengths: list[tuple[int, ...]] = []
    attend = prompt_packages.causal_by_cudnn

    def noted(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
        lengths.append((len(query), len(keys), query.shape[2], values.shape[2]))
        return attend(query, keys, values, scale)

    monkeypatch.setattr(expanded, "causal_by_cudnn", noted)
    shape: Shape = {"heads": 3, "nope": 6, "rope": 2, "value": 4, "type": "float32"}
    run = CANDIDATES["cudnn"].build(None, shape)
    maps, scale = Maps(torch.randn(3, 10, 12, dtype=torch.float64), 6, 2), 0.3
    for num_keys in (num_queries, num_queries + 7):
        rows, query = torch.randn(num_keys, 1, 14), torch.randn(num_queries, 3, 8)
        made, out = maps.expand(rows[:, 0, :12].double(), slice(None)), torch.empty(num_queries, 3, 4)
        assert run(query, out, made.float(), rows[:, 0, 12:], scale) is out
        wanted = expected(query.double(), rows.double(), maps, scale)
        torch.testing.assert_close(out.double(), wanted, rtol=0, atol=1e-5)
    assert lengths == {40: [(40, 40, 8, 4)], 41: [(48, 48, 8, 4)], 16: [(16, 16, 8, 4)], 15: []}[num_queries]


@pytest.mark.parametrize(
    ("capability", "version", "shape", "reason"),
    [
        ((9, 0), 91100, DEEPSEEK, None),
        ((10, 3), 92300, DEEPSEEK, None),
        ((9, 0), 90800, DEEPSEEK, r"from 9\.11 on"),
        ((12, 0), 92300, DEEPSEEK, "compute capability 9.0"),
        ((9, 0), 91100, {**DEEPSEEK, "value": 192}, "values of 128"),
        ((9, 0), 91100, {**DEEPSEEK, "type": "float32"}, "16 bits"),
    ],
)
def test_cudnn_is_for_some_widths(
    capability: tuple[int, int], version: int, shape: Shape, reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: PyTorch's own rules for cuDNN (``sdp_utils.cpp``), by hand."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: version)
    monkeypatch.setattr(expanded, "shared_memory", lambda _: 227 << 10)
    monkeypatch.setattr(expanded, "why_no_triton", lambda *_: None)
    found = CANDIDATES["cudnn"].why_not(shape, GPU)
    assert found is None if reason is None else found is not None and re.search(reason, found) is not None


def test_tiles_fit_their_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: by hand: 128 queries of 192 numbers, 64 keys of 192 and values of 128, twice, of two bytes."""
    monkeypatch.setattr(expanded, "why_no_triton", lambda *_: None)
    assert tile_bytes((128, 64, 8, 2), DEEPSEEK) == 2 * (128 * 192 + 2 * 64 * 320) + 2048
    fitting = {}
    for kib in (99, 163, 227):
        monkeypatch.setattr(expanded, "shared_memory", lambda _, kib=kib: kib << 10)
        tiles = [
            name for name, one in CANDIDATES.items() if name.startswith("tiles") and not one.why_not(DEEPSEEK, GPU)
        ]
        fitting[kib] = len(tiles)
        in_float32 = CANDIDATES["tiles-32x32-w4-s1"].why_not({**DEEPSEEK, "type": "float32"}, GPU)
        assert in_float32 is None and CANDIDATES["tiles-64x64-w4-s2"].why_not({**DEEPSEEK, "type": "float32"}, GPU)
    assert fitting == {99: 2, 163: 4, 227: 5}


@needs_triton
@pytest.mark.parametrize("room", [1, 1 << 20], ids=["head by head", "all heads"])
def test_the_backend_asks_for_what_the_tuner_is_told(room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the paper's formulas in float64; the shape that ``kernels_of_latents`` names, asked for once."""
    maps64 = Maps(torch.randn(3, 10, 12, dtype=torch.float64), 6, 2)
    maps = Maps(maps64.up.float(), 6, 2)
    layer = AttentionShape(num_heads=3, num_kv_heads=1, head_dim=14, scale=0.2, value_dim=12, latent=maps)
    monkeypatch.setitem(expanded._MAX_EXPANDED_ELEMENTS, "cpu", room)
    asked: list[str] = []

    def chosen(name: str, shape: Shape, *_: object) -> Any:
        asked.append(key_of(name, shape))
        return attend_by_torch

    monkeypatch.setattr("tp_engine.attention.triton_mla.chosen_run", chosen)
    backend, rows, query = TritonMLABackend(), torch.randn(50, 1, 14), torch.randn(30, 3, 8)
    for _ in range(2):
        found = backend.attend_expanded(query, rows, layer)
        torch.testing.assert_close(
            found.double(), expected(query.double(), rows.double(), maps64, layer.scale), rtol=0, atol=1e-5
        )
    needs: Any = SimpleNamespace(dtype=torch.float32, kv_cache_dtype=torch.float32, block_size=16)
    told = [key_of(name, shape) for name, shape in kernels_of_latents([layer], needs)]
    assert asked == told[-1:] == ["expanded_prompt_attention heads=3 nope=6 rope=2 value=4 type=float32"]
