"""Tool calls as Hermes and Qwen models write them: ``<tool_call>{"name": "f", "arguments": {...}}</tool_call>``."""

from tp_engine.api.openai.tools.json_calls import CallBlock

BLOCK = CallBlock(opens=("<tool_call>",))
FORMAT = BLOCK.format("Qwen, Hermes", aliases=("qwen", "qwen25", "qwen3_json"))
