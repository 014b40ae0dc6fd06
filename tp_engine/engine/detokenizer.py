"""From token ids to text, one token at a time, equal to decoding all of them at once.

Decoding a token by itself is wrong: characters span tokens, and decoders look at neighbours.  Following the prefix
method of Hugging Face's text-generation-inference, a window of recent tokens is decoded each time and only what is new
and settled is given out::

    tokens   ... gone ... | context | new ...        window = context + new
    text                  | given   | to give | held

Context begins where the text was settled, so what the window decodes to ends like the whole.  Held back are

* a last U+FFFD, which may be the first bytes of a character that the next tokens complete;
* a run of byte tokens (``<0xE4>``) until another token ends it: decoders with byte fallback show a whole run as U+FFFD
  if any of it is not UTF-8, so that a later byte can still change the text of earlier ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_REPLACEMENT = "\ufffd"
# More tokens than a character has bytes: decoding from any token that far back ends like decoding everything.
_RESYNC_TOKENS = 16
_MAX_HELD_TOKENS = 64


class TokenDecoder:
    """One tokenizer's decoding, shared by all requests; ``tokenizer`` is any of transformers'."""

    def __init__(self, tokenizer: Any) -> None:
        self.decode: Callable[[list[int]], str] = _plain_decode(tokenizer)
        self.special_ids = _special_ids(tokenizer)
        self.byte_ids = _byte_ids(tokenizer)
        self._token_texts: dict[int, str] = {}

    def token_text(self, token_id: int) -> str:
        """The text of one token by itself; U+FFFD where it is a part of a character."""
        text = self._token_texts.get(token_id)
        if text is None:
            text = self._token_texts[token_id] = self.decode([token_id])
        return text


class IncrementalDetokenizer:
    """The growing text of one sequence: what ``push`` and at last ``flush`` return, joined, is the whole text."""

    def __init__(self, decoder: TokenDecoder, *, skip_special_tokens: bool) -> None:
        self._decode = decoder.decode
        self._byte_ids = decoder.byte_ids
        self._skipped_ids: frozenset[int] = decoder.special_ids if skip_special_tokens else frozenset()
        self._window: list[int] = []
        self._num_context = 0  # tokens at the window's start whose text has been given
        self._num_given = 0  # characters of the window's text that have been given

    def push(self, token_id: int) -> str:
        """Add a token; returns the text that is settled now and was not before."""
        if token_id in self._skipped_ids:
            return ""
        self._window.append(token_id)
        if token_id in self._byte_ids:
            return ""
        text = self._decode(self._window)
        if text.endswith(_REPLACEMENT):
            return self._give_all_but_last(text)
        new = text[self._num_given :]
        if new:
            del self._window[: self._num_context]
            self._num_context = len(self._window)
            self._num_given = len(self._decode(self._window))
        return new

    def flush(self) -> str:
        """What was held back, as it stands."""
        new = self._decode(self._window)[self._num_given :] if self._window else ""
        self._window.clear()
        self._num_context = self._num_given = 0
        return new

    def _give_all_but_last(self, text: str) -> str:
        num_settled = max(self._num_given, len(text) - 1)
        new = text[self._num_given : num_settled]
        self._num_given = num_settled
        if len(self._window) > _MAX_HELD_TOKENS:
            del self._window[:-_RESYNC_TOKENS]
            self._num_context = 0
            self._num_given = len(self._decode(self._window)) - 1
        return new


def _plain_decode(tokenizer: Any) -> Callable[[list[int]], str]:
    """All tokens as text, nothing skipped or cleaned up; by the Rust tokenizer itself if its wrapper adds nothing."""
    kind = type(tokenizer)
    is_plain = kind.decode.__module__ == "transformers.tokenization_utils_base"
    is_fast = getattr(kind._decode, "__module__", "") == "transformers.tokenization_utils_tokenizers"
    if is_plain and is_fast:
        backend = tokenizer.backend_tokenizer
        return lambda token_ids: str(backend.decode(token_ids, skip_special_tokens=False))
    return lambda token_ids: str(
        tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    )


def _special_ids(tokenizer: Any) -> frozenset[int]:
    added = getattr(tokenizer, "added_tokens_decoder", None)
    if added is None:
        return frozenset(tokenizer.all_special_ids)
    return frozenset(token_id for token_id, token in added.items() if token.special)


def _byte_ids(tokenizer: Any) -> frozenset[int]:
    vocab = tokenizer.get_vocab()
    names = [f"<0x{byte:02{case}}>" for byte in range(256) for case in "Xx"]
    return frozenset(vocab[name] for name in names if name in vocab)
