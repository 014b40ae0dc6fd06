"""Where a model's files are: a local folder, or a name on the Hugging Face hub.  No torch."""

import importlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tp_engine import files
from tp_engine.errors import ConfigError

CONFIG_FILE = "config.json"
QUANTIZATION_FILE = "hf_quant_config.json"
MODEL_FILES = ["*.json", "*.safetensors", "*.txt", "*.jinja", "*.model"]
OTHER_FORMATS = ["consolidated*", "adapter_model*", "original/*"]
_HUB_NAME = re.compile(r"^[\w.-]+(/[\w.-]+)?$")


def resolve_model_folder(model: str, revision: str | None = None, patterns: Sequence[str] = MODEL_FILES) -> Path:
    """Return the local folder of ``model``; a hub name's files with such names are downloaded, or found in the hub's
    cache.

    Raises ``ConfigError``.
    """
    folder = Path(model).expanduser()
    if folder.is_dir():
        try:
            files.check_folder(folder)
        except OSError as error:
            raise ConfigError(f"{error.filename or folder} can not be read: {error.strerror}") from error
        if not (folder / CONFIG_FILE).is_file():
            problem = f"model is {model!r}, a folder without {CONFIG_FILE}"
            raise ConfigError(f"{problem}{_mistral_format(folder)}; give the folder of a saved model")
        return folder
    if folder.exists():
        raise ConfigError(f"model is {model!r}, a file; give the folder that holds {CONFIG_FILE} and the weights")
    if not _HUB_NAME.match(model) or model.startswith("."):
        raise ConfigError(f"model is {model!r}; there is no such folder, and it can not be a hub name ('owner/name')")
    return _download(model, revision, patterns)


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file of a model.  Raises ``ConfigError``."""
    try:
        values = files.read_json(path)
    except OSError as error:
        raise ConfigError(f"{path} can not be read: {error.strerror}; is the model complete?") from error
    except ValueError as error:
        raise ConfigError(f"{path} can not be read as JSON: {error}; is the model complete?") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path} holds {type(values).__name__}; it must be a JSON object")
    return values


def _mistral_format(folder: Path) -> str:
    """What to say of a folder in Mistral's own format."""
    found = [name for name in ("params.json", "tekken.json", "tokenizer.model.v3") if (folder / name).is_file()]
    if not found and not any(folder.glob("consolidated*.safetensors")):
        return ""
    what = found[0] if found else "consolidated weights"
    return f" but with {what}, which is Mistral's own format and not read (Hugging Face's has model*.safetensors)"


def _download(name: str, revision: str | None, patterns: Sequence[str]) -> Path:
    try:
        hub: Any = importlib.import_module("huggingface_hub")
    except ImportError as error:
        raise ConfigError(
            f"model is {name!r}; there is no such folder, and the hub can not be asked without the huggingface_hub "
            "package: install it, or give a local folder"
        ) from error
    try:
        folder = Path(
            hub.snapshot_download(name, revision=revision, allow_patterns=[*patterns], ignore_patterns=OTHER_FORMATS)
        )
    except Exception as error:
        at, first_line = f" at revision {revision!r}" if revision else "", str(error).strip().partition("\n")[0]
        raise ConfigError(
            f"model is {name!r}; there is no such folder below {Path.cwd()}, and the Hugging Face hub gave no model of "
            f"that name{at} ({type(error).__name__}: {first_line}). Without a network, download the model "
            "elsewhere and give its folder"
        ) from error
    if not (folder / CONFIG_FILE).is_file():
        problem = f"model is {name!r}; the hub's repository has no {CONFIG_FILE}"
        raise ConfigError(f"{problem}{_mistral_format(folder)}: it is not a saved model")
    return folder
