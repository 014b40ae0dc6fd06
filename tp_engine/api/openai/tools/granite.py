"""Tool calls as Granite 3 models write them: a list behind a mark, and nothing that closes it.

::

    <|tool_call|>[{"name": "f", "arguments": {...}}, ...]

Some write ``<tool_call>`` instead; Granite 4 writes what Hermes models write, which is read too.
"""

from __future__ import annotations

from tp_engine.api.openai.tools import hermes
from tp_engine.api.openai.tools.events import ToolFormat

OPENS = ("<|tool_call|>", hermes.OPEN)
FORMAT = ToolFormat(
    models="Granite", marks=OPENS, opens=OPENS, new_parser=lambda tools: hermes.HermesToolParser(OPENS, closes=False)
)
