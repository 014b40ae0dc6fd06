"""What each token of a sequence adds to its text, for log-probabilities.

A character may span tokens: it belongs to the token that completes it, and the tokens before add nothing, so the texts
of the tokens, joined, are the text of the sequence::

    tokens   "a"   F0 9F   98   80   "b"
    texts    a     -       -    😀   b

Decoders with byte fallback show a run of byte tokens as it is only if all of it is UTF-8, else each byte as U+FFFD.  A
broken run is known only at its end, so the token behind it has what its texts lack.
"""

import codecs
from dataclasses import dataclass

from tp_engine.engine.tokenizer import TokenDecoder

_REPLACEMENT = "\ufffd"
_Utf8 = codecs.getincrementaldecoder("utf-8")


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

    def _text(self, token_id: int, data: bytes) -> tuple[str, bytes]:
        """The token's text, and what it leaves pending."""
        before, pending = "", self._pending
        if self._run and token_id not in self.decoder.byte_ids and _is_broken(self._run):
            before, pending = _REPLACEMENT * (len(self._run) - self._num_shown), b""
        if not pending and data.isascii():
            return before + data.decode(), b""
        utf8 = _Utf8("replace")
        return before + utf8.decode(pending + data), utf8.getstate()[0]


def _is_broken(run: bytes) -> bool:
    try:
        run.decode()
    except UnicodeDecodeError:
        return True
    return False
