"""The codecs of the tiers below the pool: a table of what ``kv_offloading_codec`` may name.

A new codec is a file with a class that does what ``base.Codec`` says, a place in ``make_codec``, and its name in
``tp_engine/features/tiers/options.py``, which also reads the settings of ``pca``.
"""

import torch

from tp_engine.features.tiers.codecs.base import BlockCopy, Codec
from tp_engine.features.tiers.codecs.eight_bits import EightBits
from tp_engine.features.tiers.codecs.pca import Pca
from tp_engine.features.tiers.options import is_lossy, pca_settings
from tp_engine.kernels.kv_cache.block_codes import BlockForm
from tp_engine.worker.memory.kv_cache import KvCacheShape

_EIGHT_BITS = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


def make_codec(name: str, shape: KvCacheShape, simd_width: int) -> Codec:
    """Return the codec ``name`` for a pool of blocks of ``shape``, whose keys are columns of ``simd_width`` tokens, or
    rows (0)."""
    if not is_lossy(name):
        return BlockCopy(shape.block_bytes, repr((shape, simd_width)))
    assert shape.layout.is_uniform, "the configuration refuses layers of several shapes"
    largest = max(shape.layout.groups, key=lambda group: len(group.layers))
    form = BlockForm(
        num_parts=largest.num_parts * len(largest.layers),
        block_size=shape.block_size,
        num_kv_heads=largest.local_num_kv_heads,
        head_dim=largest.head_dim,
        dtype=shape.dtype,
        simd_width=simd_width,
    )
    assert form.block_bytes == shape.block_bytes, "the configuration refuses a quantised cache"
    pca = pca_settings(name)
    if pca is None:
        return EightBits(form, _EIGHT_BITS[name])
    return Pca(form, pca.rank, pca.bound, [group.num_parts * len(group.layers) for group in shape.layout.groups])
