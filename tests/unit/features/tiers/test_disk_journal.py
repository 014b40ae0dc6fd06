"""The journal of the disk tier: what a later start finds of it, torn at any byte, in groups, with reused slots."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import numpy as np
import pytest

from tp_engine.features.tiers.disk_journal import JournalHeader, encode_blocks, read_header, read_nodes, restore
from tp_engine.features.tiers.disk_writer import JournalFile
from tp_engine.sched.blocks.lru_queue import BlockIds
from tp_engine.sched.blocks.prefix_cache import NO_BLOCK, PrefixCache

FIRST = 100  # the id of slot 0
HEADER = JournalHeader(block_bytes=8, num_groups=1, store=b"s" * 16, salt_key=b"k" * 32)


def ids(*numbers: int) -> BlockIds:
    """Blocks or slots as an array."""
    return np.array(numbers, dtype=np.intp)


def tokens(*numbers: int) -> bytes:
    """Two token ids for each block."""
    return np.repeat(np.array(numbers, dtype=np.int32), 2).tobytes()


def tree() -> tuple[PrefixCache, bytes]:
    """Blocks 0 to 3 of one prefix, 4 and 5 behind block 1, block 6 of a tenant; block i is in slot 10 + i under serial
    20 + i; three records."""
    cache = PrefixCache(200, 8)
    _, end = cache.insert(ids(0, 1, 2, 3)[:, None], "", tokens(0, 1, 2, 3))
    assert not isinstance(end, str)
    cache.insert(ids(4, 5)[:, None], (end[0], 1), tokens(4, 5))
    cache.insert(ids(6)[:, None], HEADER.digest("tenant"), tokens(6))
    parts = (ids(0, 1, 2, 3), ids(5, 4), ids(6))
    return cache, HEADER.encode() + b"".join(encode_blocks(cache, one, one + 10, one + 20) for one in parts)


def found(data: bytes, serials: list[int] | None = None) -> dict[str, int]:
    """How many blocks a prompt of each path finds after a start that reads ``data``."""
    on_disk = np.array(([0] * 10 + [20 + number for number in range(7)]) if serials is None else serials)
    header = read_header(data)
    if header is None:
        return {}
    cache = PrefixCache(200, 8)
    restore(read_nodes(data, header, [on_disk]), cache, FIRST, [True])
    cache.check_integrity()
    paths = {"main": ("", (0, 1, 2, 3)), "side": ("", (0, 1, 4, 5)), "tenant": (header.digest("tenant"), (6,))}
    lengths = {}
    for name, (salt, path) in paths.items():
        blocks, _ = cache.match(salt, tokens(*path), 9)
        assert blocks[:, 0].tolist() == [FIRST + 10 + number for number in path][: len(blocks)]
        lengths[name] = len(blocks)
    return lengths


def test_what_is_written_is_found() -> None:
    """Oracle: the tree by hand; a second encoding of what was restored is found as well."""
    _, data = tree()
    assert found(data) == {"main": 4, "side": 4, "tenant": 1}
    header = read_header(data)
    assert header == HEADER and b"tenant" not in data
    cache = PrefixCache(200, 8)
    on_disk = np.array([0] * 10 + [20 + number for number in range(7)])
    restored = restore(read_nodes(data, header, [on_disk]), cache, FIRST, [True])
    assert restored.slots.tolist()[-1] == 16 and set(restored.slots.tolist()) == set(range(10, 17))
    again = header.encode() + encode_blocks(cache, restored.slots + FIRST, restored.slots, restored.serials)
    assert found(again) == found(data)


def test_a_journal_torn_at_any_byte_has_what_came_before() -> None:
    """Oracle: of each prefix of the bytes, the records that are whole; every flipped byte ends it before its record."""
    cache, data = tree()
    ends = [len(HEADER.encode())]
    for one in (ids(0, 1, 2, 3), ids(5, 4), ids(6)):
        ends.append(ends[-1] + len(encode_blocks(cache, one, one + 10, one + 20)))
    expected = [
        {"main": 0, "side": 0, "tenant": 0}, {"main": 4, "side": 2, "tenant": 0}, {"main": 4, "side": 4, "tenant": 0},
        {"main": 4, "side": 4, "tenant": 1},
    ]  # fmt: skip
    for length in range(len(data) + 1):
        whole = sum(length >= end for end in ends)
        assert found(data[:length]) == (expected[whole - 1] if whole else {})
    for place in range(0, len(data), 3):
        broken = bytearray(data)
        broken[place] ^= 0x10
        whole = sum(place >= end for end in ends)
        assert found(bytes(broken)) == (expected[whole - 1] if whole else {})


@pytest.mark.parametrize(
    ("changed", "lengths"),
    [
        ({12: 0}, {"main": 2, "side": 4, "tenant": 1}),  # empty on disk
        ({11: 99}, {"main": 1, "side": 1, "tenant": 1}),  # written since under another serial
        ({16: 0}, {"main": 4, "side": 4, "tenant": 0}),
    ],
)
def test_a_slot_counts_if_its_serial_is_that_of_the_journal(changed: dict[int, int], lengths: dict[str, int]) -> None:
    """By hand: what lies behind a slot with another serial is not found either."""
    _, data = tree()
    on_disk = [0] * 10 + [20 + number for number in range(7)]
    for slot, serial in changed.items():
        on_disk[slot] = serial
    assert found(data, on_disk) == lengths


def test_the_newest_record_of_a_slot_counts() -> None:
    """By hand: slot 13 is written again, for block 7 of another prefix; on a rank that lacks that write it is empty."""
    cache, data = tree()
    cache.insert(ids(7)[:, None], "", tokens(7))
    data += encode_blocks(cache, ids(7), ids(13), np.array([30]))
    on_disk = [0] * 10 + [20 + number for number in range(7)]
    old, on_disk[13] = list(on_disk), 30
    assert found(data, on_disk) == {"main": 3, "side": 4, "tenant": 1}
    again = PrefixCache(200, 8)
    restored = restore(read_nodes(data, HEADER, [np.array(on_disk), np.array(old)]), again, FIRST, [True])
    assert 13 not in restored.slots and len(restored.slots) == 6


def test_groups_keep_what_their_windows_left() -> None:
    """By hand, a full group and one with a window: blocks of the window's front are missing, and stay missing; a
    missing one of the full group ends the prefix."""
    header = JournalHeader(block_bytes=8, num_groups=2, store=b"s" * 16, salt_key=b"k" * 32)
    is_full = np.array([True, False])
    cache = PrefixCache(200, 8, is_full)
    blocks = np.array([[0, NO_BLOCK], [1, NO_BLOCK], [2, 5], [3, 6]], dtype=np.intp)
    cache.insert(blocks, "", tokens(0, 1, 2, 3))
    one = ids(6, 0, 2, 1, 5, 3)
    data = header.encode() + encode_blocks(cache, one, one, one + 1)
    for missing, length in ((9, 4), (3, 3), (6, 4)):
        on_disk = np.where(np.arange(8) == missing, 0, np.arange(1, 9))
        again = PrefixCache(200, 8, is_full)
        restored = restore(read_nodes(data, header, [on_disk]), again, FIRST, is_full.tolist())
        there, _ = again.match("", tokens(0, 1, 2, 3), 9)
        expected = np.where(blocks == NO_BLOCK, NO_BLOCK, blocks + FIRST)[:length]
        expected[expected == FIRST + missing] = NO_BLOCK
        assert there.tolist() == expected.tolist() and len(restored.slots) == np.count_nonzero(there != NO_BLOCK)
        again.check_integrity()


def test_the_prefix_used_longest_ago_is_lost_first_from_its_end() -> None:
    """By hand: the side branch was written last, so that its own blocks and those before it are the newest."""
    _, data = tree()
    on_disk = np.array([0] * 10 + [20 + number for number in range(7)])
    restored = restore(read_nodes(data, HEADER, [on_disk]), PrefixCache(200, 8), FIRST, [True])
    assert restored.slots.tolist() == [13, 12, 15, 14, 11, 10, 16]


def test_the_journal_of_the_last_start_is_gone_when_the_scheduler_is_made(tmp_path: Path) -> None:
    """Oracle: the file's bytes after each call: at once for the first, which later writes must find on disk; what is
    appended stands behind it, and a rewrite takes its place."""
    path = tmp_path / "journal"
    path.write_bytes(b"old")
    journal = JournalFile(tmp_path)
    journal.rewrite(b"new.")
    assert path.read_bytes() == b"new." and path.stat().st_mode & 0o777 == 0o600
    journal.append(b"one.")
    wait_for(path, b"new.one.")
    journal.rewrite(b"whole.")
    journal.append(b"two.")
    journal.close()
    assert path.read_bytes() == b"whole.two." and [one.name for one in tmp_path.iterdir()] == ["journal"]


def test_a_journal_that_can_not_be_written_leaves_no_old_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Oracle: a folder in the new journal's place: the old one, whose serials may come again, is taken away."""
    (tmp_path / "journal").write_bytes(b"old")
    (tmp_path / "journal.new").mkdir()
    logging.getLogger("tp_engine").addHandler(caplog.handler)
    try:
        journal = JournalFile(tmp_path)
        journal.rewrite(b"new.")
        journal.append(b"one.")
        journal.close()
    finally:
        logging.getLogger("tp_engine").removeHandler(caplog.handler)
    assert [one.name for one in tmp_path.iterdir()] == ["journal.new"]
    assert "a later start finds less" in caplog.text


def test_a_journal_that_failed_at_the_start_is_written_later(tmp_path: Path) -> None:
    """Oracle: what follows the failure is left out, and the next whole journal and what follows it are there."""
    (tmp_path / "journal.new").mkdir()
    journal = JournalFile(tmp_path)
    journal.rewrite(b"new.")
    journal.append(b"one.")
    (tmp_path / "journal.new").rmdir()
    journal.rewrite(b"whole.")
    journal.append(b"two.")
    journal.close()
    assert (tmp_path / "journal").read_bytes() == b"whole.two."


def wait_for(path: Path, data: bytes) -> None:
    """Wait until the file has these bytes, 20 s at most."""
    deadline_s = time.monotonic() + 20
    while path.read_bytes() != data:
        assert time.monotonic() < deadline_s
        time.sleep(0.002)
