"""Hits are exact.  Oracle: the definition of a hit, token ids and the whole chain before them equal."""

from __future__ import annotations

import numpy as np
import pytest

from tp_engine.sched import prefix_cache
from tp_engine.sched.prefix_cache import Identity, PrefixCache

SIZE = 4


def tokens(*ids: int) -> bytes:
    """The int32 bytes of token ids."""
    return np.array(ids, dtype=np.int32).tobytes()


def publish(cache: PrefixCache, blocks: list[int], data: bytes, salt: str = "") -> tuple[list[int], Identity | None]:
    """Insert a sequence's blocks; returns those added and the identity of the last."""
    hashes: list[int] = []
    cache.extend_hashes(hashes, salt, data)
    added = cache.insert(blocks, hashes, salt, data)
    cache.check_integrity()
    return added


def match(cache: PrefixCache, data: bytes, salt: str = "", max_blocks: int = 99) -> list[int]:
    """The cached blocks of a sequence."""
    hashes: list[int] = []
    cache.extend_hashes(hashes, salt, data)
    return cache.match(hashes, salt, data, max_blocks)


@pytest.fixture
def cache() -> PrefixCache:
    """Eight blocks of four tokens."""
    return PrefixCache(8, SIZE * 4, key=b"k")


EIGHT = tokens(1, 2, 3, 4, 5, 6, 7, 8)


def test_only_full_equal_blocks_match(cache: PrefixCache) -> None:
    """By definition: the run ends at the first difference, at the bound, and before a part of a block."""
    publish(cache, [5, 2], EIGHT)
    assert match(cache, EIGHT) == [5, 2]
    assert match(cache, EIGHT, max_blocks=1) == [5]
    assert match(cache, tokens(1, 2, 3, 4, 5, 6, 7)) == [5]
    assert match(cache, tokens(1, 2, 3, 4, 5, 6, 7, 9)) == [5]
    assert match(cache, tokens(0, 2, 3, 4, 5, 6, 7, 8)) == []
    assert match(cache, tokens(5, 6, 7, 8)) == []


def test_salts_separate(cache: PrefixCache) -> None:
    """Blocks of a different salt never match; those of the same salt do."""
    publish(cache, [0, 1], EIGHT, salt="a")
    assert match(cache, EIGHT) == [] and match(cache, EIGHT, salt="b") == []
    assert match(cache, EIGHT, salt="a") == [0, 1]


def test_hashes_differ_between_processes() -> None:
    """Two caches with keys of their own name the same tokens differently; one cache always alike."""
    names = []
    for _ in range(2):
        cache, hashes = PrefixCache(1, SIZE * 4), []
        cache.extend_hashes(hashes, "", EIGHT)
        again: list[int] = []
        cache.extend_hashes(again, "", EIGHT)
        assert hashes == again
        names.append(hashes)
    assert names[0] != names[1]


def test_hashes_grow_with_the_sequence(cache: PrefixCache) -> None:
    """Extending block by block gives the same chain as all at once."""
    whole: list[int] = []
    cache.extend_hashes(whole, "s", EIGHT)
    grown: list[int] = []
    for end in range(9):
        cache.extend_hashes(grown, "s", EIGHT[: end * 4])
    assert grown == whole and len(whole) == 2


def test_first_block_stays_canonical(cache: PrefixCache) -> None:
    """Content that is cached keeps its block, and a chain through the copy goes on from it."""
    assert publish(cache, [0], EIGHT[:16]) == ([0], 1)
    assert publish(cache, [3, 4], EIGHT) == ([4], 2)
    assert cache.identity(0) == 1 and cache.identity(4) == 2
    assert match(cache, EIGHT) == [0, 4]


def test_evicted_block_ends_the_chain_for_good(cache: PrefixCache) -> None:
    """After eviction of a parent its child is unreachable, even when the parent's content comes back elsewhere."""
    publish(cache, [0, 1], EIGHT)
    cache.evict([0])
    cache.check_integrity()
    assert match(cache, EIGHT) == []
    publish(cache, [6], EIGHT[:16])
    assert match(cache, EIGHT) == [6]


def test_tails_are_found_behind_their_parent_only(cache: PrefixCache) -> None:
    """By definition: the longest whose tokens all agree and leave one to compute; nothing after eviction."""
    publish(cache, [0], EIGHT[:16])
    parent = cache.identity(0)
    assert cache.insert_tail(4, parent, tokens(5)) and cache.insert_tail(5, parent, tokens(5, 6))
    assert cache.insert_tail(6, "salt", tokens(5, 6, 7))
    assert not cache.insert_tail(7, parent, tokens(5, 6)), "its content is known"
    cache.check_integrity()
    assert sorted(cache.cached_blocks()) == [0, 4, 5, 6]
    assert cache.match_tail(parent, tokens(5, 6, 7, 8, 9)) == (5, 2)
    assert cache.match_tail(parent, tokens(5, 6)) == (4, 1)
    assert cache.match_tail(parent, tokens(5, 9, 9)) == (4, 1)
    assert cache.match_tail(parent, tokens(5)) is None and cache.match_tail(parent, tokens(6, 5)) is None
    assert cache.match_tail("salt", tokens(5, 6, 7, 8)) == (6, 3) and cache.match_tail("", tokens(5, 6, 7)) is None
    cache.evict([5])
    cache.check_integrity()
    assert cache.match_tail(parent, tokens(5, 6, 7)) == (4, 1)


def test_long_sequences_share_what_they_share() -> None:
    """Seventy blocks, then a sequence that is the same up to the fortieth: what is partly known is no obstacle."""
    cache = PrefixCache(200, SIZE * 4, key=b"k")
    ids = list(range(70 * SIZE))
    first, second = tokens(*ids), tokens(*ids[: 40 * SIZE], *(1000 + one for one in ids[40 * SIZE :]))
    publish(cache, list(range(70)), first)
    added, last = publish(cache, list(range(100, 170)), second)
    assert added == list(range(140, 170)) and last == cache.identity(169)
    assert match(cache, first) == list(range(70))
    assert match(cache, second) == [*range(40), *range(140, 170)]
    cache.evict([20, 150, 5])
    cache.check_integrity()
    assert match(cache, first) == list(range(5)) == match(cache, second)


@pytest.mark.parametrize("salt", ["", "other"])
def test_collision_is_no_hit(monkeypatch: pytest.MonkeyPatch, cache: PrefixCache, salt: str) -> None:
    """With a constant hash, other tokens, an equal block after another parent, and another salt still miss."""
    monkeypatch.setattr(prefix_cache, "block_hash", lambda parent, data: 42)
    assert publish(cache, [0], EIGHT[:16]) == ([0], 1)
    assert match(cache, tokens(9, 9, 9, 9), salt) == []
    assert match(cache, EIGHT[:16], "another salt") == []
    assert publish(cache, [1], tokens(9, 9, 9, 9), salt) == ([], None)
    assert match(cache, tokens(1, 2, 3, 4, 1, 2, 3, 4)) == [0]


def test_clear_forgets_all(cache: PrefixCache) -> None:
    """Nothing matches and nothing is cached afterwards."""
    publish(cache, [0, 1], EIGHT)
    cache.clear()
    cache.check_integrity()
    assert len(cache) == 0 and match(cache, EIGHT) == []
