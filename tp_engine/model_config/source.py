"""Where a model's files are: a local folder, or a name on the Hugging Face hub.  No torch."""

import importlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tp_engine.errors import ConfigError
from tp_engine.system import files

CONFIG_FILE = "config.json"
# Files beside config.json that say what it may lack: whose they are, if they do not say it, and the end of a tensor's
# name without which they are another checkpoint's.
QUANTIZATION_FILES = {
    "hf_quant_config.json": ("modelopt", ""),
    "quantize_config.json": ("gptq", ".qweight"),
    "quant_config.json": ("awq", ".qweight"),
}
MODEL_FILES = ["*.json", "*.safetensors", "*.txt", "*.jinja", "*.model"]
OTHER_FORMATS = ["consolidated*", "adapter_model*", "original/*"]
_MISTRALS = ", which is Mistral's own format and not read (Hugging Face's has model*.safetensors)"
_ADAPTERS = ", which is an adapter's: give its base model, and this folder with --lora-modules NAME=FOLDER"
_PICKLED = ", a format that can run code and is never read: save the model again as safetensors"
# Files that a folder may have instead of a model that is read, and what is said of them: the first one that is there.
_OTHER_FORMATS = (
    *((name, _ADAPTERS) for name in ("adapter_config.json", "adapter_model*")),
    *((name, _MISTRALS) for name in ("params.json", "tekken.json", "tokenizer.model.v3", "consolidated*.safetensors")),
    ("*.gguf", ", which is llama.cpp's format and not read: give the model in safetensors"),
    *((name, _PICKLED) for name in ("pytorch_model*.bin", "*.pth", "*.pt")),
)
_FURTHER_DOWN = tuple((f"{folder}/{CONFIG_FILE}", ": give that folder") for folder in ("*", "snapshots/*"))
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
            raise ConfigError(f"{error.filename or folder} cannot be read: {error.strerror}") from error
        if not (folder / CONFIG_FILE).is_file():
            problem = f"model is {model!r}, a folder without {CONFIG_FILE}"
            found = other_content(folder, further_down=True)
            raise ConfigError(
                f"{problem} but with {found}" if found else f"{problem}; give the folder of a saved model"
            )
        return folder
    if folder.exists():
        raise ConfigError(f"model is {model!r}, a file; give the folder that holds {CONFIG_FILE} and the weights")
    if not _HUB_NAME.match(model) or model.startswith("."):
        raise ConfigError(f"model is {model!r}; there is no such folder, and it cannot be a hub name ('owner/name')")
    return _download(model, revision, patterns)


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file of a model.  Raises ``ConfigError``."""
    try:
        values = files.read_json(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}; is the model complete?") from error
    except ValueError as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}; is the model complete?") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path} holds {type(values).__name__}; it must be a JSON object")
    return values


def other_content(folder: Path, *, further_down: bool = False) -> str:
    """Return what to say of a folder without a model in Hugging Face's format: a file of another format, or, if
    ``further_down``, a folder below with such a model; empty for neither."""
    known = (*_OTHER_FORMATS, *(_FURTHER_DOWN if further_down else ()))
    named = ((min(found).relative_to(folder), text) for pattern, text in known if (found := list(folder.glob(pattern))))
    return next((f"{name}{text}" for name, text in named), "")


def _download(name: str, revision: str | None, patterns: Sequence[str]) -> Path:
    try:
        hub: Any = importlib.import_module("huggingface_hub")
    except ImportError as error:
        raise ConfigError(
            f"model is {name!r}; there is no such folder, and the hub cannot be asked without the huggingface_hub "
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
        found = other_content(folder)
        raise ConfigError(f"{problem} but {found}" if found else f"{problem}: it is not a saved model")
    return folder
