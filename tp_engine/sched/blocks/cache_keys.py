"""CacheKeys: what precedes a sequence's first block in the prefix cache, so that equal tokens with other K/V never
match.

::

    cache_salt --------------------+
    number of the model's variant -+--> cache key --> digest, if there is a disk tier --> ``BlockName`` of first blocks
    version of the weights --------+

A variant is what computes other K/V from equal tokens, such as an adapter in the place of another (``Variants``).

With neither variant nor new weights the cache key is the salt itself, and blocks on disk are found again by the next
process.  Any other cache key has something in it that only this process knows, so that blocks of one process are never
taken for those of another that counts its variants and versions alike.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable
from typing import NamedTuple, TypeAlias

from tp_engine.requests.request import EngineRequest
from tp_engine.sched.sequence import RequestGroup


class Variant(NamedTuple):
    """A variant of the model by a ``number`` that no other has or had, 0 for the model alone, and its ``name``."""

    number: int = 0
    name: str = ""


THE_MODEL = Variant()

Variants: TypeAlias = Iterable[Callable[[EngineRequest], Variant]]
"""What says which variant a request runs; of several that may say so, the first."""


class CacheKey(str):
    """A cache key, and what it was made from: a ``salt``, empty for none, and the ``variant``."""

    __slots__ = ("salt", "variant")
    salt: str
    variant: Variant

    def __new__(cls, text: str, salt: str, variant: Variant) -> CacheKey:
        key = super().__new__(cls, text)
        key.salt, key.variant = salt, variant
        return key


class CacheKeys:
    """Makes the cache keys of one process; ``digests`` hide them and keep equal ones equal (the disk tier's)."""

    def __init__(self, digests: Iterable[Callable[[str], str]] = (), variants: Variants = ()) -> None:
        self._digests, self._variants = tuple(digests), tuple(variants)
        self._process = secrets.token_hex(16)
        self._version = 0

    def renew(self, groups: Iterable[RequestGroup]) -> None:
        """Give these requests new cache keys, for other weights; no cache key made before is made again."""
        self._version += 1
        for group in groups:
            group.cache_key = self.of_request(group.request)

    def of_request(self, request: EngineRequest) -> str:
        """Return the cache key of a request's sequences."""
        found = (variant_of(request) for variant_of in self._variants)
        return self.of(request.params.cache_salt or "", next((one for one in found if one.number), THE_MODEL))

    def of(self, salt: str, variant: Variant = THE_MODEL) -> str:
        """Return the cache key of sequences with a user's ``salt``, empty for none: a ``CacheKey``, or no text at
        all."""
        cache_key = salt
        if variant.number or self._version or salt.startswith("\0"):  # a salt cannot spell such a cache key
            cache_key = f"\0{self._process}:{variant.number}:{self._version}:{salt}"
        for digest in self._digests:
            cache_key = digest(cache_key)
        return CacheKey(cache_key, salt, variant) if cache_key else cache_key
