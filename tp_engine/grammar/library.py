"""The one door to llguidance."""

from __future__ import annotations

from typing import Any

from tp_engine.errors import RequestError

PARAM = "structured_outputs"


def llguidance() -> Any:
    """The library.  ``RequestError`` where it can not be imported: requests for free text are served without it."""
    try:
        import llguidance as library
    except ImportError as error:
        raise RequestError(
            f"structured output needs the package llguidance, which can not be imported here ({error}): install it "
            "with pip install 'llguidance>=1.9', or ask for free text",
            param=PARAM,
        ) from error
    return library


def parser_limits() -> Any:
    """Bounds of what one grammar may cost: time to compile it and to find the next tokens, and memory for its states.

    A state takes one to two kilobytes.  Ordinary schemas have a few hundred.
    """
    return llguidance().LLParserLimits(max_lexer_states=50_000, verbose_errors=False)
