"""Tokenizers whose files have ranks of byte sequences: Kimi's ``tiktoken.model`` and Mistral's ``tekken.json``.

Each token has its bytes in base64 and its rank.  In ``tiktoken.model`` ranks are ids, and special tokens follow the
last one; tokenizer_config.json names some of them.  In ``tekken.json`` special tokens come first, and the first rank
follows them.  No code beside such a file is ever run: the library ``tokenizers`` gives the same ids with the vocabulary
as a byte-level BPE.  Each way to split a token into two others is a merge, in the order of the ranks.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tp_engine.engine.byte_letters import byte_letters
from tp_engine.errors import shown
from tp_engine.system.files import read_json, read_text
from tp_engine.system.units import MIB

TEKKEN_FILE = "tekken.json"
_KIMI_FILE = "tiktoken.model"
_MODEL_TYPES = ("kimi_k2", "kimi_k25", "kimi_linear")
_CLASS = "TikTokenTokenizer"
_NUM_SPECIAL, _MOST_SPECIAL = 256, 4096
_LONGEST_TOKEN = 1024  # bytes
_MOST_BYTES = 8 * MIB  # of all tokens, since all places where they can be split are looked at; Kimi's have 1.1 MiB
_MAX_FILE_BYTES = 64 * MIB  # Mistral's have 19 MB
_LONGEST_PATTERN = 4096
_FIELDS = ("bos_token", "eos_token", "pad_token", "unk_token", "chat_template", "model_max_length")
# Special tokens of a tekken.json that names none, with the ids 0, 1, 2, ...
_OLD_SPECIALS = (
    "<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]",
    "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]",
)  # fmt: skip

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


def is_ranked(folder: Path) -> bool:
    """Return whether a folder has such a tokenizer, and no other that would do."""
    if any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model")):
        return False
    return (folder / TEKKEN_FILE).is_file() or _is_kimi(folder)


def load_ranked(folder: Path) -> Any:
    """Return the tokenizer of a folder, of transformers; ``OSError`` or ``ValueError`` if it cannot be read."""
    is_tekken = (folder / TEKKEN_FILE).is_file()
    tokenizer = _load_tekken(folder / TEKKEN_FILE) if is_tekken else _load_kimi(folder)
    template = folder / "chat_template.jinja"
    if template.is_file():
        tokenizer.chat_template = read_text(template)
    return tokenizer


def _is_kimi(folder: Path) -> bool:
    if not (folder / _KIMI_FILE).is_file():
        return False
    try:
        named = read_json(folder / "tokenizer_config.json").get("tokenizer_class")
        model = read_json(folder / "config.json").get("model_type")
    except (OSError, ValueError, AttributeError):
        return False
    return named == _CLASS and model in _MODEL_TYPES


def _load_kimi(folder: Path) -> Any:
    settings = read_json(folder / "tokenizer_config.json")
    ranks = read_ranks(folder / _KIMI_FILE)
    named = {int(token_id): entry for token_id, entry in settings.get("added_tokens_decoder", {}).items()}
    if any(token_id >= len(ranks) + _MOST_SPECIAL for token_id in named):
        raise ValueError(f"tokenizer_config.json has a token with the id {max(named)}, far behind the others")
    specials: dict[str, tuple[int, bool]] = {}
    for token_id in range(len(ranks), max([len(ranks) + _NUM_SPECIAL - 1, *named]) + 1):
        entry = named.get(token_id, {})
        specials[entry.get("content", f"<|reserved_token_{token_id}|>")] = (token_id, entry.get("special", True))
    given = {name: settings[name] for name in _FIELDS if settings.get(name) is not None}
    for name, value in given.items():
        if isinstance(value, dict):
            given[name] = value.get("content")
    return _tokenizer(bpe(ranks, specials=specials), given)


def _load_tekken(path: Path) -> Any:
    """The tokenizer of a ``tekken.json``; as Mistral's own, it puts ``<s>`` in front of a text."""
    from tokenizers import processors

    content = read_json(path, _MAX_FILE_BYTES)
    config = content["config"]
    num_ids, num_special = (_count(config, name) for name in ("default_vocab_size", "default_num_special_tokens"))
    pattern, vocab = config["pattern"], content["vocab"]
    if not isinstance(pattern, str) or not 0 < len(pattern) <= _LONGEST_PATTERN:
        raise ValueError(
            f"{path} has the pattern {shown(pattern)}, which is not a regular expression of ordinary length"
        )
    if not num_special < num_ids <= num_special + len(vocab) or num_special > _MOST_SPECIAL:
        raise ValueError(
            f"{path} says that {num_special} of {num_ids} tokens are special and has {len(vocab)} others: a wrong count"
        )
    ranks: dict[bytes, int] = {}
    for entry in vocab[: num_ids - num_special]:
        _add_rank(ranks, entry["token_bytes"], entry["rank"], f"{path} has an entry {len(ranks)} in vocab")
    specials = {text: (token_id, True) for token_id, text in enumerate(_OLD_SPECIALS)}
    if content.get("special_tokens") is not None:
        listed = content["special_tokens"]
        specials = {one["token_str"]: (place, one.get("is_control") is not False) for place, one in enumerate(listed)}
        if len(specials) != len(listed) or any(one["rank"] != place for place, one in enumerate(listed)):
            raise ValueError(f"{path} has special_tokens that are not in the order of their ids, or come twice")
    if len(specials) > num_special:
        raise ValueError(f"{path} has {len(specials)} special tokens, more than the {num_special} that it speaks of")
    specials |= {f"<SPECIAL_{token_id}>": (token_id, True) for token_id in range(len(specials), num_special)}
    roles = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    backend = bpe(ranks, pattern, first_id=num_special, specials=specials)
    if "<s>" in specials:
        first = ("<s>", specials["<s>"][0])
        backend.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A <s>:1 $B:1", special_tokens=[first])
    return _tokenizer(backend, {name: text for name, text in roles.items() if text in specials})


