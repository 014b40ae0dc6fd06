"""Reasoning before an output that must follow a grammar: free text up to ``</think>``, then the grammar."""

from __future__ import annotations

import json

_ANSWER = "answer"
# A suffix ends the shortest text that has it, so that the first closing mark ends the reasoning.
_RULES = """
thought[suffix="</think>"]: /(?s:.*)/
SPACE: /[ \\n\\r\\t]{1,64}/
"""
_STARTS = {
    "open": "start: thought SPACE? @answer",
    "optional": 'start: (SPACE? "<think>" thought SPACE?)? @answer',
}


def after_reasoning(grammar: str, reasoning: str) -> str:
    """``grammar`` of the library (its JSON, or Lark) behind reasoning, which is ``open`` or ``optional``."""
    library_json = grammar.lstrip().startswith("{")
    parts = json.loads(grammar)["grammars"] if library_json else [{"lark_grammar": grammar}]
    parts[0]["name"] = _ANSWER
    return json.dumps({"grammars": [{"lark_grammar": _STARTS[reasoning] + _RULES}, *parts]})
