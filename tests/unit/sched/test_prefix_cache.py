"""Hits are exact.  Oracle: the definition of a hit: equal token ids and an equal chain of blocks before them."""

from __future__ import annotations

import random

import numpy as np
import pytest

from tp_engine.sched.blocks.lru_queue import BlockIds
from tp_engine.sched.blocks.prefix_cache import NO_BLOCK, Place, PrefixCache, is_lost

SIZE = 4


def tokens(*ids: int) -> bytes:
    """The int32 bytes of token ids."""
    return np.array(ids, dtype=np.int32).tobytes()


def publish(cache: PrefixCache, blocks: list[int], data: bytes, place: Place = "") -> tuple[list[int], Place]:
    """Insert blocks after ``place``; returns the added blocks and the place behind the last."""
    added, place = cache.insert(np.array(blocks, dtype=np.intp)[:, None], place, data)
    cache.check_integrity()
    return list(map(int, added)), place


def match(cache: PrefixCache, data: bytes, salt: str = "", max_blocks: int = 99) -> list[int]:
    """The cached blocks of a sequence."""
    return list(map(int, cache.match(salt, data, max_blocks)[0][:, 0]))


def insert_tail(cache: PrefixCache, block: int, place: Place, data: bytes) -> bool:
    """Publish a tail of one group."""
    return cache.insert_tail(np.array([block]), place, data)


def match_tail(cache: PrefixCache, place: Place, data: bytes, num_tokens: int) -> tuple[int, int] | None:
    """The block and the length of the longest tail, in one group."""
    found = cache.match_tail(place, data, num_tokens)
    return None if found is None else (int(found[0][0]), found[1])


def ids(*blocks: int) -> BlockIds:
    """Block ids as an array."""
    return np.array(blocks, dtype=np.intp)


def evict(cache: PrefixCache, *blocks: int) -> None:
    """The evicted blocks, in order."""
    cache.evict(np.array(blocks, dtype=np.intp))
    cache.check_integrity()


@pytest.fixture
def cache() -> PrefixCache:
    """Eight blocks of four tokens."""
    return PrefixCache(8, SIZE * 4)


EIGHT = tokens(1, 2, 3, 4, 5, 6, 7, 8)


def test_only_full_equal_blocks_match(cache: PrefixCache) -> None:
    """By definition: the run ends at the first difference, at the bound, and before a partial block."""
    publish(cache, [5, 2], EIGHT)
    assert match(cache, EIGHT) == [5, 2]
    assert match(cache, EIGHT, max_blocks=1) == [5]
    assert match(cache, tokens(1, 2, 3, 4, 5, 6, 7)) == [5]
    assert match(cache, tokens(1, 2, 3, 4, 5, 6, 7, 9)) == [5]
    assert match(cache, tokens(0, 2, 3, 4, 5, 6, 7, 8)) == []
    assert match(cache, tokens(5, 6, 7, 8)) == []


def test_salts_separate(cache: PrefixCache) -> None:
    """Oracle: blocks of a different salt never match; those of the same salt do."""
    publish(cache, [0, 1], EIGHT, "a")
    assert match(cache, EIGHT) == [] and match(cache, EIGHT, salt="b") == []
    assert match(cache, EIGHT, salt="a") == [0, 1]


def test_first_block_stays_canonical(cache: PrefixCache) -> None:
    """Oracle: cached content keeps its block, and a chain through the copy continues from that block."""
    assert publish(cache, [0], EIGHT[:16])[0] == [0]
    assert publish(cache, [3, 4], EIGHT)[0] == [4]
    assert match(cache, EIGHT) == [0, 4]
    assert publish(cache, [6, 7], EIGHT)[0] == []


