"""Arguments that models write as literals of a language, such as ``city='Paris'`` or ``days=[1, 2]``, read to JSON."""

import json
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from tp_engine.api.openai.tools.argument_types import ArgumentTypes, json_value
from tp_engine.api.openai.tools.text_parser import partial_suffix, valid_unicode

OPENING, CLOSING = "([{", ")]}"
_MAX_DEPTH = 64
_SPACE = " \t\r\n"
_BARE = re.compile(r"[^,()\[\]{}]*")
_WORD = re.compile(r"[^,()\[\]{}:=\"'<]*")
_NUMBER = re.compile(r"[+-]?(\d[\d_]*)?(\.\d*)?([eE][+-]?\d+)?")
_PREFIX = re.compile(r"[rbfuRBFU]{1,2}(?=[\"'])")
_ESCAPE = re.compile(r"\\(\n|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[0-7]{1,3}|.)", re.DOTALL)
_PAIR = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}")
_LONGEST_ESCAPE = 12  # a pair
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
        """Return what to look for in a string of ``quote``, or, if that is empty, outside of strings."""
        return _pattern(self, quote)

    def quote_of(self, text: str) -> str | None:
        """Return the quote with which ``text`` begins, empty if with none; None if that is not known yet."""
        if any(len(text) < len(quote) and quote.startswith(text) for quote in self.quotes):
            return None
        return next((quote for quote in self.quotes if text.startswith(quote)), "")

    def begun_string(self, text: str) -> tuple[str, int, str] | None:
        """Return the key, the beginning and the quote of a string that has one, at the beginning of an argument.

        The quote is empty if it is another argument; None if that is not known yet.
        """
        found = _keyed(self).match(text)
        if found is None or not found[1].strip() or found.end() > _MAX_KEY:
            is_open = len(text) <= _MAX_KEY and _WORD.fullmatch(text) is not None
            return None if is_open else ("", 0, "")
        quote = self.quote_of(text[found.end() : found.end() + _LONGEST_QUOTE])
        if quote is None:
            return None if found.end() < len(text) or len(text) <= _MAX_KEY else ("", 0, "")
        return found[1].strip(), found.end() + len(quote), quote

    def divided(self, text: str) -> tuple[str | None, str]:
        """Return the key of an argument, None if it has none, and the text behind it."""
        found = _keyed(self).match(text)
        return (None, text) if found is None or not found[1].strip() else (found[1].strip(), text[found.end() :])

    def settled(self, text: str, quote: str) -> int:
        """Return how many characters of ``text``, in a string of ``quote``, mean the same whatever follows."""
        length, place = len(text) - partial_suffix(text, quote), 0
        while self.escapes and 0 <= (slash := text.find("\\", place)) < length:
            if slash + _LONGEST_ESCAPE > length:
                return slash
            found = _PAIR.match(text, slash) or _ESCAPE.match(text, slash)
            place = slash + 1 if found is None else found.end()
        return max(length, place)

    def unescaped(self, text: str) -> str:
        """Return what ``text`` in a string means."""
        return valid_unicode(_ESCAPE.sub(_unescaped, text)) if self.escapes else text


@lru_cache
def _pattern(language: Language, quote: str) -> re.Pattern[str]:
    marks = [quote, *(["\\"] if language.escapes else [])] if quote else [*language.quotes, *OPENING, *CLOSING, ","]
    return re.compile("|".join(map(re.escape, marks)))


@lru_cache
def _keyed(language: Language) -> re.Pattern[str]:
    """A key, which is group 1, and what stands between it and its value."""
    return re.compile(rf"({_WORD.pattern}){re.escape(language.equals)}\s*")


PYTHON = Language(quotes=('"""', "'''", '"', "'"), escapes=True, equals="=")


