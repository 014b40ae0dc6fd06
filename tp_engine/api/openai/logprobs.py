"""Log-probabilities in three shapes: of completions, of chats, and vLLM's of prompts."""

from collections.abc import Callable, Mapping, Sequence
from itertools import repeat
from typing import Any, TypeAlias

import msgspec

from tp_engine.api.scored_tokens import ScoredPosition, id_text, scored_positions
from tp_engine.requests.outputs import Logprob

# JSON has no minus infinity; the OpenAI API writes this number for a token that cannot be sampled.
IMPOSSIBLE = -9999.0

Positions: TypeAlias = Sequence[Mapping[int, Logprob] | None]
IsHidden = Callable[[int, str, int], bool]
"""Whether a text lacks a token, by the token's id, its text, and the number of characters before it."""
_encode = msgspec.json.Encoder().encode


def completion_logprobs(
    token_ids: Sequence[int],
    positions: Positions,
    text_offset: int = 0,
    *,
    is_hidden: IsHidden,
    as_ids: bool = False,
    first_text: str = "",
) -> dict[str, list[Any]]:
    """The shape of ``/v1/completions``; ``text_offset`` is the number of characters before the first token.

    The first token of an echoed prompt has no log-probability, just ``first_text``.
    """
    tokens: list[str] = []
    chosen: list[float | None] = []
    tops: list[dict[str, float] | None] = []
    offsets: list[int] = []
    for token_id, position in zip(token_ids, scored_positions(token_ids, positions), strict=True):
        offsets.append(text_offset)
        if position is None:
            text = first_text
            tokens.append(id_text(token_id) if as_ids else text)
            chosen.append(None)
            tops.append(None)
        else:
            text, names, values = position.text, _names(position, as_ids), _finite(position.logprobs)
            tokens.append(names[position.chosen])
            chosen.append(values[position.chosen])
            tops.append(dict(zip(names, values, strict=False)))
        text_offset += 0 if is_hidden(token_id, text, text_offset) else len(text)
    return {"tokens": tokens, "token_logprobs": chosen, "top_logprobs": tops, "text_offset": offsets}


def chat_logprobs(
    token_ids: Sequence[int], positions: Positions, num_top: int, *, as_ids: bool = False
) -> dict[str, list[dict[str, Any]]]:
    """The shape of ``/v1/chat/completions`` with ``num_top`` alternatives per token; -1 for all."""
    content = []
    for position in scored_positions(token_ids, positions):
        assert position is not None, "generated tokens have log-probabilities"
        values = _finite(position.logprobs)
        num_shown = len(values) if num_top == -1 else min(num_top, len(values))
        tops = [_chat_entry(position, values, place, as_ids) for place in range(num_shown)]
        content.append(_chat_entry(position, values, position.chosen, as_ids) | {"top_logprobs": tops})
    return {"content": content}


def prompt_logprobs_json(token_ids: Sequence[int], positions: Positions) -> list[msgspec.Raw | None]:
    """vLLM's ``prompt_logprobs``: per prompt token a mapping from token id; null for the first."""
    return [
        None if position is None else _prompt_entry(position) for position in scored_positions(token_ids, positions)
    ]


class _PromptEntry(msgspec.Struct, gc=False):
    logprob: float
    rank: int | None
    decoded_token: str | None


def _prompt_entry(position: ScoredPosition) -> msgspec.Raw:
    """The actual token first, as in vLLM, then the likeliest; as JSON, because objects for all alternatives of a long
    prompt would take ten times as much memory."""
    token_ids, logprobs, ranks, chosen, _, texts = position
    decoded = repeat(None) if texts is None else texts.texts(token_ids)
    entries = dict(zip(token_ids, map(_PromptEntry, _finite(logprobs), ranks, decoded), strict=False))
    return msgspec.Raw(_encode({token_ids[chosen]: entries.pop(token_ids[chosen]), **entries}))


def _names(position: ScoredPosition, as_ids: bool) -> list[str]:
    """A name for each token of a position; a second one of the same name is named by its id."""
    token_ids = position.token_ids
    if as_ids or position.texts is None:
        return list(map(id_text, token_ids))
    names = position.texts.names(token_ids)
    if len(set(names)) < len(names):
        taken: set[str] = set()
        for place, token_id in enumerate(token_ids):
            if names[place] in taken:
                names[place] = id_text(token_id)
            taken.add(names[place])
    return names


def _chat_entry(position: ScoredPosition, values: Sequence[float], place: int, as_ids: bool) -> dict[str, Any]:
    token_id = position.token_ids[place]
    text, data = (id_text(token_id), None) if position.texts is None else position.texts.of(token_id)
    octets = list(text.encode() if data is None else data)
    return {"token": id_text(token_id) if as_ids else text, "logprob": values[place], "bytes": octets}


def _finite(logprobs: list[float]) -> list[float]:
    """``logprobs``, in descending order, but none below ``IMPOSSIBLE``."""
    return logprobs if logprobs[-1] >= IMPOSSIBLE else [max(one, IMPOSSIBLE) for one in logprobs]