def test_equal_tokens_after_another_parent_are_no_hit(cache: PrefixCache) -> None:
    """Oracle: a block matches only behind the parent of its computation: a block, a salt or the middle of a run."""
    publish(cache, [0, 1], tokens(1, 2, 3, 4, 1, 2, 3, 4))
    assert match(cache, tokens(1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3, 4)) == [0, 1]
    assert match(cache, tokens(9, 9, 9, 9, 1, 2, 3, 4)) == []
    assert publish(cache, [2, 3], tokens(9, 9, 9, 9, 1, 2, 3, 4))[0] == [2, 3]
    assert match(cache, tokens(9, 9, 9, 9, 1, 2, 3, 4, 5, 6, 7, 8)) == [2, 3]
    assert match(cache, tokens(1, 2, 3, 4), "another salt") == []


def test_evicted_block_ends_the_chain_for_good(cache: PrefixCache) -> None:
    """Oracle: after the eviction of a parent its child is unreachable, even when the parent's content returns in
    another block, and no block is added behind it."""
    _, place = publish(cache, [0, 1], EIGHT)
    evict(cache, 0)
    assert match(cache, EIGHT) == [] and cache.cached_blocks() == [1]
    publish(cache, [6], EIGHT[:16])
    assert match(cache, EIGHT) == [6]
    assert publish(cache, [2], EIGHT[:16], place) == ([], place)
    evict(cache, 1, 6)
    assert cache.cached_blocks() == []


def test_what_followed_an_evicted_block_is_found_again_behind_its_own(cache: PrefixCache) -> None:
    """By hand: 3 equals 0 and is not cached, so 4 follows 0; once 0 is gone, 3 and 4 enter as one run, and 4 leaves its
    old run.

    A fork does this: it shares the blocks 3 and 4, and publishes from the first one on.
    """
    publish(cache, [0], EIGHT[:16])
    publish(cache, [3, 4], EIGHT)
    evict(cache, 0)
    assert match(cache, EIGHT) == [] and cache.cached_blocks() == [4]
    assert publish(cache, [3, 4], EIGHT)[0] == [3, 4]
    assert match(cache, EIGHT) == [3, 4]
    evict(cache, 4, 3)
    assert cache.cached_blocks() == []


def test_a_run_is_evicted_from_its_end(cache: PrefixCache) -> None:
    """By hand: the remaining blocks are found, and content that returns at the end is a new run behind them."""
    data = tokens(*range(7 * SIZE))
    publish(cache, [6, 5, 4, 3, 2, 1, 0], data)
    evict(cache, 0, 1)
    assert match(cache, data) == [6, 5, 4, 3, 2]
    evict(cache, 2, 3, 4)
    assert match(cache, data) == [6, 5]
    _, place = cache.match("", data, 99)
    assert publish(cache, [1, 0], data[32:64], place)[0] == [1, 0]
    assert match(cache, data) == [6, 5, 1, 0]
    evict(cache, 0, 1, 5, 6)
    assert match(cache, data) == [] and cache.cached_blocks() == []


def test_a_renamed_block_is_found_by_its_new_name(cache: PrefixCache) -> None:
    """By hand: two blocks of one run and one of another; the run is cut behind a renamed block, which is forgotten by
    its new name.  A block behind the cut is not found, whatever its name."""
    data, other = tokens(*range(4 * SIZE)), tokens(*range(50, 50 + SIZE))
    publish(cache, [0, 1, 2], data[: 12 * SIZE])
    publish(cache, [3], other)
    cache.rename(ids(1, 2, 3), ids(5, 6, 7))
    cache.check_integrity()
    assert match(cache, data) == [0, 5, 6] and match(cache, other) == [7]
    assert cache.are_found(ids(0, 1, 5, 6, 7)).tolist() == [True, False, True, True, True]
    evict(cache, 5)
    assert match(cache, data) == [0]
    cache.rename(ids(6), ids(2))
    assert cache.are_found(ids(2, 6, 0)).tolist() == [False, False, True]
    evict(cache, 2)
    assert match(cache, data) == [0] and cache.cached_blocks() == [0, 7]


