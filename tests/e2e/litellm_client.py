"""A client that uses litellm; a separate program, because litellm needs older libraries than the server.

``python litellm_client.py URL`` prints one JSON object with the server's answers.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # without this litellm downloads prices

import litellm

SAID = "héllo 😀 中文"
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}]


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"SAY:{text}"}]


def error_of(**request: Any) -> str:
    """The name of the exception that the request raises."""
    try:
        litellm.completion(**request)
    except Exception as error:
        return type(error).__name__
    return "none"


async def together(common: dict[str, Any]) -> list[str]:
    answers = await asyncio.gather(*(litellm.acompletion(messages=user(str(n)), **common) for n in range(8)))
    return [answer.choices[0].message.content for answer in answers]


def main(url: str) -> dict[str, Any]:
    common = {"api_base": url + "/v1", "api_key": "none", "timeout": 30, "num_retries": 0}
    chat = common | {"model": "hosted_vllm/demo"}
    whole = litellm.completion(messages=user(SAID), **chat)
    chunks = list(litellm.completion(messages=user(SAID), stream=True, stream_options={"include_usage": True}, **chat))
    call = litellm.completion(messages=user(CALL), tools=TOOLS, **chat).choices[0].message.tool_calls[0].function
    text = litellm.text_completion(prompt=SAID, max_tokens=50, **common | {"model": "text-completion-openai/demo"})
    response = litellm.responses(input=f"SAY:{SAID}", **common | {"model": "openai/demo"})
    return {
        "whole": whole.choices[0].message.content,
        "num_tokens": whole.usage.completion_tokens,
        "streamed": "".join(one.choices[0].delta.content or "" for one in chunks if one.choices),
        "streamed_num_tokens": next(one.usage.completion_tokens for one in chunks if getattr(one, "usage", None)),
        "call": [call.name, json.loads(call.arguments)],
        "completion": text.choices[0].text,
        "response": response.output[0].content[0].text,
        "together": asyncio.run(together(chat)),
        "errors": [
            error_of(messages=user("x"), **common | {"model": "hosted_vllm/gpt-4"}),
            error_of(messages=user("x" * 3000), **chat),
            error_of(messages=user("x"), temperature=-1, **chat),
        ],
    }


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