def _tokenizer(backend: Any, fields: Mapping[str, Any]) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False, **fields)


def _count(config: Mapping[str, Any], name: str) -> int:
    if type(config[name]) is not int or config[name] < 0:
        raise ValueError(f"{name} is {shown(config[name])}; it must be a number of tokens")
    return int(config[name])


def read_ranks(path: Path) -> dict[bytes, int]:
    """Return the rank of each token's bytes; ``ValueError`` unless the ranks are 0, 1, 2, ..."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(filter(None, read_text(path, _MAX_FILE_BYTES).splitlines())):
        where = f"{path} has a line {number + 1}"
        try:
            text, rank = line.split()
            place = int(rank)
        except ValueError:
            raise ValueError(f"{where} that is not a token in base64 and its rank") from None
        _add_rank(ranks, text, place, where)
    return ranks


def _add_rank(ranks: dict[bytes, int], text: str, rank: int, where: str) -> None:
    """Add a token, which must be the next one."""
    try:
        token = base64.b64decode(text, validate=True)
    except (binascii.Error, TypeError):
        raise ValueError(f"{where} that is not a token in base64 and its rank") from None
    if rank != len(ranks) or not 0 < len(token) <= _LONGEST_TOKEN or token in ranks:
        raise ValueError(f"{where} whose rank or token is not as it must be")
    ranks[token] = rank


def bpe(
    ranks: Mapping[bytes, int],
    pattern: str = PATTERN,
    *,
    first_id: int = 0,
    specials: Mapping[str, tuple[int, bool]] | None = None,
) -> Any:
    """Return the tokenizer of ``tokenizers`` that gives tiktoken's ids for ``ranks`` and ``pattern``.

    The id of a token is ``first_id`` plus its rank.  ``specials`` have the id of each other token, and whether texts
    leave it out.  Raises ``ValueError``.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    if sum(map(len, ranks)) > _MOST_BYTES:
        raise ValueError(f"its tokens have more than {_MOST_BYTES:,} bytes in all")
    letters = byte_letters()
    names = {token: "".join(map(letters.__getitem__, token)) for token in ranks}
    merges = [
        (names[token[:place]], names[token[place:]])
        for token in ranks
        for place in range(1, len(token))
        if token[:place] in ranks and token[place:] in ranks
    ]
    vocab = {names[token]: first_id + rank for token, rank in ranks.items()}
    specials = specials or {}
    if both := vocab.keys() & specials.keys():
        raise ValueError(f"{shown(min(both))} is a special token and another one")
    vocab |= {text: token_id for text, (token_id, _) in specials.items()}
    found = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=True))
    try:
        split = pre_tokenizers.Split(Regex(pattern), "isolated")
    except Exception as error:  # the library's own kind
        raise ValueError(f"{shown(pattern)} is not a regular expression that can be used: {error}") from None
    found.pre_tokenizer = pre_tokenizers.Sequence([
        split,
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip
    found.decoder = decoders.ByteLevel()
    found.add_tokens([
        AddedToken(text, special=is_special, normalized=False) for text, (_, is_special) in specials.items()
    ])  # fmt: skip
    return found
