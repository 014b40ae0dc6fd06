"""Which form KV blocks have in the tiers below the pool: the values of ``kv_offloading_codec``, and what they go with.

::

    none              the bytes of the block
    int8, fp8         one byte per element, a scale per token and head (kernels/kv_cache/block_codes.py)
    pca:RANK          one byte per coordinate in a basis of RANK for each head, and such a scale (codecs/pca.py)
    pca:RANK:BOUND    the same with another bound on the error of a block

No torch: the configuration is checked before anything else is imported.
"""

import re
from typing import NamedTuple

from tp_engine.errors import ConfigError

_NAMES = ("none", "int8", "fp8")
_PCA = re.compile(r"pca:([0-9]{1,6})(?::([0-9]*\.?[0-9]+))?")
_DEFAULT_BOUND = 0.25


class PcaSettings(NamedTuple):
    """Coordinates per head, and the largest error of a head's tokens in a block, as a share of their norm."""

    rank: int
    bound: float


def is_lossy(codec: str) -> bool:
    """Return whether K/V that come back differ from those that went."""
    return codec != "none"


def pca_settings(codec: str) -> PcaSettings | None:
    """Return what ``pca:RANK`` and ``pca:RANK:BOUND`` say; None for other codecs."""
    found = _PCA.fullmatch(codec)
    return None if found is None else PcaSettings(int(found[1]), float(found[2] or _DEFAULT_BOUND))


def may_refuse(codec: str) -> bool:
    """Return whether a rank may refuse to store a block, so that each store has to be confirmed by all ranks."""
    return pca_settings(codec) is not None


def check_codec(codec: str, *, size_gib: float, kv_cache_dtype: str, disk_path: str | None) -> None:
    """Raise ``ConfigError`` for a codec that there is not, that has no tier, or that quantises what is quantised."""
    pca = pca_settings(codec)
    if codec not in _NAMES and pca is None:
        raise ConfigError(
            f"kv_offloading_codec is {codec!r}; choose one of {', '.join(_NAMES)}, pca:RANK, pca:RANK:BOUND (such as "
            "pca:64 or pca:64:0.2)"
        )
    if not is_lossy(codec):
        return
    if pca is not None and (pca.rank < 1 or not 0 < pca.bound < 1):
        raise ConfigError(
            f"kv_offloading_codec is {codec!r}: the rank must be at least 1, and the bound, a share of the norm of "
            "K/V, above 0 and below 1"
        )
    if not size_gib:
        raise ConfigError(
            f"kv_offloading_codec is {codec!r}, but kv_offloading_size is 0, so no block leaves the cache: set "
            "kv_offloading_size, or kv_offloading_codec=none"
        )
    if pca is not None and disk_path is not None:
        raise ConfigError(
            f"kv_offloading_codec is {codec!r} and kv_disk_path is {disk_path!r}, but the basis of pca ends with the "
            "process, and blocks on disk could not be read without it: set kv_offloading_codec=int8, or leave "
            "kv_disk_path out"
        )
    if kv_cache_dtype in ("fp8", "int8"):
        raise ConfigError(
            f"kv_offloading_codec is {codec!r}, but the blocks of a cache with kv_cache_dtype={kv_cache_dtype} have 8 "
            "bits already: set kv_offloading_codec=none, which keeps them as they are, or kv_cache_dtype=auto"
        )
