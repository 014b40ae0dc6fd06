"""A tiny random model in a real engine on one rank, in this process, for tests that count KV blocks."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from tests.text_tokenizers import byte_level_tokenizer
from tests.tiny_models import make_checkpoint
from tp_engine.config import EngineConfig
from tp_engine.engine.engine import Engine
from tp_engine.engine.start import start_engine

CHAT_TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }}\n{% endfor %}"
    "{% for message in messages %}<s>{{ message.role }}: {{ message.content }}"
    "{% for call in message.tool_calls or [] %}{{ call.function.name }}{{ call.function.arguments }}{% endfor %}</s>"
    "{% endfor %}{% if add_generation_prompt %}<s>assistant:{% endif %}"
)


@cache
def chat_tokenizer() -> Any:
    """The byte-level tokenizer with a chat template for tools and all roles."""
    tokenizer = copy.deepcopy(byte_level_tokenizer())
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


@contextlib.contextmanager
def tiny_engine(folder: Path, **options: Any) -> Iterator[Engine]:
    """An engine of one layer with the byte-level tokenizer's vocabulary; made in ``folder``, closed at the end."""
    make_checkpoint(
        folder, num_layers=1, hidden_size=16, num_heads=2, num_kv_heads=1, intermediate_size=16, vocab_size=384,
        max_position=128,
    )  # fmt: skip
    chat_tokenizer().save_pretrained(folder)
    small: dict[str, Any] = {
        "device": "cpu", "num_gpu_blocks_override": 48, "block_size": 8, "max_model_len": 96, "max_num_seqs": 16,
        "max_num_batched_tokens": 64,
    }  # fmt: skip
    engine = start_engine(EngineConfig(model=str(folder), **small | options))
    try:
        yield engine
    finally:
        engine.close()


def assert_nothing_in_use(engine: Engine) -> None:
    """Check that no request and no KV block is in use, and that the blocks add up."""
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_used_blocks, stats.num_live_tokens) == (0, 0, 0, 0), stats
    assert stats.num_free_blocks + stats.num_cached_blocks == engine.model_info.num_blocks, stats
