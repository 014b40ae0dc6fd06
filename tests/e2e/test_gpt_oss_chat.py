"""A tiny gpt-oss behind a real engine: the official client forces a call; the model writes it in its own format."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.asgi import App, run_served
from tests.text_tokenizers import byte_level_tokenizer
from tests.tiny_models import make_checkpoint
from tp_engine.api.openai.tools.harmony import HARMONY
from tp_engine.config import EngineConfig
from tp_engine.engine.start import start_engine
from tp_engine.server.config import ServerConfig

pytestmark = pytest.mark.slow

TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message.role }}<|message|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
ARGUMENTS = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 99, "minimum": 10}},
             "required": ["n"], "additionalProperties": False}  # fmt: skip
TOOLS = [{"type": "function", "function": {"name": name, "parameters": ARGUMENTS}} for name in ("add", "größe")]
NAMED = {"type": "function", "function": {"name": "größe"}}


@pytest.mark.parametrize("choice", ["required", NAMED], ids=str)
@pytest.mark.parametrize("has_marks", [True, False])
def test_a_forced_call(choice: Any, has_marks: bool, tmp_path: Path) -> None:
    """Oracle: the schema, and no text beside the call; whole and streamed, with marks as special tokens and as text."""
    tokenizer: Any = copy.deepcopy(byte_level_tokenizer())
    if has_marks:
        tokenizer.add_special_tokens({"additional_special_tokens": list(HARMONY.marks)})
    end = tokenizer.convert_tokens_to_ids("<|return|>") if has_marks else tokenizer.eos_token_id
    folder = make_checkpoint(
        tmp_path / "model", "gpt-oss", num_layers=2, hidden_size=32, num_heads=2, num_kv_heads=1, vocab_size=384,
        max_position=1024, eos_token_id=end,
    )  # fmt: skip
    tokenizer.save_pretrained(folder)
    engine = start_engine(
        EngineConfig(model=str(folder), device="cpu", num_gpu_blocks_override=200, block_size=8, max_model_len=800)
    )

    async def scenario(app: App) -> None:
        http_client: Any = httpx.AsyncClient(transport=httpx.ASGITransport(app.app))
        async with openai.AsyncOpenAI(
            base_url="http://localhost/v1", api_key="x", max_retries=0, http_client=http_client
        ) as client:
            # An untrained model would not end its reasoning.
            request: Any = {
                "model": "demo", "messages": [{"role": "user", "content": "Hi"}], "tools": TOOLS, "tool_choice": choice,
                "seed": 3, "max_tokens": 400, "extra_body": {"bad_words": ["analysis"]},
            }  # fmt: skip
            whole = (await client.chat.completions.create(**request)).choices[0]
            async with client.chat.completions.stream(**request) as stream:
                async for _ in stream:
                    pass
                streamed = (await stream.get_final_completion()).choices[0]
        for one in (whole, streamed):
            assert one.finish_reason == ("tool_calls" if choice == "required" else "stop")
            assert not one.message.content
            [call] = one.message.tool_calls or []
            names = ("add", "größe") if choice == "required" else ("größe",)
            assert call.type == "function" and call.function.name in names
            assert 10 <= json.loads(call.function.arguments)["n"] <= 99

    config = ServerConfig(
        chat_template=TEMPLATE,
        enable_auto_tool_choice=True,
        tool_call_parser="openai",
        reasoning_parser="openai_gptoss",
    )
    try:
        run_served(scenario, engine, tokenizer, config)
    finally:
        engine.close()
