"""Which form KV blocks have in the tiers below the pool: the values of ``kv_offloading_codec``, read and checked.

::

    none          the bytes of the block
    int8, fp8     one byte per element, a scale per token and head                  kernels/block_codes.py
    pca:RANK      RANK numbers per token for keys, and for values, of each layer     worker/codecs/pca.py
    pca:RANK:BOUND   the same; blocks whose relative error is above BOUND are not kept

No torch: the configuration is checked before anything else is imported.
"""

from __future__ import annotations

from dataclasses import dataclass

from tp_engine.errors import ConfigError

KINDS = ("none", "int8", "fp8", "pca")
DEFAULT_BOUND = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecChoice:
    """``kind`` is one of ``KINDS``; ``rank`` and ``bound`` are those of pca."""

    kind: str
    rank: int = 0
    bound: float = DEFAULT_BOUND

    @classmethod
    def of(cls, text: str) -> CodecChoice:
        """The choice that ``kv_offloading_codec`` names.  Raises ``ConfigError``."""
        kind, *numbers = text.split(":")
        if kind not in KINDS or (kind != "pca" and numbers):
            raise ConfigError(f"kv_offloading_codec is {text!r}; choose none, int8, fp8, or pca:RANK such as pca:64")
        if kind != "pca":
            return cls(kind=kind)
        try:
            rank, bound = int(numbers[0]), float(numbers[1]) if len(numbers) > 1 else DEFAULT_BOUND
        except (IndexError, ValueError):
            rank, bound = 0, 0.0
        if rank < 1 or not 0 < bound < 1 or len(numbers) > 2:
            raise ConfigError(
                f"kv_offloading_codec is {text!r}; it is pca:RANK with a whole number of at least 1, such as pca:64, "
                f"and may end with the largest relative error of a block, above 0 and below 1, such as pca:64:0.05"
            )
        return cls(kind=kind, rank=rank, bound=bound)

    @property
    def is_lossy(self) -> bool:
        """Whether K/V that come back differ from those that went."""
        return self.kind != "none"

    def check_width(self, width: int) -> None:
        """Raise ``ConfigError`` if a rank's keys of a token are fewer than ``rank`` numbers."""
        if self.rank > width:
            raise ConfigError(
                f"kv_offloading_codec is pca:{self.rank}, but the keys of a token and layer are {width} numbers on "
                f"each rank; set pca:RANK with at most {width}, and far fewer to save memory"
            )


def check_codec(text: str, *, size_gib: float, kv_cache_dtype: str) -> None:
    """Raise ``ConfigError`` for a codec that is unknown, has no tier, or quantises what is quantised already."""
    choice = CodecChoice.of(text)
    if not choice.is_lossy:
        return
    if not size_gib:
        raise ConfigError(
            f"kv_offloading_codec is {text!r}, but kv_offloading_size is 0, so no block leaves the cache: set "
            "kv_offloading_size, or kv_offloading_codec=none"
        )
    if kv_cache_dtype in ("fp8", "int8"):
        raise ConfigError(
            f"kv_offloading_codec is {text!r}, but the blocks of a cache with kv_cache_dtype={kv_cache_dtype} have 8 "
            "bits already: set kv_offloading_codec=none, which keeps them as they are, or kv_cache_dtype=auto"
        )
