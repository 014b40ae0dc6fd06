"""Storing keys and values by slot (row B9): the PyTorch twin, the interpreted kernel, and its compilation."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tp_engine import env
from tp_engine.kernels.store_kv import store_kv
from tp_engine.kernels.triton_support import has_triton

needs_triton = pytest.mark.skipif(not has_triton(), reason="triton is not installed")
ROOT = Path(__file__).parents[2]
TYPE_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.bfloat16])
def test_twin_stores_by_slot_and_skips_padding(cache_dtype: torch.dtype) -> None:
    """Oracle: an assignment per token."""
    key, value = torch.randn(5, 2, 8), torch.randn(5, 2, 8)
    slots = [9, -1, 0, 4, -1]
    cache = torch.zeros(2, 3, 4, 2, 8, dtype=cache_dtype)
    expected = cache.clone()
    for token, slot in enumerate(slots):
        if slot >= 0:
            expected[0, slot // 4, slot % 4] = key[token]
            expected[1, slot // 4, slot % 4] = value[token]
    store_kv(key, value, cache, torch.tensor(slots))
    torch.testing.assert_close(cache, expected, rtol=0, atol=0)


def test_twin_with_padding_only() -> None:
    """Oracle: nothing is stored."""
    cache = torch.zeros(2, 3, 4, 1, 8)
    store_kv(torch.randn(2, 1, 8), torch.randn(2, 1, 8), cache, torch.tensor([-1, -1]))
    assert cache.count_nonzero() == 0


@needs_triton
@pytest.mark.parametrize("cases", ["kernel_cases_store_kv", "kernel_cases_triton_backend"])
def test_interpreted_kernel(cases: str) -> None:
    """Oracle: the PyTorch twin, bit by bit, and for the whole backend loops over tokens.

    A process of its own, as Triton reads TRITON_INTERPRET when it is imported.
    """
    result = subprocess.run(
        [sys.executable, "-m", f"tests.unit.{cases}"],
        cwd=ROOT,
        env=env.child_environment(TRITON_INTERPRET="1"),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert "all cases agree" in result.stdout


@needs_triton
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("dtype", TYPE_NAMES, ids=str)
def test_kernel_compiles_for(capability: int, dtype: torch.dtype) -> None:
    """Oracle: Triton's own compiler, which needs no GPU; slots are addressed with 64 bits."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from tp_engine.kernels.store_kv_triton import block_for, store_kv_kernel

    pointer = f"*{TYPE_NAMES[dtype]}"
    for width in (128, 3 * 80, 8 * 128):
        signature = dict.fromkeys(("key", "value", "key_cache", "value_cache"), pointer)
        signature |= {"slot_mapping": "*i64", "key_stride": "i32", "value_stride": "i32"}
        signature |= {"WIDTH": "constexpr", "BLOCK": "constexpr"}
        constants = {"WIDTH": width, "BLOCK": block_for(width)}
        source = ASTSource(fn=store_kv_kernel, signature=signature, constexprs=constants)
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32))
        assert f"arith.constant {width} : i64" in compiled.asm["ttir"]
