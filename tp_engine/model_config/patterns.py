"""Regular expressions that a checkpoint or an adapter brings: compiled if they match names in bounded time.

Python's engine tries all ways to split a name among the repetitions of an expression; ``(a+)+b`` takes for ever.
"""

import re

from tp_engine.errors import ConfigError, shown

_MAX_CHARACTERS = 4096
_MAX_REPEATS = 5  # a name of 100 characters is then tried in some million ways at most
_MAX_GROUPS = 16
_LITERAL = re.compile(r"\\.|\[\^?\]?[^\]]*\]", re.DOTALL)
_REPEATED_GROUP = re.compile(r"\)[*+{]")
_OPENING = re.compile(r"\((?!\?)")


def compile_pattern(pattern: str, origin: str) -> re.Pattern[str]:
    """``pattern``, which ``origin`` has.  ``ConfigError`` if it is not an expression, or may take very long."""
    bare = _LITERAL.sub("x", pattern)
    repeats = sum(bare.count(mark) for mark in "*+{")
    if (
        len(pattern) > _MAX_CHARACTERS
        or repeats > _MAX_REPEATS
        or _REPEATED_GROUP.search(bare)
        or len(_OPENING.findall(bare)) + bare.count("?") > _MAX_GROUPS
    ):
        raise ConfigError(
            f"{origin} has the pattern {shown(pattern)}, which may take very long to match: it may repeat something "
            f"{_MAX_REPEATS} times, no group, and have {_MAX_GROUPS} groups"
        )
    try:
        return re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise ConfigError(f"{origin} has {shown(pattern)}, which is not a regular expression: {error}") from error
