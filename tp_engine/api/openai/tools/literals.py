"""Arguments that models write as literals of a language, such as ``city='Paris'`` or ``days=[1, 2]``, as JSON."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from tp_engine.api.openai.tools.argument_types import ArgumentTypes, json_value
from tp_engine.api.openai.tools.text_parser import partial_suffix, valid_unicode

OPENING, CLOSING = "([{", ")]}"
_MAX_DEPTH = 64
_SPACE = re.compile(r"[ \t\r\n]*")
_BARE = re.compile(r"[^,()\[\]{}]*")
_WORD = re.compile(r"[^,()\[\]{}:=\"'<]*")
_NUMBER = re.compile(r"[+-]?(?=\.?\d)(\d[\d_]*)?(\.\d*)?([eE][+-]?\d+)?")
_PREFIX = re.compile(r"[rbfuRBFU]{1,2}(?=[\"'])")
_ESCAPE = re.compile(r"\\(\n|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[0-7]{1,3}|.)", re.DOTALL)
_PAIR = r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
# Characters and escapes that no further text changes: the longest escape is a pair, of 12 characters.
_SETTLED = re.compile(rf"(?:[^\\]|(?=[\s\S]{{12}})(?:{_PAIR}|{_ESCAPE.pattern}))*+", re.DOTALL)
_LONGEST_QUOTE = 5
_MAX_KEY = 256  # characters up to a value that is passed on as it comes
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "\n": ""}
_WORDS = {"true": True, "True": True, "false": False, "False": False, "null": None, "None": None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Language:
    """How values are written.  ``quotes``: one of them is on both sides of a string, longer ones first.

    ``escapes``: a backslash in a string begins an escape.  ``equals`` stands between an argument's key and its value.
    ``bare_texts``: a word that is no other value is a string, and keys of objects have no quotes.
    """

    quotes: tuple[str, ...]
    escapes: bool
    equals: str
    bare_texts: bool = False

    def pattern(self, quote: str) -> re.Pattern[str]:
        """What to look for in a string of ``quote``, or, if that is empty, outside strings."""
        return _pattern(self, quote)

    def quote_of(self, text: str) -> str | None:
        """The quote with which ``text`` begins, empty for none; None if that is not known yet."""
        if any(len(text) < len(quote) and quote.startswith(text) for quote in self.quotes):
            return None
        return next((quote for quote in self.quotes if text.startswith(quote)), "")

    def begun_string(self, text: str) -> tuple[str, int, str] | None:
        """The key, the beginning and the quote of a string that has one, at the beginning of an argument.

        The quote is empty if it is another argument; None if that is not known yet.
        """
        key, value = self.divided(text)
        start = len(text) - len(value)
        if key is None or start > _MAX_KEY:
            is_open = len(text) <= _MAX_KEY and _WORD.fullmatch(text) is not None
            return None if is_open else ("", 0, "")
        quote = self.quote_of(value[:_LONGEST_QUOTE])
        if quote is None:
            return None if value or len(text) <= _MAX_KEY else ("", 0, "")
        return key, start + len(quote), quote

    def divided(self, text: str) -> tuple[str | None, str]:
        """The key of an argument, None if it has none, and the text after it."""
        found = _WORD.match(text)
        assert found is not None
        key, end = found.group().strip(), found.end()
        if not key or not text.startswith(self.equals, end):
            return None, text
        return key, text[end + len(self.equals) :].lstrip()

    def settled(self, text: str, quote: str) -> int:
        """How many characters of ``text``, in a string of ``quote``, keep their meaning whatever follows."""
        length = len(text) - partial_suffix(text, quote)
        found = _SETTLED.match(text, 0, length)
        return found.end() if found is not None and self.escapes else length

    def unescaped(self, text: str) -> str:
        """The value of ``text`` in a string."""
        return valid_unicode(_ESCAPE.sub(_unescaped, text)) if self.escapes else text

    def string_end(self, text: str, start: int, quote: str) -> int | None:
        """The place after the quote that ends a string whose text begins at ``start``; None if none does."""
        while (found := self.pattern(quote).search(text, start)) is not None:
            if found.group() == quote:
                return found.end()
            start = found.start() + 2
        return None


@lru_cache
def _pattern(language: Language, quote: str) -> re.Pattern[str]:
    marks = [quote, *(["\\"] if language.escapes else [])] if quote else [*language.quotes, *OPENING, *CLOSING, ","]
    return re.compile("|".join(map(re.escape, marks)))


PYTHON = Language(quotes=('"""', "'''", '"', "'"), escapes=True, equals="=")


