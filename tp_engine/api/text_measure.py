"""A lower bound on a text's number of tokens without tokenizing it, so that one that cannot fit is refused early.

A token of a BPE vocabulary stands for as many bytes of the text as it has itself, and each byte has a token; letters
may have been composed before.  White space counts where the tokenizer keeps it: some split words at it, and some tokens
absorb adjacent white space, in runs of any length.  For tokenizers that drop other characters, or turn many unknown
ones into one token, no bound is known.
"""

import json
from functools import cached_property
from typing import Any

from tp_engine.engine.byte_letters import byte_letters
from tp_engine.system.units import ceil_div

# Characters that Python or Rust regard as white space, those of ASCII first.
_ASCII_SPACES = "\t\n\v\f\r\x1c\x1d\x1e\x1f "
_SPACES = _ASCII_SPACES + "\x85\xa0\u1680" + "".join(map(chr, range(0x2000, 0x200B))) + "\u2028\u2029\u202f\u205f\u3000"
# Unicode's normal forms and lower case put at most this many bytes into one.
_MOST_BYTES_INTO_ONE = 4
_MOST_BYTES_OF_LETTER = 4
_LETTER_FORMS = ("NFC", "NFD", "NFKC", "NFKD", "Lowercase")
_ADDING = ("ByteLevel", "Prepend", "Strip")
_DROPPING_SPACES = ("Whitespace", "WhitespaceSplit", "BertPreTokenizer")
_SPLITTING = ("ByteLevel", "Digits", "Metaspace", "UnicodeScripts", *_DROPPING_SPACES)


class TextMeasure:
    """Measures texts for one tokenizer of transformers."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def least_tokens(self, text: str) -> int:
        """A lower bound on the number of tokens of ``text``; 0 if none is known."""
        longest, longest_word = self._longest_tokens
        if longest_word == 0:
            return 0
        if self._strips_text:
            text = text.strip()
        is_ascii = text.isascii()
        num_bytes = len(text) if is_ascii else len(text.encode())
        spaces, into_one = (_ASCII_SPACES, 1) if is_ascii else (_SPACES, self._bytes_into_one)
        num_in_words = num_bytes - sum(text.count(space) * len(space.encode()) for space in spaces)
        least = ceil_div(num_in_words, longest_word * into_one)
        if self._drops_spaces or any(token in text for token in self._stripping_tokens):
            return least
        return max(least, ceil_div(num_bytes, longest * into_one))

    @cached_property
    def _steps(self) -> list[dict[str, Any]]:
        """The steps before a text's tokens are found: the parts of normalizer and pre-tokenizer."""
        backend = self._tokenizer.backend_tokenizer
        return [*_parts(backend.normalizer, "normalizers"), *_parts(backend.pre_tokenizer, "pretokenizers")]

    @cached_property
    def _bytes_into_one(self) -> int:
        forms = any(step["type"] in _LETTER_FORMS for step in self._steps)
        return _MOST_BYTES_INTO_ONE if forms else 1

    @cached_property
    def _strips_text(self) -> bool:
        """Whether white space at the ends of a text disappears."""
        return any(step["type"] == "Strip" for step in self._steps)

    @cached_property
    def _drops_spaces(self) -> bool:
        """Whether white space anywhere in a text disappears."""
        return any(step["type"] in _DROPPING_SPACES for step in self._steps)

    @cached_property
    def _stripping_tokens(self) -> list[str]:
        """Tokens that absorb adjacent white space."""
        added = self._tokenizer.added_tokens_decoder.values()
        return [token.content for token in added if token.lstrip or token.rstrip]

    @cached_property
    def _longest_tokens(self) -> tuple[int, int]:
        """The most bytes that a token stands for, and that without white space; zeros if they are not known."""
        model: Any = getattr(getattr(self._tokenizer, "backend_tokenizer", None), "model", None)
        if type(model).__name__ != "BPE" or not all(map(_keeps_all, self._steps)):
            return 0, 0
        vocabulary, added = self._tokenizer.get_vocab(), self._tokenizer.get_added_vocab()
        letters = byte_letters()
        is_byte_level = any(step["type"] == "ByteLevel" for step in self._steps)
        names = letters if is_byte_level else [f"<0x{byte:02X}>" for byte in range(256)]
        if not (is_byte_level or model.byte_fallback) or any(name not in vocabulary for name in names):
            return 0, 0
        spaces = str.maketrans("", "", "".join(letters[ord(space)] for space in _ASCII_SPACES))
        longest = longest_word = max((len(token.encode()) for token in added), default=1)
        for token in sorted(vocabulary, key=len, reverse=True):
            if len(token) * (1 if is_byte_level else _MOST_BYTES_OF_LETTER) <= longest_word:
                break
            num_bytes = len(token) if is_byte_level else len(token.encode())
            num_in_word = len(token.translate(spaces)) if is_byte_level else num_bytes
            longest, longest_word = max(longest, num_bytes), max(longest_word, num_in_word)
        return longest, longest_word


def _parts(step: Any, key: str) -> list[dict[str, Any]]:
    """The steps of a normalizer or pre-tokenizer."""
    written = {} if step is None else json.loads(step.__getstate__())
    found: list[dict[str, Any]] = written[key] if written.get("type") == "Sequence" else [written] if written else []
    return found


def _keeps_all(step: dict[str, Any]) -> bool:
    """Whether a step loses no character but white space."""
    kind = step["type"]
    if kind == "Replace":
        return bool(step["pattern"].get("String") == " " and step["content"])
    if kind in ("Split", "Punctuation"):
        return bool(step["behavior"] != "Removed")
    return kind in _LETTER_FORMS or kind in _ADDING or kind in _SPLITTING
