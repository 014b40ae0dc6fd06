"""The tokenizers of Kimi models, whose repositories have ranks of byte sequences and code that reads them.

``tiktoken.model`` has a line per token: its bytes in base64, and its rank, which is its id.  The special tokens follow
the last rank; tokenizer_config.json names some of them.  The code is never run: the library ``tokenizers`` gives the
same ids with the vocabulary as a byte-level BPE.  Each way to split a token into two others is a merge, in the order of
the ranks.
"""

from __future__ import annotations

import base64
import binascii
from pathlib import Path
from typing import Any

from tp_engine.engine.byte_letters import byte_letters
from tp_engine.files import MAX_TOKENIZER_BYTES, read_json, read_text

_MODEL_TYPES = ("kimi_k2", "kimi_k25", "kimi_linear")
_CLASS = "TikTokenTokenizer"
_NUM_SPECIAL, _MOST_SPECIAL = 256, 4096
_LONGEST_TOKEN = 1024  # bytes; all places where it can be split are looked at
_FIELDS = ("bos_token", "eos_token", "pad_token", "unk_token", "chat_template", "model_max_length")

# How texts are cut before bytes are merged: words of Han characters; other words with what stands before them and an
# English ending, in upper case first or not; up to three digits; punctuation; blanks.
_UPPER, _LOWER = (rf"[{kinds}\p{{Lm}}\p{{Lo}}\p{{M}}&&[^\p{{Han}}]]" for kinds in (r"\p{Lu}\p{Lt}", r"\p{Ll}"))
_BEFORE, _ENDING = r"[^\r\n\p{L}\p{N}]?", "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PATTERN = "|".join((
    r"[\p{Han}]+",
    f"{_BEFORE}{_UPPER}*{_LOWER}+{_ENDING}",
    f"{_BEFORE}{_UPPER}+{_LOWER}*{_ENDING}",
    r"\p{N}{1,3}",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*",
    r"\s*[\r\n]+",
    r"\s+(?!\S)",
    r"\s+",
))  # fmt: skip


def is_kimi(folder: Path) -> bool:
    """Return whether a folder has such a tokenizer, and no tokenizer.json that would do."""
    if (folder / "tokenizer.json").is_file() or not (folder / "tiktoken.model").is_file():
        return False
    try:
        named = read_json(folder / "tokenizer_config.json").get("tokenizer_class")
        model = read_json(folder / "config.json").get("model_type")
    except (OSError, ValueError, AttributeError):
        return False
    return named == _CLASS and model in _MODEL_TYPES


def load_kimi(folder: Path) -> Any:
    """Return the tokenizer of a folder, of transformers; ``OSError`` or ``ValueError`` if it can not be read."""
    from tokenizers import AddedToken
    from transformers import PreTrainedTokenizerFast

    settings = read_json(folder / "tokenizer_config.json")
    ranks = read_ranks(folder / "tiktoken.model")
    backend = bpe(ranks)
    named = {int(token_id): entry for token_id, entry in settings.get("added_tokens_decoder", {}).items()}
    if any(token_id >= len(ranks) + _MOST_SPECIAL for token_id in named):
        raise ValueError(f"tokenizer_config.json has a token with the id {max(named)}, far behind the others")
    for token_id in range(len(ranks), max([len(ranks) + _NUM_SPECIAL - 1, *named]) + 1):
        entry = named.get(token_id, {})
        text = entry.get("content", f"<|reserved_token_{token_id}|>")
        backend.add_tokens([AddedToken(text, special=entry.get("special", True), normalized=False)])
    given = {name: settings[name] for name in _FIELDS if settings.get(name) is not None}
    for name, value in given.items():
        if isinstance(value, dict):
            given[name] = value.get("content")
    template = folder / "chat_template.jinja"
    if template.is_file():
        given["chat_template"] = read_text(template)
    return PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False, **given)


def read_ranks(path: Path) -> dict[bytes, int]:
    """Return the rank of each token's bytes; ``ValueError`` unless the ranks are 0, 1, 2, ..."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(filter(None, read_text(path, MAX_TOKENIZER_BYTES).splitlines())):
        try:
            text, rank = line.split()
            token, found = base64.b64decode(text, validate=True), int(rank)
        except (ValueError, binascii.Error):
            raise ValueError(f"{path} has a line {number + 1} that is not a token in base64 and its rank") from None
        if found != number or not 0 < len(token) <= _LONGEST_TOKEN or token in ranks:
            raise ValueError(f"{path} has a line {number + 1} whose rank or token is not as it must be")
        ranks[token] = found
    return ranks


def bpe(ranks: dict[bytes, int]) -> Any:
    """Return the tokenizer of ``tokenizers`` that gives tiktoken's ids for ``ranks`` and ``PATTERN``."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    letters = byte_letters()
    names = {token: "".join(map(letters.__getitem__, token)) for token in ranks}
    merges = [
        (names[token[:place]], names[token[place:]])
        for token in ranks
        for place in range(1, len(token))
        if token[:place] in ranks and token[place:] in ranks
    ]
    vocab = {names[token]: rank for token, rank in ranks.items()}
    found = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=True))
    found.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(PATTERN), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip
    found.decoder = decoders.ByteLevel()
    return found
