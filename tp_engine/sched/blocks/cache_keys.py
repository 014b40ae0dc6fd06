"""CacheKeys: what precedes a sequence's first block in the prefix cache, so that equal tokens with other K/V never
match.

::

    cache_salt --------------------+
    generation of the adapter -----+--> cache key --> digest, if there is a disk tier --> ``BlockName`` of first blocks
    version of the weights --------+

With neither adapter nor new weights the cache key is the salt itself, and blocks on disk are found again by the next
process.  Any other cache key has something in it that only this process knows, so that blocks of one process are never
taken for those of another that counts its generations and versions alike.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable

from tp_engine.requests.request import EngineRequest
from tp_engine.sched.sequence import RequestGroup


class CacheKey(str):
    """A cache key, and what it was made from: a ``salt``, empty for none, and the ``adapter`` of a ``generation``, 0
    for none."""

    __slots__ = ("adapter", "generation", "salt")
    salt: str
    adapter: str
    generation: int

    def __new__(cls, text: str, salt: str = "", adapter: str = "", generation: int = 0) -> CacheKey:
        key = super().__new__(cls, text)
        key.salt, key.adapter, key.generation = salt, adapter, generation
        return key


class CacheKeys:
    """Makes the cache keys of one process; ``digests`` hide them and keep equal ones equal (the disk tier's)."""

    def __init__(self, digests: Iterable[Callable[[str], str]] = ()) -> None:
        self._digests = tuple(digests)
        self._process = secrets.token_hex(16)
        self._version = 0

    def renew(self, groups: Iterable[RequestGroup]) -> None:
        """Give these requests new cache keys, for other weights; no cache key made before is made again."""
        self._version += 1
        for group in groups:
            group.cache_key = self.of_request(group.request)

    def of_request(self, request: EngineRequest) -> str:
        """Return the cache key of a request's sequences."""
        return self.of(request.params.cache_salt or "", request.adapter_generation, request.adapter)

    def of(self, salt: str, adapter_generation: int = 0, adapter: str = "") -> str:
        """Return the cache key of sequences with a user's ``salt``, empty for none: a ``CacheKey``, or no text at
        all."""
        cache_key = salt
        if adapter_generation or self._version or salt.startswith("\0"):  # a salt can not spell such a cache key
            cache_key = f"\0{self._process}:{adapter_generation}:{self._version}:{salt}"
        for digest in self._digests:
            cache_key = digest(cache_key)
        return CacheKey(cache_key, salt, adapter, adapter_generation) if cache_key else cache_key
