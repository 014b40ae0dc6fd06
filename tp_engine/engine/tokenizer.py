"""Loads a model's tokenizer, and decodes tokens with it."""

import importlib
import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from tp_engine.engine.byte_letters import byte_letters
from tp_engine.engine.text_growth import check_growth
from tp_engine.engine.tiktoken_model import TEKKEN_FILE, is_ranked, load_ranked
from tp_engine.errors import ConfigError, RequestError, shown
from tp_engine.system.files import MAX_TOKENIZER_BYTES, check_folder, read_json, read_text
from tp_engine.system.importing import collections_paused
from tp_engine.system.log import get_logger, warn_once
from tp_engine.system.panics import is_panic, panics_refused

logger = get_logger(__name__)

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
    "tekken.json",
    "*.tiktoken",
    "spiece.model",
)
_HUB_FILES = ("*.json", "*.txt", "*.jinja", "*.model", "*.tiktoken")
_PLAIN_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model")  # which transformers reads itself
_TOKENIZER_FIELDS = ("model_type", "model_name", "tokenizer_class")  # the fields of config.json that choose a tokenizer
# The model_type of config.json -> the template, a file beside this one.
_OUR_TEMPLATES = {"deepseek_v32": "deepseek_v32.jinja"}
_REPLACEMENT = "\ufffd"
_BYTE_NAME = re.compile("<0x[0-9A-Fa-f]{2}>")
_LATIN = {chr(byte): byte for byte in range(256)}


def load_tokenizer(source: str, revision: str | None = None) -> Any | None:
    """Return the tokenizer of a folder or hub name; None for a folder without one.  ``ConfigError`` if it cannot be
    loaded.  Code that comes with a model is never run.  A chat template that is not among the tokenizer's own files is
    looked for elsewhere."""
    folder = _folder(source, revision)
    tokenizer = _load(source, folder)
    if tokenizer is not None and tokenizer.chat_template is None:
        tokenizer.chat_template = _folder_template(folder)
    return tokenizer


def tokenize(
    tokenizer: Any, text: str, second: str | None = None, *, add_special_tokens: bool, param: str
) -> list[int]:
    """Return the tokens of a text of a client's, or of two as the tokenizer writes pairs; ``RequestError`` for one over
    which the tokenizer's library fails, such as a run of white space that is too long for its regular expressions, or
    a character that is not in a vocabulary without an unknown token."""
    what = f"{param} cannot be tokenized"
    try:
        with panics_refused(what, param):
            texts = (text,) if second is None else (text, second)
            token_ids: list[int] = tokenizer.encode(*texts, add_special_tokens=add_special_tokens)
            return token_ids
    except Exception as error:
        if type(error) is not Exception:  # the library raises bare ones; a signal's handler may raise anything here
            raise
        raise RequestError(f"{what} with this model's tokenizer: {shown(str(error))}", param=param) from error


def _folder_template(folder: Path) -> str | None:
    """The text of a chat template for a tokenizer that has none; None if there is none.

    | the folder has | the template is |
    | --- | --- |
    | chat_template.json, as older models with images | in that file |
    | config.json of DeepSeek V3.2, whose repository has code instead | ``deepseek_v32.jinja``, beside this file |
    | tekken.json, Mistral's own format | made by the package mistral-common, if it is installed |
    """
    written = _json_object(folder / "chat_template.json").get("chat_template")
    if isinstance(written, str):
        return written
    ours = _OUR_TEMPLATES.get(str(_json_object(folder / "config.json").get("model_type")))
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


def _folder(source: str, revision: str | None) -> Path:
    """The folder ``source``, or that of a hub name's files, which are downloaded or found in the hub's cache."""
    folder = Path(source).expanduser()
    if folder.exists():
        return folder
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(source, revision=revision, allow_patterns=[*_HUB_FILES]))
    except Exception as error:
        raise _refusal(source, error) from error


