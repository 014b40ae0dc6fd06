"""Log-probabilities that are made when they are read look like lists of mappings."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from tests.fake_engine import fake_logprobs
from tp_engine.api import scored_tokens
from tp_engine.api.scored_tokens import PromptLogprobs, ScoredPosition, ScoredRun, ScoredTokens
from tp_engine.requests.outputs import Logprob


def scored(*token_ids: int) -> ScoredTokens:
    run = ScoredRun(1, None)
    for token_id in token_ids:
        run.add(fake_logprobs([token_id], 1), 1)
    return ScoredTokens(run)


def mapping(token_id: int) -> dict[int, Logprob]:
    return {token_id: Logprob(logprob=-0.5, rank=1)}


def test_a_list_of_mappings() -> None:
    """Oracle: the list itself; copies in other processes are lists."""
    tokens, wanted = scored(5, 6, 7), [mapping(5), mapping(6), mapping(7)]
    assert tokens == wanted and wanted == tokens and tokens != wanted[:2] and tokens
    assert (tokens[1], tokens[-1], tokens[1:], list(reversed(tokens))) == (
        wanted[1],
        wanted[-1],
        wanted[1:],
        wanted[::-1],
    )
    assert tokens + wanted == wanted + tokens == tokens + tokens == wanted + wanted
    assert type(pickle.loads(pickle.dumps(tokens))) is list and pickle.loads(pickle.dumps(tokens)) == wanted
    assert repr(tokens) == repr(wanted) and not scored()
    prompt = PromptLogprobs([fake_logprobs([6], 1), fake_logprobs([7, 8], 1)], [5, 6, 7], 1, None)
    assert prompt == [None, mapping(6), mapping(7)] and len(prompt) == 3 and prompt[0] is None


def test_what_was_read_is_not_made_again() -> None:
    """A reader of all tokens after each step would else take a time of the square of their number.  Oracle: the same
    objects in each later list, of which the earlier ones see nothing new."""
    run = ScoredRun(1, None)
    lists = []
    for token_id in range(4):
        run.add(fake_logprobs([token_id], 1), 1)
        lists.append(ScoredTokens(run))
        assert lists[-1][-1] == mapping(token_id)
    assert [len(one) for one in lists] == [len([*one]) for one in lists] == [1, 2, 3, 4]
    assert all(one[0] is lists[0][0] for one in lists)


def test_updates_that_are_folded() -> None:
    """Oracle: the positions of all, in order; also if some have been read before."""
    run, updates = ScoredRun(1, None), []
    for token_id in (5, 6, 7):
        run.add(fake_logprobs([token_id], 1), 1)
        updates.append(ScoredTokens(run, run.length - 1))
    first = updates[0]
    assert first == [mapping(5)] and updates[2] == [mapping(7)] and updates[1][0] == mapping(6)
    first.append(updates[1])
    first.append(updates[2])
    assert first == [mapping(token_id) for token_id in (5, 6, 7)]
    assert [position.token_ids for position in first.scored()] == [[5], [6], [7]]


def test_a_stream_that_is_read_in_order_is_gone_through_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: a count of positions made; whoever asks again, or in another order, gets the same."""
    made, in_order = [], scored_tokens._in_order

    def counted(token_ids: list[int], *arguments: Any) -> ScoredPosition:
        made.append(token_ids[0])
        return in_order(token_ids, *arguments)

    monkeypatch.setattr(scored_tokens, "_in_order", counted)
    run, updates = ScoredRun(1, None), []
    for token_id in range(5, 12):
        run.add(fake_logprobs([token_id], 1), 1)
        updates.append(ScoredTokens(run, run.length - 1))
        assert [position.token_ids for position in updates[-1].scored()] == [[token_id]]
    assert made == list(range(5, 12))
    for number in (3, 3, 0, 6):
        assert [position.token_ids for position in updates[number].scored()] == [[5 + number]]
