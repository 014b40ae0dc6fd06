"""Chat templates of models whose tokenizer has none.

| the folder has | the template is |
| --- | --- |
| chat_template.json, as older models with images | in that file |
| config.json of DeepSeek V3.2, whose repository has code instead | ``deepseek_v32.jinja``, beside this file |
| tekken.json, Mistral's own format | made by the package mistral-common, if it is installed |
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from tp_engine.engine.tiktoken_model import TEKKEN_FILE
from tp_engine.files import read_json, read_text
from tp_engine.log import get_logger, warn_once

logger = get_logger(__name__)

# The model_type of config.json -> the template, a file beside this one.
_OURS = {"deepseek_v32": "deepseek_v32.jinja"}


def folder_template(folder: Path) -> str | None:
    """Return the text of a template; None if there is none."""
    written = _value(folder / "chat_template.json", "chat_template")
    if isinstance(written, str):
        return written
    ours = _OURS.get(str(_value(folder / "config.json", "model_type")))
    if ours is not None:
        return read_text(Path(__file__).with_name(ours))
    tekken = folder / TEKKEN_FILE
    return _made_template(tekken) if tekken.is_file() else None


def _made_template(tekken: Path) -> str | None:
    remedy = "chats need --chat-template"
    try:
        maker: Any = importlib.import_module("mistral_common.integrations.chat_templates.chat_templates")
    except ImportError:
        warn_once(
            logger,
            "%s comes without a chat template: %s, or the package mistral-common, which makes one: pip install "
            "'tp-engine[mistral]'",
            tekken,
            remedy,
        )
        return None
    try:
        return str(maker.convert_tokenizer_to_chat_template(tekken))
    except Exception as error:  # the library raises whatever it likes
        warn_once(logger, "mistral-common makes no chat template from %s (%s): %s", tekken, error, remedy)
        return None


def _value(path: Path, key: str) -> Any:
    """A value of a JSON object in a file; None if there is none."""
    try:
        found = read_json(path)
    except (OSError, ValueError):
        return None  # what reads the file for itself has a better message
    return found.get(key) if isinstance(found, dict) else None