def _load(source: str, folder: Path) -> Any | None:
    """The tokenizer, with a chat template if its own files have one."""
    if folder.is_dir() and not any(any(folder.glob(pattern)) for pattern in _TOKENIZER_FILES):
        return None
    if is_ranked(folder):
        try:
            return load_ranked(folder)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            what = f"there is no {error}" if isinstance(error, KeyError) else str(error)
            raise ConfigError(f"tokenizer is {source!r}, which cannot be read: {what}") from error
    if (code := _own_code(folder)) is not None:
        raise ConfigError(
            f"tokenizer is {source!r}, which is code of the model ({code}), and such code is never run; give "
            "--tokenizer a folder or hub name with the same tokenizer as a tokenizer.json"
        )
    try:
        if folder.is_dir():
            check_folder(folder)
            check_growth(folder / "tokenizer.json")
        tokenizer = _from_transformers(folder)
        tokenizer.encode("")  # the first call sets truncation and padding: make it here
    except ConfigError:
        raise
    except BaseException as error:
        if isinstance(error, Exception) or is_panic(error):
            raise _refusal(source, error) from error
        raise
    return tokenizer


def _from_transformers(folder: Path) -> Any:
    with collections_paused():  # slow to import, so only when there is a tokenizer
        from transformers import AutoTokenizer

        # With the package mistral-common transformers would give another tokenizer for the same files.
        return AutoTokenizer.from_pretrained(
            str(folder), trust_remote_code=False, config=_plain_config(folder), mistral_format=False
        )


def _refusal(source: str, error: BaseException) -> ConfigError:
    return ConfigError(
        f"tokenizer is {source!r}; it cannot be loaded ({type(error).__name__}: {error}): give a folder or hub "
        "name with a tokenizer that needs no code of its own"
    )


def _plain_config(folder: Path) -> Any | None:
    """The fields of config.json that choose a tokenizer, if the tokenizer's own files name its class; else None.  With
    these fields ``AutoTokenizer`` does not import the model's configuration class, which would import transformers'
    modelling code and torch's compiler: that takes longer than the import of torch itself."""
    try:
        named = read_json(folder / "tokenizer_config.json")
        model = read_json(folder / "config.json")
        if not isinstance(named.get("tokenizer_class"), str) or "auto_map" in named:
            return None
        fields = {key: model[key] for key in _TOKENIZER_FIELDS if key in model}
    except (OSError, ValueError, AttributeError, TypeError):
        return None  # transformers has a better message for the error
    from transformers import PreTrainedConfig

    return PreTrainedConfig(name_or_path=str(folder), **fields)


def _own_code(folder: Path) -> str | None:
    """The class of a tokenizer that is nothing but code beside the model."""
    if any((folder / name).is_file() for name in _PLAIN_FILES):
        return None
    named = _json_object(folder / "tokenizer_config.json").get("auto_map")
    found = named.get("AutoTokenizer") if isinstance(named, dict) else named
    classes = found if isinstance(found, list) else [found]
    return next((one for one in classes if isinstance(one, str)), None)


def load_tokenizer_json(source: str, revision: str | None = None) -> str | None:
    """Return the text of a fast tokenizer's ``tokenizer.json``; None for a model without a tokenizer, or with a slow
    one. If there is no such file, the tokenizer writes the text."""
    folder = _folder(source, revision)
    path = folder / "tokenizer.json"
    if path.is_file():
        return read_text(path, MAX_TOKENIZER_BYTES)
    backend = getattr(_load(source, folder), "backend_tokenizer", None)
    return None if backend is None else str(backend.to_str())


def tokenizer_eos_ids(source: str, revision: str | None = None) -> tuple[int, ...]:
    """Return the tokenizer's token that ends an output, if it has one.  ``ConfigError`` if it cannot be loaded.  The
    tokenizer itself is loaded only if its files do not say it: that takes longer."""
    folder = _folder(source, revision)
    named = _json_object(folder / "tokenizer_config.json") | _json_object(folder / "special_tokens_map.json")
    token = named.get("eos_token")
    if token is None and "eos_token" in named:
        return ()
    text = token.get("content") if isinstance(token, dict) else token
    for entry in _added_tokens(folder / "tokenizer.json") if isinstance(text, str) else ():
        if isinstance(entry, dict) and entry.get("content") == text and type(entry.get("id")) is int:
            return (entry["id"],)
    found = getattr(_load(source, folder), "eos_token_id", None)
    return (found,) if type(found) is int else ()


