"""From keywords of ``LLM``, ``AsyncLLM`` and ``run_batch`` to configurations; their types are in ``keywords.py``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any, NamedTuple, TypedDict

from tp_engine.api.openai.chat.options import ChatOptions, TemplateOptions
from tp_engine.api.sampling_defaults import SamplingDefaultOptions
from tp_engine.config import EngineConfig
from tp_engine.errors import ConfigError
from tp_engine.options import fields_of
from tp_engine.options.intake import take_options


class ChatTemplateOptions(TypedDict, total=False):
    """How a conversation becomes a prompt, with the names of transformers' ``apply_chat_template``.

    Other keywords, and ``chat_template_kwargs``, are variables of the template.
    """

    chat_template: str | None
    add_generation_prompt: bool
    continue_final_message: bool
    tools: Sequence[Mapping[str, Any]] | None
    documents: Sequence[Mapping[str, Any]] | None
    chat_template_kwargs: Mapping[str, Any] | None
    enable_thinking: bool
    add_special_tokens: bool
    mm_processor_kwargs: Mapping[str, Any] | None


class Configs(NamedTuple):
    """The configurations that the keywords of ``LLM`` describe."""

    engine: EngineConfig
    sampling: SamplingDefaultOptions
    chats: ChatOptions


def read_options(where: str, model: str | PathLike[str], options: Mapping[str, Any]) -> Configs:
    """The configurations for keywords of ``where``, which may be those of vLLM and SGLang.

    Raises ``ConfigError``.
    """
    if model is None:
        raise ConfigError(f"{where}: model is None; give a folder or a hub name, or nothing for the demo model")
    kinds = (EngineConfig, SamplingDefaultOptions, TemplateOptions)
    taken = take_options({"model": model, **options}, kinds, where=where)
    chats = ChatOptions(**fields_of(TemplateOptions, taken))
    chats.check_chat_options()
    sampling = SamplingDefaultOptions(**fields_of(SamplingDefaultOptions, taken))
    return Configs(EngineConfig(**fields_of(EngineConfig, taken)), sampling, chats)
