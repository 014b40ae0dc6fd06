"""Errors that are kept and raised again: a copy each time, which crosses processes too."""

from __future__ import annotations

import asyncio
import copy
import pickle
import traceback
from collections.abc import Callable

import pytest

from tests.fake_engine import FakeEngine, arith, fake_service
from tests.unit.engine.test_service import DEADLINE_S, connected, request
from tp_engine.api.output_streams import Mailbox
from tp_engine.errors import (
    NO_TOKEN_LEFT,
    ConfigError,
    ContextLengthError,
    EngineDeadError,
    MemoryBudgetError,
    RankError,
    RequestError,
    WeightError,
    again,
)
from tp_engine.system.closing import Ending

ERRORS = [
    ConfigError("a"),
    RequestError("a", param="n", code=NO_TOKEN_LEFT),
    ContextLengthError("a", param="prompt", num_prompt=9, longest=8, num_asked=2),
    WeightError("a"),
    RankError(1, "a"),
    MemoryBudgetError("a", rank=1),
    EngineDeadError("a"),
    KeyError("a"),
    OSError(2, "a", "file"),
]


def pickled(error: BaseException) -> BaseException:
    found: BaseException = pickle.loads(pickle.dumps(error))
    return found


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("copied", [again, copy.copy, pickled])
def test_an_error_is_copied_whole(error: BaseException, copied: Callable[[BaseException], BaseException]) -> None:
    """Oracle: the error's class, words and fields; a copy is another object, without the traceback of the first."""
    try:
        raise error
    except BaseException as raised:
        found = copied(raised)
    assert found is not error and found.__traceback__ is None
    assert (type(found), str(found), found.args, vars(found)) == (type(error), str(error), error.args, vars(error))


def depth(error: BaseException) -> int:
    """The frames of an error and of what caused it."""
    cause = 0 if error.__cause__ is None else depth(error.__cause__)
    return len(traceback.extract_tb(error.__traceback__)) + cause


def test_a_dead_engine_s_error_does_not_grow() -> None:
    """Oracle: the frames of the first raise; each of the client's calls raises an object of its own, with the cause."""

    async def scenario() -> None:
        client, _ = await connected(service.address)
        client.add_request(request("r", max_tokens=100))
        assert await client.wait_ended(timeout_s=DEADLINE_S)
        raised: list[list[EngineDeadError]] = []
        calls: list[Callable[[], None]] = [
            lambda: client.add_request(request("late")),
            lambda: client.add_call([], together=False),
        ]
        for _ in range(3):
            raised.append([])
            for call in calls:
                with pytest.raises(EngineDeadError, match="told to fail") as one:
                    call()
                raised[-1].append(one.value)
            with pytest.raises(EngineDeadError, match="told to fail") as one:
                await client.report(None, timeout_s=DEADLINE_S)
            raised[-1].append(one.value)
        assert len({id(error) for errors in raised for error in errors}) == 9
        assert [depth(error) for error in raised[-1]] == [depth(error) for error in raised[0]]
        assert all(isinstance(error.__cause__, RuntimeError) for errors in raised for error in errors)
        await client.close()

    with fake_service(FakeEngine(arith, fail_at_step=3)) as service:
        asyncio.run(scenario())
        service.join()


def test_a_mailbox_and_an_ending_raise_anew() -> None:
    """Oracle: the frames of the first raise."""

    async def taken(mailbox: Mailbox) -> None:
        await mailbox.take()

    mailbox, ending, depths = Mailbox(), Ending(), []
    mailbox.fail("a", RequestError("over"))
    ending.failure = RankError(0, "over")
    for _ in range(3):
        with pytest.raises(RequestError, match="over") as one:
            asyncio.run(taken(mailbox))
        with pytest.raises(EngineDeadError, match="over") as other:
            ending.check()
        depths.append((depth(one.value), depth(other.value)))
    assert len(set(depths)) == 1
