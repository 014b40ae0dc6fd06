"""How ranks tell rank 0 what of the tiers' work has ended and what failed, without messages or locks."""

from __future__ import annotations

import random
import threading
import time

from tp_engine.ipc.job_board import JobBoard
from tp_engine.job.tier_progress import CHANNEL_WORDS, TIER_CHANNELS, TierProgress, TierProgressReader, TierReport


def channels(num_ranks: int) -> tuple[list[TierProgress], TierProgressReader]:
    """A channel of a new board: each rank's side, and rank 0's."""
    words = [slot.channels["disk_reads"] for slot in JobBoard.create(num_ranks).slots]
    return [TierProgress(one) for one in words], TierProgressReader(words)


def test_an_operation_has_ended_when_the_last_rank_has_ended_it() -> None:
    """Oracle: the minimum over the ranks, by hand."""
    (first, second), reader = channels(2)
    assert reader.poll() == TierReport(0, ())
    first.end(5)
    assert reader.poll() == TierReport(0, ())
    second.end(3)
    assert reader.poll() == TierReport(3, ()) and (first.num_ended, second.num_ended) == (5, 3)


def test_a_failure_on_any_rank_is_reported_once_when_all_have_ended() -> None:
    """Oracle: the union of the failures up to the minimum, by hand."""
    (first, second), reader = channels(2)
    first.end(4, failed=(2, 4))
    assert reader.poll() == TierReport(0, ())
    second.end(3, failed=(1, 2))
    assert reader.poll() == TierReport(3, (1, 2))
    assert reader.poll() == TierReport(3, ())
    second.end(1)
    assert reader.poll() == TierReport(4, (4,))


def test_more_failures_than_the_ring_holds_fail_all_that_ended() -> None:
    """Oracle: 129 failures between two looks, one more than fit: each operation since the last look; then exact again.

    128 of them are reported as they are.
    """
    (rank,), reader = channels(1)
    rank.end(200, failed=range(1, 129))
    assert reader.poll() == TierReport(200, tuple(range(1, 129)))
    rank.end(150, failed=range(202, 331))
    assert reader.poll() == TierReport(350, tuple(range(201, 351)))
    rank.end(2, failed=(352,))
    assert reader.poll() == TierReport(352, (352,))


def test_a_failure_that_is_not_visible_yet_holds_the_rank_back() -> None:
    """Oracle: word 0 of a channel shown without the ring's entry, then with it."""
    words = JobBoard.create(1).slots[0].channels["stores"]
    copy = memoryview(bytearray(8 * CHANNEL_WORDS)).cast("q")
    TierProgress(words).end(6, failed=(5,))
    reader = TierProgressReader([copy])
    copy[0] = words[0]
    assert reader.poll() == TierReport(0, ())
    copy[1] = words[1]
    assert reader.poll() == TierReport(6, (5,))
    TierProgress(words).end(200, failed=range(7, 135))  # entry 0 is written twice
    copy[0], copy[1:] = words[0], words[1:]
    assert reader.poll() == TierReport(206, tuple(range(7, 135)))


def test_channels_do_not_touch_and_survive_a_new_writer() -> None:
    """Oracle: every word of one channel set, all others 0; a second ``TierProgress`` goes on where the first ended."""
    slot = JobBoard.create(1).slots[0]
    assert tuple(slot.channels) == TIER_CHANNELS
    for index in range(CHANNEL_WORDS):
        slot.channels["disk_reads"][index] = -1
    assert sum(word != 0 for word in slot.words) == CHANNEL_WORDS
    assert slot.startup_s == {} and slot.failure_text == ""
    words = slot.channels["stores"]
    TierProgress(words).end(3, failed=(3,))
    again = TierProgress(words)
    again.end(1, failed=(4,))
    assert TierProgressReader([words]).poll() == TierReport(4, (3, 4)) and again.num_ended == 4


def test_threads_that_write_while_rank_0_reads() -> None:
    """Oracle: the set of failures of two ranks, drawn at random, against what was reported, each number at its time."""
    ranks, reader = channels(2)
    chosen = [set(random.Random(rank).sample(range(1, 2001), 60)) for rank in range(2)]

    def write(rank: int) -> None:
        draws, number = random.Random(10 + rank), 0
        while number < 2000:
            count = min(draws.randint(1, 7), 2000 - number)
            failed = [one for one in range(number + 1, number + count + 1) if one in chosen[rank]]
            ranks[rank].end(count, failed)
            number += count

    threads = [threading.Thread(target=write, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    found: set[int] = set()
    last, deadline_s = 0, time.monotonic() + 30
    while last < 2000:
        assert time.monotonic() < deadline_s
        report = reader.poll()
        assert report.ended >= last and all(number <= report.ended for number in report.failed)
        assert not found & set(report.failed), "reported twice"
        found.update(report.failed)
        assert {one for one in chosen[0] | chosen[1] if one <= report.ended} == found
        last = report.ended
    for thread in threads:
        thread.join()
    assert found == chosen[0] | chosen[1]