class LiteralReader:
    """Reads one argument of a call.  Raises ``ValueError`` for what is no literal; the text's end closes all."""

    def __init__(self, language: Language, text: str) -> None:
        self._language = language
        self._text = text
        self._place = 0
        self._depth = 0

    def argument(self, name: str, types: ArgumentTypes) -> tuple[str | None, str]:
        """Return the key of the argument, None if it has none, and its value as JSON text.

        ``name`` is its name in the tool's schema if it has no key.
        """
        self._next()
        key = self._key()
        if self._language.bare_texts and self._next() not in OPENING and self._quote() is None:
            value = json_value(self._bare(), types.of(name if key is None else key))  # a word, by the tool's schema
        else:
            value = json.dumps(self._value(), ensure_ascii=False, allow_nan=False)
        if self._next():
            raise ValueError("more than one value")
        return key, value

    def _next(self) -> str:
        """The next character that is no white space; empty at the end."""
        while self._place < len(self._text) and self._text[self._place] in _SPACE:
            self._place += 1
        return self._text[self._place : self._place + 1]

    def _take(self, mark: str) -> bool:
        self._next()
        if not self._text.startswith(mark, self._place):
            return False
        self._place += len(mark)
        return True

    def _key(self) -> str | None:
        """The key in front of an argument; None, and nothing read, if it has none."""
        start = self._place
        key = self._string() if self._quote() is not None else self._word()
        if key and self._take(self._language.equals):
            return key
        self._place = start
        return None

    def _word(self) -> str:
        found = _WORD.match(self._text, self._place)
        assert found is not None
        self._place = found.end()
        return found.group().strip()

    def _quote(self) -> str | None:
        return next((quote for quote in self._language.quotes if self._text.startswith(quote, self._place)), None)

    def _value(self) -> Any:
        char = self._next()
        if char in OPENING:
            if self._depth >= _MAX_DEPTH or not char:
                raise ValueError("nested too deeply")
            self._depth += 1
            self._place += 1
            value = self._object() if char == "{" else self._items()
            self._depth -= 1
            return value
        prefix = _PREFIX.match(self._text, self._place) if self._language.escapes else None
        if prefix is not None or self._quote() is not None:
            return self._joined(prefix.group().lower() if prefix is not None else "")
        return self._plain(self._bare())

    def _joined(self, prefix: str) -> str:
        """A string, and those directly behind it, which Python joins."""
        self._place += len(prefix)
        text = self._string(raw="r" in prefix)
        if "f" in prefix and "{" in text:
            raise ValueError("a text with a hole")
        while self._next() and self._quote() is not None:
            text += self._string()
        return text

    def _string(self, *, raw: bool = False) -> str:
        quote = self._quote()
        assert quote is not None
        start = self._place + len(quote)
        end = string_end(self._text, start, quote, self._language)
        text = self._text[start : len(self._text) if end is None else end - len(quote)]
        self._place = len(self._text) if end is None else end
        return text if raw else self._language.unescaped(text)

    def _bare(self) -> str:
        found = _BARE.match(self._text, self._place)
        assert found is not None
        self._place = found.end()
        return found.group().strip()

    def _plain(self, text: str) -> Any:
        if text in _WORDS:
            return _WORDS[text]
        number = _NUMBER.fullmatch(text)
        if number is not None and any(char.isdigit() for char in text):
            digits = text.replace("_", "")
            return int(digits) if number[2] is None and number[3] is None else float(digits)
        if self._language.bare_texts:
            return text
        raise ValueError("no literal")

    def _items(self) -> list[Any]:
        found: list[Any] = []
        while self._next() and self._next() not in CLOSING:
            found.append(self._value())
            if not self._take(",") and self._next() and self._next() not in CLOSING:
                raise ValueError("no comma")
        self._place += 1
        return found

    def _object(self) -> Any:
        """An object; or a set, whose items have no values."""
        items: list[Any] = []
        pairs: dict[str, Any] = {}
        while self._next() and self._next() not in CLOSING:
            if self._next() in OPENING or self._quote() is not None:
                key = self._value()
            else:
                key = self._word() if self._language.bare_texts else self._plain(self._word())
            if self._take(":"):
                pairs[key if isinstance(key, str) else json.dumps(key)] = self._value()
            else:
                items.append(key)
            if not self._take(",") and self._next() and self._next() not in CLOSING:
                raise ValueError("no comma")
        self._place += 1
        if items and pairs:
            raise ValueError("neither an object nor a set")
        return items or pairs


def string_end(text: str, start: int, quote: str, language: Language) -> int | None:
    """Return the place behind the quote that ends a string whose text begins at ``start``; None if none does."""
    ends = language.pattern(quote)
    while (found := ends.search(text, start)) is not None:
        if found.group() == quote:
            return found.end()
        start = found.start() + 2
    return None


def _unescaped(found: re.Match[str]) -> str:
    code = found[1]
    if code[0] in "xuU" and len(code) > 1:
        value = int(code[1:], 16)
        return chr(value) if value < 0x110000 else "\ufffd"
    if code[0] in "01234567":
        return chr(int(code, 8))
    return _ESCAPES.get(code, code if code in "\\'\"" else found.group())
