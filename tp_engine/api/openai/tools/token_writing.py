"""How a tokenizer writes marks, for grammars in the Lark syntax of the library."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any


class TokenWriting:
    """Writes marks with a tokenizer's own tokens, by their text: the ``special`` ones, and all that the grammar library
    keeps ``apart`` from text."""

    def __init__(self, special: Mapping[str, int], apart: Mapping[str, int], tokenizer: Any | None = None) -> None:
        self.special, self.apart = special, apart
        self._tokenizer = tokenizer
        self._written: dict[str, str] = {}

    @classmethod
    def of(cls, tokenizer: Any | None) -> TokenWriting:
        """How a tokenizer writes marks; without one, they are text."""
        if tokenizer is None:
            return cls({}, {})
        special = _special_ids(tokenizer)
        return cls(special, _grammar_tokens(tokenizer, special), tokenizer)

    def special_id(self, mark: str) -> int | None:
        """The special token that is ``mark``, None if there is none."""
        return self.special.get(mark)

    def is_special(self, mark: str) -> bool:
        """Whether ``mark`` is a special token, which texts leave out by default."""
        return mark in self.special

    def is_one_token(self, mark: str) -> bool:
        """Whether ``mark`` is a token that no text of a grammar can hold."""
        return mark in self.apart

    def token_id(self, mark: str) -> int | None:
        """The one token that is ``mark``, special or not; None if it has several."""
        token_ids = [] if self._tokenizer is None else self._tokenizer.encode(mark, add_special_tokens=False)
        return token_ids[0] if len(token_ids) == 1 else None

    def mark(self, mark: str) -> str:
        """The expression for ``mark``: its own token, which may begin it, or its text."""
        if mark not in self._written:
            first = max((token for token in self.apart if token and mark.startswith(token)), key=len, default="")
            rest = json.dumps(mark[len(first) :], ensure_ascii=False) if first != mark else ""
            self._written[mark] = " ".join(filter(None, (f"<[{self.apart[first]}]>" if first else "", rest)))
        return self._written[mark]

    def any_text(self, rule: str, *marks: str) -> str:
        """The rule of a name for any text, in which those of ``marks`` that are tokens may stand."""
        special = (self.mark(mark) for mark in marks if self.is_one_token(mark))
        return f"{rule}: ({' | '.join(('/(?s:.+)/', *special))})*"

    def text_until(self, rule: str, *marks: str) -> str:
        """The rule of a name for any text up to the first of ``marks``, and that mark.

        A suffix ends the shortest text that has it; text cannot hold a token of its own.
        """
        if self.is_one_token(marks[0]):
            return f"{rule}: /(?s:.*)/ ({' | '.join(map(self.mark, marks))})"
        suffix = json.dumps(marks[0], ensure_ascii=False)
        if len(marks) > 1:
            texts = "|".join(map(re.escape, marks)).replace("/", r"\/")
            suffix = f"/{texts}/"
        return f"{rule}[suffix={suffix}]: /(?s:.*)/"


@lru_cache(maxsize=4)
def writing_of(tokenizer: Any | None) -> TokenWriting:
    """``TokenWriting.of``, cached for a tokenizer that serves many requests."""
    return TokenWriting.of(tokenizer)


def _special_ids(tokenizer: Any) -> Mapping[str, int]:
    """The special tokens, by their text; none for a tokenizer that does not list them."""
    added = getattr(tokenizer, "added_tokens_decoder", None)
    if added is None:
        texts = getattr(tokenizer, "all_special_tokens", ())
        return dict(zip(texts, getattr(tokenizer, "all_special_ids", ()), strict=True))
    return {token.content: token_id for token_id, token in added.items() if token.special}


def _grammar_tokens(tokenizer: Any, special: Mapping[str, int]) -> Mapping[str, int]:
    """The tokens that the grammar library keeps apart from text: special ones, and added ones in angle brackets.

    Of the second kind are the ``</think>`` and ``<tool_call>`` of Qwen3, DeepSeek and GLM.
    """
    added = getattr(tokenizer, "added_tokens_decoder", None) or {}
    bracketed = {
        token.content: token_id
        for token_id, token in added.items()
        if token.content.startswith("<") and token.content.endswith(">")
    }
    return {**bracketed, **special}
