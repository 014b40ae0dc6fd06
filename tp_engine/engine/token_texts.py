"""What each token of a sequence adds to its text, for log-probabilities.

A character may span tokens: it belongs to the token that completes it, and the tokens before add nothing, so the texts
of the tokens, joined, are the text of the sequence::

    tokens   "a"   F0 9F   98   80   "b"
    texts    a     -       -    😀   b

Decoders with byte fallback show a run of byte tokens as it is only if all of it is UTF-8, else each byte as U+FFFD.  A
broken run is known only at its end, so the token after it has what its texts lack.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from tp_engine.engine.tokenizer import TokenDecoder

_REPLACEMENT = "\ufffd"
_Utf8 = codecs.getincrementaldecoder("utf-8")
_Told = TypeVar("_Told")


def name_of(data: bytes) -> str:
    """Return how OpenAI's API names a token where its text is not enough: one that is part of a character by its
    bytes."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(chr(byte) if 0x20 <= byte < 0x7F else f"\\x{byte:02x}" for byte in data)


@dataclass(slots=True)
class TokenTexts:
    """The texts of one sequence's tokens: ``of`` any that may come next, ``take`` for the one that comes.  Tokens in
    ``hidden`` are left out of the sequence's text."""

    decoder: TokenDecoder
    hidden: frozenset[int] = frozenset()
    _begins: bool = True
    _pending: bytes = b""  # the beginning of a character
    _run: bytes = b""  # byte tokens since the last other token
    _num_shown: int = 0  # characters of the run that its texts have

    def of(self, token_id: int) -> tuple[str, bytes]:
        """Return the text that the token would add next, and its own bytes."""
        data = self.decoder.token_bytes(token_id, begins_text=self._begins)
        return self._text(token_id, data)[0], data

    def texts(self, token_ids: Sequence[int]) -> list[str]:
        """Return the text of ``of`` each."""
        if self._run or len(broken := self._pending.decode(errors="replace")) > 1:
            return [self.of(token_id)[0] for token_id in token_ids]
        if not broken:
            return list(map(self._shared().texts.__getitem__, token_ids))
        found = zip(token_ids, map(self._shared().texts_amid.__getitem__, token_ids), strict=True)
        return [self.of(token_id)[0] if text is None else text for token_id, text in found]

    def names(self, token_ids: Sequence[int]) -> list[str]:
        """Return the name of each."""
        return list(map(self._shared().names.__getitem__, token_ids))

    def copy(self) -> TokenTexts:
        """Return another that stands where this one stands."""
        return TokenTexts(self.decoder, self.hidden, self._begins, self._pending, self._run, self._num_shown)

    def take(self, token_id: int) -> None:
        """Take the next token."""
        if token_id in self.hidden:
            return
        data = self.decoder.token_bytes(token_id, begins_text=self._begins)
        text, self._pending = self._text(token_id, data)
        self._begins = False
        if token_id not in self.decoder.byte_ids:
            self._run, self._num_shown = b"", 0
        else:
            self._run += data
            self._num_shown += len(text)

    def _shared(self) -> _SharedTexts:
        shared = self.decoder.shared_texts
        if self._begins not in shared:
            shared[self._begins] = _SharedTexts(self.decoder, begins_text=self._begins)
        found: _SharedTexts = shared[self._begins]
        return found

    def _text(self, token_id: int, data: bytes) -> tuple[str, bytes]:
        """The token's text, and what it leaves pending."""
        before, pending = "", self._pending
        if self._run and token_id not in self.decoder.byte_ids and _is_broken(self._run):
            before, pending = _REPLACEMENT * (len(self._run) - self._num_shown), b""
        if pending and _starts_character(data):  # the one before stays incomplete
            before, pending = pending.decode(errors="replace"), b""
        if not pending and data.isascii():
            return before + data.decode(), b""
        utf8 = _Utf8("replace")
        return before + utf8.decode(pending + data), utf8.getstate()[0]


class _SharedTexts:
    """What all texts of a decoder know of tokens, by id, each read once.

    A token's text depends on what stands before it only if it goes on with a character: its ``texts_amid`` one is None.
    """

    def __init__(self, decoder: TokenDecoder, *, begins_text: bool) -> None:
        plain, amid = (TokenTexts(decoder, _begins=begins_text, _pending=pending) for pending in (b"", b"\xf0"))

        def text_amid(token_id: int) -> str | None:
            text, data = amid.of(token_id)
            return text if _starts_character(data) else None

        self.texts = _Table(lambda token_id: plain.of(token_id)[0])
        self.texts_amid = _Table(text_amid)
        self.names = _Table(lambda token_id: name_of(plain.of(token_id)[1]))


class _Table(dict[int, _Told]):
    """What ``read`` tells of a token, by id."""

    def __init__(self, read: Callable[[int], _Told]) -> None:
        self._read = read

    def __missing__(self, token_id: int) -> _Told:
        return self.setdefault(token_id, self._read(token_id))


def _starts_character(data: bytes) -> bool:
    return data[:1] != b"" and data[0] & 0xC0 != 0x80


def _is_broken(run: bytes) -> bool:
    try:
        run.decode()
    except UnicodeDecodeError:
        return True
    return False
