"""Whether JSON schemas, grammars and regular expressions nest too deeply, found in linear time and without recursion.

A compiler recurses over them, so unbounded nesting overflows its stack.
"""

import re
from collections.abc import Mapping
from typing import Any

_DEFINITIONS = ("$defs", "definitions")
_FIRST_RULES = ("start", "root")
# Each of these patterns reads a character once, even where a closing mark is missing.
_QUOTED = re.compile(r"""(?://|#)[^\n]*+|(["'/])(?:(?!\1)[^\\\n]|\\.)*+\1?""")
_RULE = re.compile(r"^[ \t]*+[?!]?([A-Za-z_][\w-]*+)[^\n:=]*+(?:::=|:)", re.MULTILINE)
_NAME = re.compile(r"[A-Za-z_][\w-]*+")
_ESCAPED_OR_CLASS = re.compile(r"\\.|\[\^?\]?(?:[^\]\\]|\\.)*+\]?", re.DOTALL)
_BRACKET = re.compile(r"[()\[\]{}]")


def is_schema_deeper(schema: Any, limit: int) -> bool:
    """Whether a path down a JSON schema, through objects, lists and references within the schema, is longer than
    ``limit``.  Each part is looked at once; definitions count where they are referred to."""
    seen, targets = set[int](), dict[str, Any]()
    open_parts: list[tuple[Any, int]] = [(schema, 1)]
    while open_parts:
        part, depth = open_parts.pop()
        if not isinstance(part, (Mapping, list)) or id(part) in seen:
            continue
        if depth > limit:
            return True
        seen.add(id(part))
        if isinstance(part, list):
            open_parts += [(one, depth + 1) for one in part]
            continue
        for key, value in part.items():
            if key == "$ref" and isinstance(value, str):
                if value not in targets:
                    targets[value] = _target(schema, value)
                open_parts.append((targets[value], depth + 1))
            elif key not in _DEFINITIONS:
                open_parts.append((value, depth + 1))
    return False


def is_grammar_deeper(text: str, limit: int) -> bool:
    """Whether a chain of rules of a Lark or GBNF grammar is longer than ``limit``, or its brackets nest deeper.
    Each rule is followed once, from the start rule on."""
    bare = _QUOTED.sub(" ", text)
    rules = list(_RULE.finditer(bare))
    ends = [*(rule.start() for rule in rules[1:]), len(bare)]
    names = {rule[1] for rule in rules}
    parts = {
        rule[1]: [name for name in _NAME.findall(bare, rule.end(), end) if name in names]
        for rule, end in zip(rules, ends, strict=False)
    }
    seen = set[str]()
    open_rules = [(name, 1) for name in _FIRST_RULES if name in names]
    while open_rules:
        name, depth = open_rules.pop()
        if name in seen:
            continue
        if depth > limit:
            return True
        seen.add(name)
        open_rules += [(part, depth + 1) for part in parts[name]]
    return _are_brackets_deeper(bare, limit)


def is_expression_deeper(regex: str, limit: int) -> bool:
    """Whether the groups of a regular expression nest deeper than ``limit``."""
    return _are_brackets_deeper(_ESCAPED_OR_CLASS.sub("", regex), limit)


def _are_brackets_deeper(text: str, limit: int) -> bool:
    depth = 0
    for bracket in _BRACKET.finditer(text):
        depth += 1 if bracket[0] in "([{" else -1
        if depth > limit:
            return True
    return False


def _target(schema: Any, reference: str) -> Any:
    """What a reference within the schema points to; None for any other."""
    root, *steps = reference.split("/")
    found = schema if root == "#" else None
    for step in steps:
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(found, Mapping):
            found = found.get(name)
        elif isinstance(found, list) and name.isdecimal() and len(name) < 8:
            found = found[int(name)] if int(name) < len(found) else None
        else:
            return None
    return found
