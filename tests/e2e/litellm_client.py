"""A client that uses litellm; a separate program, because litellm needs older libraries than the server.

``python litellm_client.py URL`` prints one JSON object with the server's answers.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
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


def batch(common: dict[str, Any], provider: str) -> list[Any]:
    """State and texts of a batch of three lines, from its file to its results."""
    bodies = [{"model": "demo", "messages": user(f"line {n}"), "max_tokens": 50} for n in range(3)]
    lines = [
        {"custom_id": f"c{n}", "method": "POST", "url": "/v1/chat/completions", "body": body}
        for n, body in enumerate(bodies)
    ]
    text = "\n".join(map(json.dumps, lines)).encode()
    call = common | {"custom_llm_provider": provider}
    file = litellm.create_file(file=("in.jsonl", text, "application/jsonl"), purpose="batch", **call)
    made = litellm.create_batch(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h", **call)
    for _ in range(600):
        found = litellm.retrieve_batch(batch_id=made.id, **call)
        if found.status in ("completed", "failed"):
            break
        time.sleep(0.05)
    results = litellm.file_content(file_id=found.output_file_id, **call).content.decode().splitlines()
    texts = [json.loads(one)["response"]["body"]["choices"][0]["message"]["content"] for one in results]
    return [found.status, sorted(texts)]


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
        "batches": [batch(common, provider) for provider in ("openai", "hosted_vllm")],
        "together": asyncio.run(together(chat)),
        "errors": [
            error_of(messages=user("x"), **common | {"model": "hosted_vllm/gpt-4"}),
            error_of(messages=user("x" * 3000), **chat),
            error_of(messages=user("x"), temperature=-1, **chat),
        ],
    }


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
