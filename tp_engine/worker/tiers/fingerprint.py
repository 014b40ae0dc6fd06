"""What blocks of the KV cache depend on, as 16 bytes: blocks of another process are used only if all of it is equal.

::

    weights    the names, types and shapes of all tensors, and a page of each (weights/fingerprint.py)
    model      the ModelSpec as read: layers, rope, norms, overrides included; max_model_len, which chooses rope scales
    types      of weights, of the cache, the quantization and the codec of the tiers
    layout     block size, groups of layers, this rank's heads, and what the codec makes of a block, in which order
    ranks      this rank's number and that of all, and whether experts stay whole
    kernel     attention backends
    format     of this fingerprint, and the version of the program

Weights count by content, not by the model's name.  Reading all of them would take as long as loading them, so pages are
sampled: a tensor that was trained on differs in nearly every page.
"""

from collections.abc import Sequence
from pathlib import Path

import xxhash

from tp_engine.distributed.rank import RankInfo
from tp_engine.version import __version__
from tp_engine.weights.fingerprint import weights_fingerprint
from tp_engine.worker.codecs.base import Codec
from tp_engine.worker.effective_config import EffectiveConfig
from tp_engine.worker.memory.kv_cache import KvCacheShape
from tp_engine.worker.tiers.disk_files import Identity

_FORMAT = 1


def make_identity(
    effective: EffectiveConfig, info: RankInfo, shape: KvCacheShape, backends: Sequence[str], *, codec: Codec
) -> Identity:
    """Return the identity of this rank's blocks, which ``codec`` writes into slots; ``backends`` are those of the
    groups."""
    config = effective.config
    parts = {
        "weights": _weights(effective.model_path, config.load_format, config.seed),
        "model": _digest(repr(effective.model), str(effective.max_model_len)),
        "types": _digest(config.dtype, config.kv_cache_dtype, str(config.quantization), config.kv_offloading_codec),
        "layout": _digest(
            str(config.block_size), repr(effective.model.kv_layout), repr(shape), codec.fingerprint().hex()
        ),
        "ranks": f"{info.rank} of {info.world_size}, experts whole: {config.enable_expert_parallel}",
        "kernel": _digest(config.device, *backends),
        "format": f"{_FORMAT} of {__version__}",
    }
    whole = xxhash.xxh3_128_digest("\n".join(f"{name}={value}" for name, value in sorted(parts.items())).encode())
    return Identity(whole, parts)


def _digest(*texts: str) -> str:
    return xxhash.xxh3_128_hexdigest("\0".join(texts).encode())


def _weights(path: Path, load_format: str, seed: int) -> str:
    """Of the checkpoint's tensors, by content; made-up weights follow from their seed."""
    return f"dummy {seed}" if load_format == "dummy" else weights_fingerprint(path)