def _json_object(path: Path) -> dict[str, Any]:
    try:
        found = read_json(path)
    except (OSError, ValueError):
        return {}  # load_tokenizer has a better message for the error
    return found if isinstance(found, dict) else {}


def _added_tokens(path: Path) -> list[Any]:
    """The list of added tokens in a tokenizer.json, without the vocabulary after it, which is large."""
    try:
        text = read_text(path, MAX_TOKENIZER_BYTES)
        found, _ = json.JSONDecoder().raw_decode(text, text.index("[", text.index('"added_tokens"')))
    except (OSError, ValueError, RecursionError):
        return []
    return found if isinstance(found, list) else []


class TokenDecoder:
    """Decodes tokens of one tokenizer of transformers; all requests share it."""

    def __init__(self, tokenizer: Any) -> None:
        self.decode: Callable[[list[int]], str] = _plain_decode(tokenizer)
        self.special_ids = special_ids(tokenizer)
        self.byte_ids = _byte_ids(tokenizer)
        self._tokenizer = tokenizer
        self._letter = _letter(tokenizer)
        self._token_bytes: dict[tuple[int, bool], bytes] = {}
        self.shared_texts: dict[bool, Any] = {}  # what ``TokenTexts`` keep for each other, by ``begins_text``

    def token_bytes(self, token_id: int, *, begins_text: bool = False) -> bytes:
        """Return the bytes that one token adds to a text, which may be part of a character.  Some decoders drop a space
        from the first token of a text, the one that ``begins_text``."""
        data = self._token_bytes.get((token_id, begins_text))
        if data is None:
            data = self._token_bytes[token_id, begins_text] = self._read_bytes(token_id, begins_text)
        return data

    def _read_bytes(self, token_id: int, begins_text: bool) -> bytes:
        text = self.decode([token_id])
        if _REPLACEMENT in text:
            named = _named_bytes(self._tokenizer.convert_ids_to_tokens(token_id))
            if named is not None and named.decode(errors="replace") == text:
                return named
        if not begins_text:
            before = self.decode(self._letter)
            behind = self.decode([*self._letter, token_id])
            text = behind.removeprefix(before) if behind.startswith(before) else text
        return text.encode()


def _letter(tokenizer: Any) -> list[int]:
    """The tokens of some letter; none if the tokenizer knows neither it nor an unknown token."""
    try:
        return tokenize(tokenizer, "a", add_special_tokens=False, param="a letter")
    except RequestError:
        return []


def _named_bytes(name: str) -> bytes | None:
    """The bytes of a part of a character, by its name in the vocabulary: ``<0xE4>``, or a letter for each byte."""
    if _BYTE_NAME.fullmatch(name):
        return bytes([int(name[3:5], 16)])
    for letters in (_bytes_of_letters(), _LATIN):
        if all(letter in letters for letter in name):
            return bytes(letters[letter] for letter in name)
    return None


@cache
def _bytes_of_letters() -> dict[str, int]:
    return {letter: byte for byte, letter in enumerate(byte_letters())}


def _plain_decode(tokenizer: Any) -> Callable[[list[int]], str]:
    """Decodes all tokens and cleans nothing up; calls the Rust tokenizer itself if its wrapper adds nothing."""
    kind = type(tokenizer)
    is_plain = kind.decode.__module__ == "transformers.tokenization_utils_base"
    is_fast = getattr(kind._decode, "__module__", "") == "transformers.tokenization_utils_tokenizers"
    if is_plain and is_fast:
        backend = tokenizer.backend_tokenizer
        return lambda token_ids: str(backend.decode(token_ids, skip_special_tokens=False))
    return lambda token_ids: str(
        tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    )


def special_ids(tokenizer: Any) -> frozenset[int]:
    """Return the ids of a tokenizer's special tokens, which texts leave out by default."""
    added = getattr(tokenizer, "added_tokens_decoder", None)
    if added is None:
        return frozenset(tokenizer.all_special_ids)
    return frozenset(token_id for token_id, token in added.items() if token.special)


def _byte_ids(tokenizer: Any) -> frozenset[int]:
    vocab = tokenizer.get_vocab()
    names = [f"<0x{byte:02{case}}>" for byte in range(256) for case in "Xx"]
    return frozenset(vocab[name] for name in names if name in vocab)