def test_tails_are_found_behind_their_parent_only(cache: PrefixCache) -> None:
    """By definition: the longest tail whose tokens all agree and leave one to compute; none after eviction."""
    _, parent = publish(cache, [0], EIGHT[:16])
    assert insert_tail(cache, 4, parent, tokens(5)) and insert_tail(cache, 5, parent, tokens(5, 6))
    assert insert_tail(cache, 6, "salt", tokens(5, 6, 7))
    assert not insert_tail(cache, 7, parent, tokens(5, 6)), "its content is known"
    cache.check_integrity()
    assert sorted(cache.cached_blocks()) == [0, 4, 5, 6]
    assert match_tail(cache, parent, tokens(5, 6, 7, 8, 9), 0) == (5, 2)
    assert match_tail(cache, parent, tokens(5, 6), 0) == (4, 1)
    assert match_tail(cache, parent, tokens(5, 9, 9), 0) == (4, 1)
    assert match_tail(cache, parent, tokens(5), 0) is None and match_tail(cache, parent, tokens(6, 5), 0) is None
    assert (
        match_tail(cache, "salt", tokens(5, 6, 7, 8), 0) == (6, 3) and match_tail(cache, "", tokens(5, 6, 7), 0) is None
    )
    assert match_tail(cache, parent, tokens(1, 2, 5, 6, 7), 2) == (5, 2)
    evict(cache, 5)
    assert match_tail(cache, parent, tokens(5, 6, 7), 0) == (4, 1)
    evict(cache, 4, 0)
    assert cache.cached_blocks() == [6]


def test_long_sequences_share_what_they_share() -> None:
    """Oracle: seventy blocks, then a sequence that is equal up to the fortieth: a branch from the middle of a run."""
    cache = PrefixCache(300, SIZE * 4)
    ids = list(range(70 * SIZE))
    first, second = tokens(*ids), tokens(*ids[: 40 * SIZE], *(1000 + one for one in ids[40 * SIZE :]))
    _, place = publish(cache, list(range(70)), first)
    assert publish(cache, list(range(100, 170)), second)[0] == list(range(140, 170))
    assert match(cache, first) == list(range(70))
    assert match(cache, second) == [*range(40), *range(140, 170)]
    publish(cache, [200, 201], tokens(*range(2 * SIZE)), place)
    assert match(cache, first + tokens(*range(2 * SIZE))) == [*range(70), 200, 201]
    evict(cache, 150, 20, 5)
    assert match(cache, first) == list(range(5)) == match(cache, second)


def test_random_acts_match_a_map_of_prefixes() -> None:
    """Oracle: a dictionary from whole prefixes to blocks, over 4000 acts on few tokens, so that most prefixes meet.

    As in the engine, blocks are evicted from the ends of the cached chains.
    """
    rng = random.Random(4)
    cache, model, free = PrefixCache(40, SIZE * 4), dict[tuple[str, bytes], int](), list(range(40))
    for _ in range(4000):
        salt, length = rng.choice(("", "s")), rng.randint(1, 9)
        data = b"".join(tokens(*[rng.randrange(2)] * SIZE) for _ in range(length))
        prefixes = [(salt, data[: end * SIZE * 4]) for end in range(1, length + 1)]
        known = next((i for i, prefix in enumerate(prefixes) if prefix not in model), length)
        found, place = cache.match(salt, data, length)
        assert found[:, 0].tolist() == [model[prefix] for prefix in prefixes[:known]]
        new = free[: length - known] if rng.random() < 0.5 else []
        end = known + len(new)
        if new:
            held = found[:, 0].tolist() + new if rng.random() < 0.5 else new
            start = 0 if len(held) > len(new) else known
            added, _ = publish(cache, held, data[start * 16 : end * 16], salt if start == 0 else place)
            assert added == new
            del free[: len(new)]
            model.update(zip(prefixes[known:end], new, strict=True))
        elif model:
            leaves = [name for name in model if not any(other != name and _follows(other, name) for other in model)]
            chosen = rng.sample(leaves, rng.randint(1, len(leaves)))
            chosen += [(salt, data[:-16]) for salt, data in chosen[:1] if _is_leaf((salt, data[:-16]), chosen, model)]
            evict(cache, *[model[name] for name in chosen])
            free += [model.pop(name) for name in chosen]
    assert sorted(cache.cached_blocks()) == sorted(model.values())


