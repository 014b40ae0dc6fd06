"""How much longer a tokenizer.json makes texts: ten steps that each put ten letters in the place of one make gigabytes
of a letter, and the library that allocates them ends the process.

The steps are read before the tokenizer is made, since that already normalizes its added tokens.
"""

import base64
import binascii
import math
from pathlib import Path
from typing import Any

import msgspec

from tp_engine.errors import ConfigError
from tp_engine.system.files import MAX_TOKENIZER_BYTES, read_text

MOST_GROWTH = 128
"""Characters that may become of one; those of real tokenizers make 36 at most."""
MOST_ADDED = 10_000
"""Special tokens that may be put around a text."""
# What steps make of one character at most, where their own fields do not say it.
_GROWTHS = {
    "NFKC": 18,
    "NFKD": 18,
    "NFC": 3,
    "NFD": 4,
    "Lowercase": 3,
    "BertNormalizer": 6,
    "ByteLevel": 4,
    "WordPiece": 2,
}
_LISTS = ("normalizers", "decoders", "processors")


class _Steps(msgspec.Struct):
    """The fields of a tokenizer.json that make texts longer."""

    normalizer: Any = None
    decoder: Any = None
    post_processor: Any = None


def check_growth(path: Path) -> None:
    """Raise ``ConfigError`` for a tokenizer.json whose steps may make too much of a text; other files are left
    to the library."""
    try:
        steps = msgspec.json.decode(read_text(path, MAX_TOKENIZER_BYTES), type=_Steps)
    except (OSError, ValueError, RecursionError):
        return
    for name, step in (("normalizer", steps.normalizer), ("decoder", steps.decoder)):
        if (growth := _growth(step)) > MOST_GROWTH:
            raise ConfigError(
                f"{path} has a {name} that makes up to {growth:.3g} characters of one; at most {MOST_GROWTH} are "
                "allowed: give --tokenizer another tokenizer"
            )
    if (num_added := _num_added(steps.post_processor)) > MOST_ADDED:
        raise ConfigError(
            f"{path} puts up to {num_added} special tokens around a text; at most {MOST_ADDED} are allowed: give "
            "--tokenizer another tokenizer"
        )


def _growth(step: Any) -> float:
    """The most characters that become of one; 1 for what is no step, which the library refuses."""
    if not isinstance(step, dict):
        return 1.0
    kind, content = step.get("type"), str(step.get("content", ""))
    match kind:
        case "Sequence":
            return math.prod(map(_growth, _parts(step)))
        case "Replace":
            pattern = step.get("pattern")
            text = pattern.get("String") if isinstance(pattern, dict) else None
            # an expression may match one character, or between two
            return 1.0 + len(content) if not isinstance(text, str) or not text else max(1.0, len(content) / len(text))
        case "Prepend":
            return 1.0 + len(str(step.get("prepend", "")))
        case "Precompiled":
            return _longest_replacement(str(step.get("precompiled_charsmap", "")))
    return float(_GROWTHS.get(str(kind), 1))


def _parts(step: dict[str, Any]) -> list[Any]:
    found: list[Any] = next((step[name] for name in _LISTS if isinstance(step.get(name), list)), [])
    return found


def _longest_replacement(charsmap: str) -> float:
    """The longest of SentencePiece's replacements: after a table, whose size comes first, each ends with a zero."""
    try:
        data = base64.b64decode(charsmap)
    except (binascii.Error, ValueError):
        return 1.0
    texts = data[4 + int.from_bytes(data[:4], "little") :].split(b"\0")
    return float(max(1, *(len(one.decode(errors="replace")) for one in texts)))


def _num_added(step: Any) -> int:
    """The most tokens that a post-processor puts around a text, or a pair."""
    if not isinstance(step, dict):
        return 0
    if step.get("type") == "Sequence":
        return sum(map(_num_added, _parts(step)))
    special = step.get("special_tokens")
    if not isinstance(special, dict):
        return 0
    sizes = {name: len(one["ids"]) for name, one in special.items() if isinstance(one, dict) and _has_ids(one)}
    written = (step.get(name) for name in ("single", "pair"))
    return max((_num_written(pieces, sizes) for pieces in written if isinstance(pieces, list)), default=0)


def _has_ids(token: dict[str, Any]) -> bool:
    return isinstance(token.get("ids"), list)


def _num_written(pieces: list[Any], sizes: dict[str, int]) -> int:
    tokens = [one["SpecialToken"] for one in pieces if isinstance(one, dict) and "SpecialToken" in one]
    return sum(sizes.get(str(token.get("id")), 0) for token in tokens if isinstance(token, dict))
