"""Options on chats, which the server and the batch job share, named as in ``vllm serve``, and the formats they name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tp_engine.api.openai.reasoning import REASONING_ALIASES, REASONING_FORMATS, ReasoningFormat
from tp_engine.api.openai.tools import (
    ernie45,
    glm45,
    granite,
    harmony,
    hermes,
    llama3_json,
    minimax_m2,
    mistral,
    qwen3_coder,
)
from tp_engine.api.openai.tools.events import ToolFormat
from tp_engine.errors import ConfigError
from tp_engine.files import read_text
from tp_engine.options.fields import check_fields, option

# The name that --tool-call-parser takes -> the format, from a module of its own.
TOOL_FORMATS: Mapping[str, ToolFormat] = {
    "hermes": hermes.FORMAT,
    "llama3_json": llama3_json.FORMAT,
    "openai": harmony.FORMAT,
    "glm45": glm45.FORMAT,
    "minimax_m2": minimax_m2.FORMAT,
    "qwen3_coder": qwen3_coder.FORMAT,
    "ernie45": ernie45.FORMAT,
    "mistral": mistral.FORMAT,
    "granite": granite.FORMAT,
}
TOOL_ALIASES = {alias: name for name, calls in TOOL_FORMATS.items() for alias in calls.aliases}
CONTENT_FORMATS = ("auto", "string", "openai")


@dataclass(frozen=True, kw_only=True)
class TemplateOptions:
    """How chats become prompts."""

    chat_template: str | None = option(
        None, "Jinja template of chats, as a file or as text (default: the model's)", section="Chats"
    )
    chat_template_content_format: str = option(
        "auto",
        "contents for the template: string, openai (a list of parts), or auto, what it takes for each role",
        choices=CONTENT_FORMATS,
    )

    def check_template(self) -> None:
        """Raise ``ConfigError`` for a template that can not be used."""
        if self.template_text is not None:
            from tp_engine.api.openai.chat.template import ChatTemplate  # Jinja, which most starts do not need

            ChatTemplate(self.template_text)

    @property
    def template_text(self) -> str | None:
        """``chat_template``, or the text of the file that it names; None: the model's.  Raises ``ConfigError``."""
        given = self.chat_template
        if given is None or "{{" in given or "{%" in given:
            return given
        try:
            return read_text(Path(given).expanduser())
        except (OSError, UnicodeDecodeError, ValueError) as error:
            raise ConfigError(
                f"chat_template is {given[:200]!r}, which is neither a readable file nor a template ({error}); give "
                "the name of a file, or Jinja text with {{ or {%"
            ) from error


@dataclass(frozen=True, kw_only=True)
class ChatOptions(TemplateOptions):
    """How chats become prompts, and what is found in the answers."""

    enable_auto_tool_choice: bool = option(False, "let the model decide whether to call tools (needs tool_call_parser)")
    tool_call_parser: str | None = option(
        None,
        "format of the model's tool calls: "
        + " or ".join(f"{name} ({calls.models})" for name, calls in TOOL_FORMATS.items()),
        choices=(*TOOL_FORMATS, *TOOL_ALIASES),
    )
    reasoning_parser: str | None = option(
        None,
        "format of the reasoning that precedes the model's answers: "
        + " or ".join(f"{name} ({reasoning.help})" for name, reasoning in REASONING_FORMATS.items()),
        choices=(*REASONING_FORMATS, *REASONING_ALIASES),
    )

    @property
    def tool_format(self) -> ToolFormat | None:
        """The format of ``tool_call_parser``."""
        name = self.tool_call_parser
        return None if name is None else TOOL_FORMATS[TOOL_ALIASES.get(name, name)]

    @property
    def reasoning_format(self) -> ReasoningFormat | None:
        """The format of ``reasoning_parser``."""
        name = self.reasoning_parser
        return None if name is None else REASONING_FORMATS[REASONING_ALIASES.get(name, name)]

    def check_chat_options(self) -> None:
        """Raise ``ConfigError`` for values that can not be served; checks all fields of the configuration."""
        check_fields(self)
        if self.enable_auto_tool_choice and self.tool_call_parser is None:
            raise ConfigError(
                "enable_auto_tool_choice needs tool_call_parser, which finds the calls in the model's text: add "
                f"--tool-call-parser with one of {', '.join(TOOL_FORMATS)}"
            )
        self.check_template()