def _follows(name: tuple[str, bytes], other: tuple[str, bytes]) -> bool:
    return name[0] == other[0] and name[1].startswith(other[1])


def _is_leaf(name: tuple[str, bytes], gone: list[tuple[str, bytes]], model: dict[tuple[str, bytes], int]) -> bool:
    return name in model and name not in gone and not any(_follows(one, name) for one in set(model) - {name, *gone})


def test_clear_forgets_all(cache: PrefixCache) -> None:
    """Oracle: no sequence matches and no block is cached afterwards."""
    publish(cache, [0, 1], EIGHT)
    cache.clear()
    cache.check_integrity()
    assert cache.cached_blocks() == [] and match(cache, EIGHT) == []


TWELVE = tokens(*range(12))
FULL_AND_WINDOW, WINDOWS = np.array([True, False]), np.array([False, False])


def publish_groups(cache: PrefixCache, blocks: list[list[int]], data: bytes, place: Place = "") -> list[int]:
    """Insert logical blocks; returns the added ones."""
    added, _ = cache.insert(np.array(blocks, dtype=np.intp), place, data)
    cache.check_integrity()
    return list(map(int, added))


def match_groups(cache: PrefixCache, data: bytes, salt: str = "") -> list[list[int]]:
    """The known logical blocks of a sequence, -1 where one is missing."""
    return [list(map(int, row)) for row in cache.match(salt, data, 99)[0]]


def test_a_windows_block_leaves_a_gap_that_is_filled_again() -> None:
    """By hand: the window's first two are gone, the full group's own remain; publishing all of them fills the gaps."""
    cache = PrefixCache(12, SIZE * 4, FULL_AND_WINDOW)
    assert publish_groups(cache, [[0, 1], [2, 3], [4, 5]], TWELVE) == [0, 1, 2, 3, 4, 5]
    evict(cache, 3, 1)
    assert match_groups(cache, TWELVE) == [[0, -1], [2, -1], [4, 5]]
    assert publish_groups(cache, [[6, -1], [7, 8], [9, 10]], TWELVE) == [8], "what is there keeps its first block"
    assert match_groups(cache, TWELVE) == [[0, -1], [2, 8], [4, 5]]
    assert cache.groups() == {0: 0, 2: 0, 4: 0, 5: 1, 8: 1}


def test_a_full_groups_block_still_cuts_the_run() -> None:
    """By hand: behind it no block is found, whatever the window's column holds, until it returns with its own."""
    cache = PrefixCache(12, SIZE * 4, FULL_AND_WINDOW)
    publish_groups(cache, [[0, 1], [2, 3], [4, 5]], TWELVE)
    evict(cache, 2)
    assert match_groups(cache, TWELVE) == [[0, 1]]
    assert publish_groups(cache, [[0, 1], [6, 3], [7, -1]], TWELVE) == [6, 3, 7]
    assert match_groups(cache, TWELVE) == [[0, 1], [6, 3], [7, -1]]
    evict(cache, 4, 5)
    assert match_groups(cache, TWELVE) == [[0, 1], [6, 3], [7, -1]]


def test_without_a_full_group_a_run_without_blocks_leads_to_those_behind_it() -> None:
    """By hand: all blocks of the first run are gone, but the second run follows it; once that is gone too, both are."""
    cache = PrefixCache(12, SIZE * 4, WINDOWS)
    _, place = cache.insert(np.array([[0, 1]]), "", TWELVE[:16])
    _, last = cache.insert(np.array([[2, 3], [4, 5]]), place, TWELVE[16:])
    evict(cache, 0, 1)
    assert match_groups(cache, TWELVE) == [[-1, -1], [2, 3], [4, 5]]
    evict(cache, 2, 5, 3)
    assert match_groups(cache, TWELVE) == [[-1, -1], [-1, -1], [4, -1]] and not is_lost(last)
    evict(cache, 4)
    assert match_groups(cache, TWELVE) == [] and is_lost(place) and is_lost(last)


