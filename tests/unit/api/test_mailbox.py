"""How steps reach mailboxes, and a mailbox itself: order, bounds, and turns for other tasks."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable, Sequence

import pytest

from tp_engine.api.output_streams import MAX_FOLDED_TOKENS, MAX_WAITING, SLICE, SMALL_STEP, Mailbox, Outputs, Processed
from tp_engine.api.request_state import SequenceUpdate
from tp_engine.errors import EngineDeadError
from tp_engine.requests.request import SequenceDelta, StepOutput

DEADLINE_S = 100.0


def update(index: int, number: int, *, finish_reason: str | None = None) -> SequenceUpdate:
    return SequenceUpdate(
        request_id="a",
        index=index,
        text=f"{number} ",
        token_ids=[number],
        num_prompt_tokens=3,
        num_cached_tokens=0,
        num_output_tokens=number + 1,
        finish_reason=finish_reason,
    )


def test_a_quick_reader_gets_each_update_by_itself() -> None:
    """Oracle: the items put in, in order; then the error after them."""

    async def scenario() -> None:
        mailbox = Mailbox()
        for number in range(3):
            mailbox.put(update(0, number))
        mailbox.fail("a", RuntimeError("over"))
        assert [one.token_ids for one in await mailbox.take()] == [[0], [1], [2]]
        with pytest.raises(RuntimeError, match="over"):
            await mailbox.take()

    asyncio.run(scenario())


@pytest.mark.parametrize("num_sequences", [1, 3])
def test_a_reader_that_is_away_costs_a_bounded_number_of_updates(num_sequences: int) -> None:
    """Oracle: the number of updates is 64 and one per 256 tokens; joined, they equal the input."""
    num_tokens = 20_000
    mailbox = Mailbox()
    for number in range(num_tokens):
        for index in range(num_sequences):
            last = "length" if number == num_tokens - 1 else None
            mailbox.put(update(index, number, finish_reason=last))
    assert len(mailbox) <= MAX_WAITING + num_sequences * (num_tokens // MAX_FOLDED_TOKENS + 2)
    updates = asyncio.run(mailbox.take())
    for index in range(num_sequences):
        own = [one for one in updates if one.index == index]
        assert [token_id for one in own for token_id in one.token_ids] == list(range(num_tokens))
        assert "".join(one.text for one in own) == "".join(f"{number} " for number in range(num_tokens))
        assert [one.finish_reason for one in own[:-1]] == [None] * (len(own) - 1)
        assert own[-1].finish_reason == "length" and own[-1].num_output_tokens == num_tokens


def step(tokens: Sequence[int]) -> StepOutput:
    return StepOutput(request_ids=["a"] * len(tokens), indices=[0] * len(tokens), token_ids=list(tokens))


class Journal(Outputs):
    """Notes what it hands out: numbers, sizes of the parts, the threads that it works in, the end."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers: list[int] = []
        self.part_sizes: list[int] = []
        self.threads: list[int] = []
        self.aborted: list[str] = []
        self.ended: list[int] = []

    def process(self, deltas: Iterable[SequenceDelta]) -> Processed:
        self.threads.append(threading.get_ident())
        return Processed(updates=[update(0, delta.new_token_ids[0]) for delta in deltas], aborts=["x"])

    def _abort(self, request_ids: list[str]) -> None:
        self.aborted += request_ids

    def _deliver(self, updates: Sequence[SequenceUpdate]) -> None:
        self.part_sizes.append(len(updates))
        self.numbers += [one.token_ids[0] for one in updates]

    def _fail_all(self, error: EngineDeadError) -> None:
        self.ended.append(len(self.numbers))


def test_steps_are_handed_out_in_order_whatever_their_size() -> None:
    """Oracle: the numbers count up; another thread processes large steps, in parts between turns of the loop."""

    async def scenario() -> Journal:
        journal = Journal()
        sizes = [1, SMALL_STEP, SMALL_STEP + 1, 5 * SLICE + 3, 1, 2]
        first = 0
        for size in sizes:
            journal.on_output(step(range(first, first + size)))
            first += size
        journal.on_ended(EngineDeadError("over"))
        await asyncio.wait_for(journal.wait_delivered(), DEADLINE_S)
        assert journal.ended == [first] and journal.numbers == list(range(first))
        journal.on_output(step([first]))
        assert journal.numbers[-1] == first, "with nothing before it, a small step is handed out at once"
        await journal.close()
        return journal

    journal = asyncio.run(scenario())
    own = threading.get_ident()
    assert [thread == own for thread in journal.threads] == [True, True, False, False, False, False, True]
    assert max(journal.part_sizes) <= SLICE and journal.aborted == ["x"] * 7


def test_other_tasks_have_turns_while_a_large_step_is_handed_out() -> None:
    """Oracle: a task that only counts its turns gets about one between two parts."""

    async def scenario() -> None:
        journal = Journal()
        seen: list[int] = []

        async def count() -> None:
            while True:
                seen.append(len(journal.numbers))
                await asyncio.sleep(0)

        counting = asyncio.get_running_loop().create_task(count())
        journal.on_output(step(range(10 * SLICE)))
        await asyncio.wait_for(journal.wait_delivered(), DEADLINE_S)
        counting.cancel()
        await journal.close()
        assert len(set(seen)) >= 10

    asyncio.run(scenario())


class Broken(Outputs):
    def process(self, deltas: Iterable[SequenceDelta]) -> Processed:
        raise ValueError("broken tokenizer")


def test_what_goes_wrong_in_the_other_thread_is_raised() -> None:
    """Oracle: the error of ``process`` reaches the task that waits in ``wait_delivered``."""

    async def scenario() -> None:
        journal = Broken()
        journal.on_output(step(range(100)))
        with pytest.raises(ValueError, match="broken tokenizer"):
            await asyncio.wait_for(journal.wait_delivered(), DEADLINE_S)
        await journal.close()

    asyncio.run(scenario())
