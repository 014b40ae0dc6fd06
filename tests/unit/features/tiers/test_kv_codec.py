"""Codecs of the host tier: what the configuration takes and refuses, slots per GiB, blocks that come back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tp_engine.config import EngineConfig
from tp_engine.errors import ConfigError
from tp_engine.features.tiers.block_moves import BlockMover, staging_bytes
from tp_engine.features.tiers.codecs import make_codec
from tp_engine.features.tiers.codecs.base import Codec
from tp_engine.features.tiers.rank_host import HostTierWorker, choose_slots
from tp_engine.model_config.kv_layout import KvKind, lay_out
from tp_engine.plan import NO_PAIRS
from tp_engine.system.units import GIB
from tp_engine.worker.effective_config import resolve
from tp_engine.worker.memory.host_memory import HostMemory
from tp_engine.worker.memory.kv_cache import KvBlocks, KvCacheShape

CPU = torch.device("cpu")


def shape_of(dtype: torch.dtype, **changes: int) -> KvCacheShape:
    given = {"num_layers": 3, "block_size": 8, "num_kv_heads": 2, "head_dim": 16} | changes
    kind = KvKind(window=None, num_kv_heads=given["num_kv_heads"], head_dim=given["head_dim"])
    return KvCacheShape(layout=lay_out([kind] * given["num_layers"]), block_size=given["block_size"], dtype=dtype)


def codec_of(text: str, shape: KvCacheShape, simd_width: int = 0) -> Codec:
    return make_codec(text, shape, simd_width)


@pytest.mark.parametrize(
    "text", ["int4", "", "int8:3", "svd:4", "pca", "pca:", "pca:8:", "pca:-1", "pca:8:0.1:2", "pca:8:1e-1"]
)
def test_unknown_names_are_refused(text: str) -> None:
    """Oracle: the value and the choices."""
    with pytest.raises(ConfigError, match=r"kv_offloading_codec is '.*'; choose one of none, int8, fp8, pca:RANK"):
        EngineConfig(kv_offloading_size=1, kv_offloading_codec=text)


def test_codec_without_a_tier_is_refused() -> None:
    """Oracle: both settings are named; none needs no tier."""
    with pytest.raises(ConfigError, match=r"is 'int8', but kv_offloading_size is 0.*set kv_offloading_size, or kv_off"):
        EngineConfig(kv_offloading_codec="int8")
    EngineConfig(kv_offloading_codec="none")


@pytest.mark.parametrize("dtype", ["fp8", "int8"])
@pytest.mark.parametrize("text", ["int8", "fp8", "pca:8"])
def test_quantised_caches_have_no_other_codec(dtype: str, text: str) -> None:
    """Oracle: the rule; none keeps the 8 bits as they are."""
    with pytest.raises(ConfigError, match=rf"kv_cache_dtype={dtype} have 8 bits already: set kv_offloading_codec=none"):
        EngineConfig(kv_offloading_size=1, kv_offloading_codec=text, kv_cache_dtype=dtype)
    EngineConfig(kv_offloading_size=1, kv_cache_dtype=dtype)


@pytest.mark.parametrize("text", ["int8", "fp8"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_blocks_per_gib(text: str, head_dim: int) -> None:
    """Oracle: at least 1.9 times the slots of bfloat16 blocks in the same memory."""
    shape = shape_of(torch.bfloat16, num_layers=12, block_size=16, num_kv_heads=4, head_dim=head_dim)
    given: dict[str, Any] = {"world_size": 2, "local_world_size": 2, "promised_bytes": 0}
    exact, coded = (
        choose_slots(4, codec_of(one, shape).blob_bytes, memory=HostMemory(total=64 * GIB, free=48 * GIB), **given)
        for one in ("none", text)
    )
    assert coded >= 1.9 * exact


@pytest.mark.parametrize("text", ["int8", "fp8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_blocks_come_back_through_slots(dtype: torch.dtype, text: str) -> None:
    """Oracle: the values before, within half a step of the largest (int8) or of each (fp8); counters by hand."""
    shape = shape_of(dtype)
    codec, blocks = codec_of(text, shape), KvBlocks.allocate(shape, 6, CPU)
    blocks.views[0].cache.copy_(torch.randn(blocks.views[0].cache.shape, generator=torch.Generator().manual_seed(1)))
    before = blocks.views[0].cache.float()
    slots = torch.zeros(4, codec.blob_bytes, dtype=torch.uint8)
    mover = BlockMover(blocks.raw, slots, codec)
    mover.move(np.array([[5, 0], [2, 3]], dtype=np.int32), NO_PAIRS)
    mover.move(NO_PAIRS, np.array([[3, 0], [0, 1]], dtype=np.int32))
    found = blocks.views[0].cache.float()
    assert torch.equal(found[2:], before[2:]) and not slots[1:3].any()
    for target, source in ((0, 2), (1, 5)):
        given = before[source]
        step = given.abs().amax(-1, keepdim=True) / 250 if text == "int8" else given.abs() / 15 + 0.01
        assert bool(((found[target] - given).abs() <= step + 0.004 * given.abs()).all())
        assert not torch.equal(found[target], given)
    assert (mover.counters().stored_bytes, mover.counters().loaded_bytes) == (2 * codec.blob_bytes,) * 2


def test_a_tier_has_slots_of_the_codec_s_size() -> None:
    """Oracle: bytes of a blob; the shape of what MemoryMonitor watches."""
    shape = shape_of(torch.bfloat16)
    codec, blocks = codec_of("int8", shape), KvBlocks.allocate(shape, 2, CPU)
    tier = HostTierWorker(blocks.raw, 5, codec)
    assert tier.slots.shape == (5, 3 * 2 * 8 * 2 * (16 + 2))
    tier.close()


def test_pca_is_for_this_process_and_host(checkpoint: Callable[..., Path]) -> None:
    """Oracle: the values and the remedy; int8 goes with a disk tier, and with several hosts."""
    options: dict[str, Any] = {"model": str(checkpoint("qwen3")), "device": "cpu", "kv_offloading_size": 1}
    disk: dict[str, Any] = {"kv_disk_path": "/nowhere", "kv_disk_size": 1}
    with pytest.raises(ConfigError, match=r"is 'pca:8' and kv_disk_path is '/nowhere'.*codec=int8, or leave kv_disk"):
        EngineConfig(**options, **disk, kv_offloading_codec="pca:8")
    EngineConfig(**options, **disk, kv_offloading_codec="int8")
    spread = {**options, "tensor_parallel_size": 2}
    with pytest.raises(ConfigError, match=r"is pca:8, whose stores .* on 2 hosts; set kv_offloading_codec=int8"):
        resolve(EngineConfig(**spread, kv_offloading_codec="pca:8"), num_hosts=2)
    resolve(EngineConfig(**spread, kv_offloading_codec="int8"), num_hosts=2)


def test_fingerprints_tell_codecs_apart() -> None:
    """Oracle: any change of codec, shape, type or order is another fingerprint, and an equal choice the same one."""
    shapes = (shape_of(torch.bfloat16), shape_of(torch.float16), shape_of(torch.bfloat16, head_dim=32))
    found = [
        codec_of(text, shape, simd_width).fingerprint()
        for text in ("none", "int8", "fp8")
        for shape in shapes
        for simd_width in (0, 8)
    ]
    assert len(set(found)) == len(found) and {len(one) for one in found} == {16}
    assert codec_of("int8", shape_of(torch.bfloat16)).fingerprint() == found[6]


def test_staging_on_gpus_is_bounded() -> None:
    """Oracle: by hand: at most 32 MiB, at least a blob; none for blocks that are copied as they are."""
    small = shape_of(torch.bfloat16)
    large = shape_of(torch.bfloat16, num_layers=80, block_size=256, num_kv_heads=8, head_dim=128)
    assert staging_bytes(codec_of("none", small)) == 0
    assert 31 << 20 < staging_bytes(codec_of("int8", small)) <= 32 << 20
    assert staging_bytes(codec_of("int8", large)) == codec_of("int8", large).blob_bytes


@pytest.mark.parametrize("codec", ["int8", "fp8"])
def test_layers_of_several_shapes_have_no_lossy_codec(codec: str, checkpoint: Callable[..., Path]) -> None:
    """Oracle: the value, the rule, the remedy; none copies bytes, and works."""
    options: dict[str, Any] = {"model": str(checkpoint("gemma4")), "device": "cpu", "kv_offloading_size": 1}
    with pytest.raises(ConfigError, match=rf"is {codec}, but layers of this Gemma4ForCausalLM differ.*codec=none"):
        resolve(EngineConfig(**options, kv_offloading_codec=codec))
    resolve(EngineConfig(**options))