def test_nothing_is_published_of_what_all_windows_have_left_behind() -> None:
    """By hand: without any block, no run is made and the place is lost; with the last block present, a run is made."""
    cache = PrefixCache(12, SIZE * 4, WINDOWS)
    added, place = cache.insert(np.full((3, 2), NO_BLOCK), "", TWELVE)
    assert added.tolist() == [] and is_lost(place) and match_groups(cache, TWELVE) == []
    assert publish_groups(cache, [[-1, -1], [-1, -1], [4, 5]], TWELVE) == [4, 5]
    assert match_groups(cache, TWELVE) == [[-1, -1], [-1, -1], [4, 5]]


def test_a_tail_needs_its_block_of_every_group() -> None:
    """By hand: one of the two blocks is gone, and so is the tail; the other is free for a later tail of the same
    name."""
    cache = PrefixCache(12, SIZE * 4, FULL_AND_WINDOW)
    assert cache.insert_tail(np.array([3, 4]), "", tokens(5, 6))
    found = cache.match_tail("", tokens(5, 6, 7), 0)
    assert found is not None and (found[0].tolist(), found[1]) == ([3, 4], 2)
    evict(cache, 3)
    assert cache.match_tail("", tokens(5, 6, 7), 0) is None and cache.cached_blocks() == [4]
    assert cache.insert_tail(np.array([6, 7]), "", tokens(5, 6))
    evict(cache, 4)
    assert cache.match_tail("", tokens(5, 6, 7), 0) is not None
    evict(cache, 7, 6)
    assert cache.cached_blocks() == []


@pytest.mark.parametrize("is_full", [[True, False], [False], [False, False], [True, True, False]], ids=str)
def test_random_acts_on_groups_match_a_map_of_prefixes(is_full: list[bool]) -> None:
    """Oracle: a dictionary from whole prefixes and groups to blocks, over 2500 acts on few tokens.

    Windows lose blocks anywhere.  Full groups lose blocks from the ends, and the windows' blocks there are lost too.
    """
    rng, groups = random.Random(len(is_full)), range(len(is_full))
    cache, free = PrefixCache(60, SIZE * 4, np.array(is_full)), list(range(60))
    model: dict[tuple[bytes, int], int] = {}
    for _ in range(2500):
        length = rng.randint(1, 6)
        data = b"".join(tokens(*[rng.randrange(2)] * SIZE) for _ in range(length))
        prefixes = [data[: end * SIZE * 4] for end in range(1, length + 1)]
        known = [[model.get((prefix, group), NO_BLOCK) for group in groups] for prefix in prefixes]
        depth = max((end for end, blocks in enumerate(known, 1) if max(blocks) >= 0), default=0)
        found = match_groups(cache, data)
        assert found[:depth] == known[:depth] and all(max(blocks) < 0 for blocks in found[depth:])
        new = [[group for group in groups if blocks[group] < 0] for blocks in known]
        if sum(map(len, new)) <= len(free) and rng.random() < 0.5:
            first = [0 if full else rng.randint(0, length) for full in is_full]
            blocks = [
                [known[i][g] if known[i][g] >= 0 else free.pop() if i >= first[g] else NO_BLOCK for g in groups]
                for i in range(length)
            ]
            fresh = {(prefixes[i], g): blocks[i][g] for i in range(length) for g in new[i] if blocks[i][g] >= 0}
            assert sorted(publish_groups(cache, blocks, data)) == sorted(fresh.values())
            model |= fresh
        elif model:
            chosen = rng.sample(sorted(model), min(len(model), rng.randint(1, 6)))
            lost = [name for name in chosen if not is_full[name[1]]]
            ends = [prefix for prefix, group in chosen if is_full[group] and _is_end(prefix, model)]
            lost += [name for name in model if name[0] in ends and name not in lost]
            rng.shuffle(lost)
            if lost:
                evict(cache, *[model[name] for name in lost])
            free += [model.pop(name) for name in lost]
    assert sorted(cache.cached_blocks()) == sorted(model.values())


def _is_end(prefix: bytes, model: dict[tuple[bytes, int], int]) -> bool:
    return not any(other != prefix and other.startswith(prefix) for other, _ in model)
