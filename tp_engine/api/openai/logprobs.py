"""Log-probabilities in three shapes: of completions, of chats, and vLLM's of prompts."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tp_engine.requests.outputs import Logprob

# JSON has no minus infinity; the OpenAI API writes this number for a token that cannot be sampled.
IMPOSSIBLE = -9999.0

Position = Mapping[int, Logprob]
IsHidden = Callable[[int, str, int], bool]
"""Whether a text lacks a token, by the token's id, its text, and the number of characters before it."""


def completion_logprobs(
    token_ids: Sequence[int],
    positions: Sequence[Position | None],
    text_offset: int = 0,
    *,
    is_hidden: IsHidden,
    as_ids: bool = False,
    first_text: str = "",
) -> dict[str, list[Any]]:
    """Return the shape of ``/v1/completions``; ``text_offset`` is the number of characters before the first token.

    The first token of an echoed prompt has no log-probability, only ``first_text``.
    """
    tokens: list[str] = []
    chosen: list[float | None] = []
    tops: list[dict[str, float] | None] = []
    offsets: list[int] = []
    for token_id, position in zip(token_ids, positions, strict=True):
        text = first_text if position is None else token_text(token_id, position[token_id])
        names = {token_id: _id_text(token_id) if as_ids else text} if position is None else _names(position, as_ids)
        tokens.append(names[token_id])
        chosen.append(None if position is None else _finite(position[token_id]))
        tops.append(None if position is None else {names[other]: _finite(position[other]) for other in names})
        offsets.append(text_offset)
        text_offset += 0 if is_hidden(token_id, text, text_offset) else len(text)
    return {"tokens": tokens, "token_logprobs": chosen, "top_logprobs": tops, "text_offset": offsets}


def chat_logprobs(
    token_ids: Sequence[int], positions: Sequence[Position], num_top: int, *, as_ids: bool = False
) -> dict[str, list[dict[str, Any]]]:
    """Return the shape of ``/v1/chat/completions`` with ``num_top`` alternatives per token; -1 for all."""
    content = []
    for token_id, position in zip(token_ids, positions, strict=True):
        tops = _likeliest_first(position)[: None if num_top == -1 else num_top]
        alternatives = [_chat_entry(other, entry, as_ids) for other, entry in tops]
        content.append(_chat_entry(token_id, position[token_id], as_ids) | {"top_logprobs": alternatives})
    return {"content": content}


def prompt_logprobs_json(positions: Sequence[Position | None]) -> list[dict[str, Any] | None]:
    """vLLM's ``prompt_logprobs``: per prompt token a mapping from token id; null for the first."""
    return [
        None
        if position is None
        else {
            str(token_id): {"logprob": _finite(entry), "rank": entry.rank, "decoded_token": entry.decoded_token}
            for token_id, entry in position.items()
        }
        for position in positions
    ]


def token_text(token_id: int, entry: Logprob) -> str:
    """Return what the token adds to the text, or its id if it was not decoded."""
    return _id_text(token_id) if entry.decoded_token is None else entry.decoded_token


def _names(position: Position, as_ids: bool) -> dict[int, str]:
    """A name of its own for each token of a position, the likeliest first.

    A name is the token's text.  A token that is part of a character is named by its bytes, as in OpenAI's API, and a
    second one with the same text by its id.
    """
    names: dict[int, str] = {}
    taken = set()
    for token_id, entry in _likeliest_first(position):
        name = _id_text(token_id) if as_ids else _own_text(token_id, entry)
        names[token_id] = name if name not in taken else _id_text(token_id)
        taken.add(names[token_id])
    return names


def _own_text(token_id: int, entry: Logprob) -> str:
    if entry.token_bytes is None:
        return token_text(token_id, entry)
    try:
        return entry.token_bytes.decode()
    except UnicodeDecodeError:
        written = (chr(byte) if 0x20 <= byte < 0x7F else f"\\x{byte:02x}" for byte in entry.token_bytes)
        return "bytes:" + "".join(written)


def _id_text(token_id: int) -> str:
    return f"token_id:{token_id}"


def _chat_entry(token_id: int, entry: Logprob, as_ids: bool) -> dict[str, Any]:
    text = token_text(token_id, entry)
    data = text.encode() if entry.token_bytes is None else entry.token_bytes
    return {"token": _id_text(token_id) if as_ids else text, "logprob": _finite(entry), "bytes": list(data)}


def _likeliest_first(position: Position) -> list[tuple[int, Logprob]]:
    return sorted(position.items(), key=lambda item: -item[1].logprob)


def _finite(entry: Logprob) -> float:
    return max(entry.logprob, IMPOSSIBLE)
