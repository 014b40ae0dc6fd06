"""Options of whatever serves chats: the server and the batch job have these fields, named as in ``vllm serve``."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from tp_engine.api.openai.reasoning import PARSERS as REASONING_PARSERS
from tp_engine.config import option
from tp_engine.errors import ConfigError

TOOL_CALL_PARSERS = ("hermes", "llama3_json")
CONTENT_FORMATS = ("auto", "string", "openai")


@dataclass(frozen=True, kw_only=True)
class ChatOptions:
    """How chats become prompts, and what is looked for in the answers."""

    chat_template: str | None = option(None, "Jinja template of chats, as a file or as text (default: the model's)")
    chat_template_content_format: str = option(
        "auto",
        "contents for the template: string, openai (a list of parts), or auto, which reads it in the template",
        choices=CONTENT_FORMATS,
    )
    enable_auto_tool_choice: bool = option(False, "let the model decide whether to call tools (needs tool_call_parser)")
    tool_call_parser: str | None = option(
        None,
        "format of the model's tool calls: hermes (Qwen, Hermes) or llama3_json (Llama 3)",
        choices=TOOL_CALL_PARSERS,
    )
    reasoning_parser: str | None = option(
        None,
        "tell <think>...</think> from the answer: qwen3, or deepseek_r1 for models that always begin with reasoning",
        choices=REASONING_PARSERS,
    )

    def check_chat_options(self) -> None:
        """Raise ``ConfigError`` for what can not be served."""
        for spec in dataclasses.fields(ChatOptions):
            value, choices = getattr(self, spec.name), spec.metadata.get("choices")
            if choices and value not in choices and not (value is None and spec.default is None):
                raise ConfigError(f"{spec.name} is {value!r}; choose one of {', '.join(choices)}")
        if self.enable_auto_tool_choice and self.tool_call_parser is None:
            raise ConfigError(
                "enable_auto_tool_choice needs tool_call_parser, which finds the calls in the model's text: add "
                f"--tool-call-parser with one of {', '.join(TOOL_CALL_PARSERS)}"
            )
        if self.template_text is not None:
            from tp_engine.api.openai.chat.template import ChatTemplate  # Jinja, which few need this early

            ChatTemplate(self.template_text)

    @property
    def template_text(self) -> str | None:
        """The template that ``chat_template`` names or is; None to use the model's.  Raises ``ConfigError``."""
        given = self.chat_template
        if given is None or "{{" in given or "{%" in given:
            return given
        try:
            return Path(given).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError, ValueError) as error:
            raise ConfigError(
                f"chat_template is {given[:200]!r}, which is neither a readable file nor a template ({error}); give "
                "the name of a file, or Jinja text with {{ or {%"
            ) from error
