"""Mistral's tekken.json against the package mistral-common, in an environment of its own."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.unit.engine.test_tiktoken_model import TEXTS, random_texts
from tp_engine.api.openai.chat.options import ChatOptions
from tp_engine.api.openai.chat.prompt import ChatFormat
from tp_engine.api.openai.tools.formats import TOOL_FORMATS
from tp_engine.engine.tokenizer import load_tokenizer

pytestmark = pytest.mark.slow

PYTHON = os.environ.get("TP_ENGINE_CLIENTS_PYTHON") or (
    sys.executable if importlib.util.find_spec("mistral_common") is not None else None
)
# Reads texts and chats; writes the place of the package's newest file, ids of the texts, its template, ids of chats.
PROGRAM = """
import json, sys
from pathlib import Path
import mistral_common
from mistral_common.integrations.chat_templates.chat_templates import convert_tokenizer_to_chat_template
from mistral_common.protocol.instruct.request import ChatCompletionRequest
from mistral_common.tokens.tokenizers.mistral import MistralTokenizer
given = json.load(sys.stdin)
path = max((Path(mistral_common.__file__).parent / "data").glob("tekken_*.json"))
tokenizer = MistralTokenizer.from_file(path)
tekken = tokenizer.instruct_tokenizer.tokenizer
chats = [tokenizer.encode_chat_completion(ChatCompletionRequest(**chat)).tokens for chat in given["chats"]]
texts = [tekken.encode(text, bos=True, eos=False) for text in given["texts"]]
print(json.dumps([str(path), texts, convert_tokenizer_to_chat_template(path), chats]))
"""
HI: dict[str, Any] = {"role": "user", "content": "Hi"}
CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": '{"a": "ü"}'}}
TOOL = {"type": "function", "function": {"name": "f", "description": "", "parameters": {"type": "object"}}}
CHATS: list[dict[str, Any]] = [
    {"messages": [HI]},
    {"messages": [{"role": "system", "content": "Be brief."}, HI, {"role": "assistant", "content": "Yes?"}, HI]},
    {
        "messages": [
            HI,
            {"role": "assistant", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "abcdefghi", "name": "f", "content": "1"},
        ],
        "tools": [TOOL],
    },
]


@pytest.mark.skipif(PYTHON is None, reason="mistral-common wants an older numpy than the server; run test_clients")
def test_ids_and_chats(tmp_path: Path) -> None:
    """Oracle: the package's own ids of texts and of whole chats, for a file with 131,072 tokens that it ships."""
    assert PYTHON is not None
    texts = [*TEXTS, *random_texts(), *(path.read_text() for path in Path("tp_engine").glob("*.py"))]
    done = subprocess.run(
        [PYTHON, "-c", PROGRAM],
        input=json.dumps({"texts": texts, "chats": CHATS}),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    path, ids, template, chats = json.loads(done.stdout.splitlines()[-1])
    shutil.copy(path, tmp_path / "tekken.json")
    (tmp_path / "chat_template.jinja").write_text(template)
    tokenizer = load_tokenizer(str(tmp_path))
    assert tokenizer is not None
    for text, expected in zip(texts, ids, strict=True):
        assert tokenizer.encode(text) == expected, text
    chat = ChatFormat(tokenizer, ChatOptions())
    assert chat.tool_format is TOOL_FORMATS["mistral"]
    for given, expected in zip(CHATS, chats, strict=True):
        prompt = chat.render(given["messages"], {"tools": given["tools"]} if "tools" in given else {})
        assert tokenizer.encode(prompt.text, add_special_tokens=False) == expected
