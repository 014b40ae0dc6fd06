"""The codecs int8 and fp8: one byte per element and a scale per token and head.

``kernels/kv_cache/block_codes.py`` has the format.

Of the same size, int8 has a tenth of the error: its steps are equally fine everywhere, and the elements of a head's
vector are of similar size.
"""

import torch

from tp_engine.features.tiers.codecs.base import Codec, fingerprint_of
from tp_engine.kernels.kv_cache.block_codes import BlockForm, Pairs
from tp_engine.kernels.ops import op
from tp_engine.layers.upload import upload
from tp_engine.plan import IntArray


class EightBits(Codec):
    """Blocks of ``form`` as ``codes``: int8 or float8_e4m3fn."""

    def __init__(self, form: BlockForm, codes: torch.dtype) -> None:
        self._form, self._codes = form, codes
        self.blob_bytes = form.blob_bytes

    def encode(self, pool: torch.Tensor, blobs: torch.Tensor, pairs: IntArray) -> None:
        op("encode_blocks", pool.device.type)(pool, blobs, _near(pairs, pool), self._form, self._codes)

    def decode(self, blobs: torch.Tensor, pool: torch.Tensor, pairs: IntArray) -> None:
        op("decode_blocks", pool.device.type)(blobs, pool, _near(pairs, pool), self._form, self._codes)

    def fingerprint(self) -> bytes:
        return fingerprint_of(str(self._codes), self._form)


def _near(pairs: IntArray, pool: torch.Tensor) -> Pairs:
    """``pairs`` where the pool is."""
    return pairs if pool.device.type == "cpu" else upload(pairs, pool.device)