class LiteralReader:
    """Reads one argument of a call.  Raises ``ValueError`` for what is not a literal; the text's end closes all."""

    def __init__(self, language: Language, text: str) -> None:
        self._language = language
        self._text = text
        self._place = 0
        self._depth = 0

    def argument(self, name: str, types: ArgumentTypes) -> tuple[str | None, str]:
        """The key of the argument, None if it has none, and its value as JSON text.

        ``name`` is its name in the tool's schema if it has no key.
        """
        key: str | None = self._string() if self._quote() else self._match(_WORD)
        if not key or not self._take(self._language.equals):
            key, self._place = None, 0
        if self._language.bare_texts and self._next() not in OPENING and not self._quote():
            value = json_value(self._match(_BARE), types.of(name if key is None else key))  # by the tool's schema
        else:
            value = json.dumps(self._value(), ensure_ascii=False, allow_nan=False)
        if self._next():
            raise ValueError("more than one value")
        return key, value

    def _match(self, pattern: re.Pattern[str]) -> str:
        """Take what ``pattern`` matches here."""
        found = pattern.match(self._text, self._place)
        self._place = self._place if found is None else found.end()
        return "" if found is None else found.group().strip()

    def _next(self) -> str:
        """The next character other than white space; empty at the end."""
        self._match(_SPACE)
        return self._text[self._place : self._place + 1]

    def _take(self, mark: str) -> bool:
        self._next()
        is_here = self._text.startswith(mark, self._place)
        self._place += len(mark) if is_here else 0
        return is_here

    def _quote(self) -> str:
        """The quote that begins here, after white space; empty if there is none."""
        self._next()
        return next((quote for quote in self._language.quotes if self._text.startswith(quote, self._place)), "")

    def _value(self) -> Any:
        char = self._next()
        if not char:
            raise ValueError("no value")
        if char in OPENING:
            self._place += 1
            return self._object() if char == "{" else [self._value() for _ in self._items()]
        prefix = self._match(_PREFIX).lower() if self._language.escapes else ""
        if not self._quote():
            return self._plain(self._match(_BARE))
        text = self._string(raw="r" in prefix)
        if "f" in prefix and "{" in text:
            raise ValueError("a text with a hole")
        while self._quote():  # adjacent strings are one
            text += self._string()
        return text

    def _string(self, *, raw: bool = False) -> str:
        quote = self._quote()
        start = self._place + len(quote)
        end = self._language.string_end(self._text, start, quote)
        text = self._text[start : len(self._text) if end is None else end - len(quote)]
        self._place = len(self._text) if end is None else end
        return text if raw else self._language.unescaped(text)

    def _plain(self, text: str) -> Any:
        if text in _WORDS:
            return _WORDS[text]
        if (number := _NUMBER.fullmatch(text)) is not None:
            digits = text.replace("_", "")
            return int(digits) if number[2] is None and number[3] is None else float(digits)
        if self._language.bare_texts:
            return text
        raise ValueError("no literal")

    def _items(self) -> Iterator[None]:
        """Stop at each item up to the closing bracket, and take that."""
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise ValueError("nested too deeply")
        while (char := self._next()) and char not in CLOSING:
            yield
            if not self._take(",") and (char := self._next()) and char not in CLOSING:
                raise ValueError("no comma")
        self._place += 1
        self._depth -= 1

    def _object(self) -> Any:
        """An object; or a set, whose items have no values."""
        items: list[Any] = []
        pairs: dict[str, Any] = {}
        for _ in self._items():
            if self._next() in OPENING or self._quote():
                key = self._value()
            else:
                word = self._match(_WORD)
                key = word if self._language.bare_texts else self._plain(word)
            if self._take(":"):
                pairs[key if isinstance(key, str) else json.dumps(key)] = self._value()
            else:
                items.append(key)
        if items and pairs:
            raise ValueError("neither an object nor a set")
        return items or pairs


def _unescaped(found: re.Match[str]) -> str:
    code = found[1]
    if code[0] in "xuU" and len(code) > 1:
        value = int(code[1:], 16)
        return chr(value) if value < 0x110000 else "\ufffd"
    if code[0] in "01234567":
        return chr(int(code, 8))
    return _ESCAPES.get(code, code if code in "\\'\"" else found.group())
