"""Options for chats, shared by the server and the batch job and named as in ``vllm serve``, and the formats named."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from tp_engine.api.openai.reasoning import REASONING_ALIASES, REASONING_FORMATS, ReasoningFormat
from tp_engine.api.openai.tools.formats import TOOL_FORMATS
from tp_engine.api.openai.tools.tool_format import ToolFormat
from tp_engine.errors import ConfigError
from tp_engine.options.fields import checked, option
from tp_engine.system.files import read_text
from tp_engine.system.log import get_logger

logger = get_logger(__name__)

TOOL_ALIASES = {alias: name for name, calls in TOOL_FORMATS.items() for alias in calls.aliases}
AUTO, NONE = "auto", "none"
CONTENT_FORMATS = ("auto", "string", "openai")


@checked()
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


@checked()
@dataclass(frozen=True, kw_only=True)
class ChatOptions(TemplateOptions):
    """How chats become prompts, and what is found in the answers."""

    enable_auto_tool_choice: bool = option(
        False, "accepted; the model may call tools wherever the format of its calls is known"
    )
    tool_call_parser: str = option(
        AUTO,
        "format of the model's tool calls: auto (by the chat template), none, "
        + " or ".join(f"{name} ({calls.models})" for name, calls in TOOL_FORMATS.items()),
        choices=(AUTO, NONE, *TOOL_FORMATS, *TOOL_ALIASES),
    )
    reasoning_parser: str = option(
        AUTO,
        "format of the reasoning that precedes the model's answers: auto (by the chat template), none, "
        + " or ".join(f"{name} ({reasoning.help})" for name, reasoning in REASONING_FORMATS.items()),
        choices=(AUTO, NONE, *REASONING_FORMATS, *REASONING_ALIASES),
    )
    reasoning_key: str | None = option(
        None,
        "secret that seals the reasoning that clients send back, the same for servers that read each other's (default: "
        "TP_ENGINE_REASONING_KEY, else a new one at each start)",
        secret=True,
    )

    def tool_format(self, template: str) -> ToolFormat | None:
        """The format of ``tool_call_parser``, which the source of the chat template chooses for ``auto``."""
        name = self.tool_call_parser
        return TOOL_FORMATS.get(_fitting(TOOL_FORMATS, template) if name == AUTO else TOOL_ALIASES.get(name, name))

    def reasoning_format(self, template: str) -> ReasoningFormat | None:
        """The format of ``reasoning_parser``; as ``tool_format``."""
        name, formats = self.reasoning_parser, REASONING_FORMATS
        return formats.get(_fitting(formats, template) if name == AUTO else REASONING_ALIASES.get(name, name))

    def log_formats(self, template: str) -> None:
        """Log which formats are read, why, and how to change that; warn of a choice that ``template`` contradicts."""
        _log_choice("tool calls", "--tool-call-parser", self.tool_call_parser, TOOL_FORMATS, TOOL_ALIASES, template)
        _log_choice(
            "reasoning", "--reasoning-parser", self.reasoning_parser, REASONING_FORMATS, REASONING_ALIASES, template
        )

    def check_chat_options(self) -> None:
        """Raise ``ConfigError`` for a template that cannot be served."""
        if self.template_text is not None:
            from tp_engine.api.openai.chat.template_process import parse_template  # Jinja: most starts do not need it

            parse_template(self.template_text)


_Formats: TypeAlias = Mapping[str, ToolFormat] | Mapping[str, ReasoningFormat]


def _fitting(formats: _Formats, template: str) -> str:
    """The name of the format that the source of a chat template is written for; ``none`` if it fits none."""
    fits = (name for name, one in formats.items() if any(marks.fit(template) for marks in one.template))
    return next(fits, NONE)


def _log_choice(what: str, flag: str, given: str, formats: _Formats, aliases: Mapping[str, str], template: str) -> None:
    fitting, name = _fitting(formats, template), aliases.get(given, given)
    if name != AUTO:
        if fitting not in (name, NONE) and name != NONE:
            logger.warning("%s: %s is %s, but the chat template is written for %s", what, flag, given, fitting)
        return
    if fitting == NONE:
        logger.info("%s: none, by the chat template; %s NAME changes that", what, flag)
        return
    found = next(marks.has for marks in formats[fitting].template if marks.fit(template))
    why = " and ".join(found)
    logger.info("%s: %s, as the chat template has %s; %s NAME, or none, changes that", what, fitting, why, flag)
