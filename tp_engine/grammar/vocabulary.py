"""The model's tokens, as the grammar library sees them."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tp_engine.errors import RequestError
from tp_engine.grammar.library import SpecialTokens, byte_tokens, llguidance
from tp_engine.plan import MASK_TOKENS, IntArray
from tp_engine.requests.structured_outputs import PARAM
from tp_engine.system.units import ceil_div


@dataclass(frozen=True, slots=True)
class GrammarVocabulary:
    """``tokens`` is the library's tokenizer.  Masks for the model have ``num_words`` words; the library's own masks, of
    ``num_own_words``, are wider if the tokenizer has tokens that the model lacks.

    ``end_mask`` (num_words,) int32 allows only the tokens that end an output.  Grammars may name ``special_tokens``.
    """

    tokens: Any
    num_words: int
    num_own_words: int
    end_mask: IntArray
    special_tokens: SpecialTokens


def check_tokenizer(tokenizer: Any | None) -> None:
    """Raise ``RequestError`` for a tokenizer that the library cannot use."""
    if tokenizer is None:
        raise RequestError("structured output needs a tokenizer, which this model does not have", param=PARAM)
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        raise RequestError(
            f"structured output needs a fast tokenizer (a tokenizer.json); {type(tokenizer).__name__} is none",
            param=PARAM,
        )


def make_vocabulary(tokenizer_json: str, vocab_size: int, eos_token_ids: Sequence[int]) -> GrammarVocabulary:
    """The tokens of a fast Hugging Face tokenizer, for a model with ``vocab_size`` logits.

    ``tokenizer_json`` is the text of its ``tokenizer.json``.  Takes about a second for 150,000 tokens and holds the
    GIL, so call it when no step waits.  Raises ``RequestError`` for a tokenizer that the library does not support.
    """
    library = llguidance()
    try:
        written = json.loads(tokenizer_json)
        num_tokens = _num_tokens(written)
        ends = [token_id for token_id in eos_token_ids if token_id < num_tokens] or None
        plain = json.dumps(written) if _make_plain(written) else tokenizer_json
        tokens = library.LLTokenizer(plain, n_vocab=max(vocab_size, num_tokens), eos_token=ends)
        added = [(int(token["id"]), str(token["content"])) for token in written.get("added_tokens") or ()]
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise RequestError(
            f"structured output is not supported with this model's tokenizer: {error}", param=PARAM
        ) from error
    named = tuple(token for token in added if tokens.is_special_token(token[0]))
    return _vocabulary(tokens, vocab_size, SpecialTokens(num_tokens=tokens.vocab_size, tokens=named))


def _num_tokens(written: Mapping[str, Any]) -> int:
    vocabulary = written["model"]["vocab"]
    ids = [len(vocabulary) - 1] if isinstance(vocabulary, list) else vocabulary.values()
    added = (token["id"] for token in written.get("added_tokens") or ())
    return 1 + int(max((*ids, *added)))


_OF_PROMPTS = {"truncation": None, "padding": None, "dropout": None, "add_prefix_space": False}


def _make_plain(written: Any) -> bool:
    """Take out of a tokenizer.json what is for whole prompts; whether there was any.  The library tokenizes parts of
    answers with it, what a grammar forces, and allows no other tokens then: a space in front would fit no grammar."""
    parts = [written, written["model"], *_parts(written.get("pre_tokenizer"))]
    found = [(part, name) for part in parts for name in _OF_PROMPTS if part.get(name)]
    for part, name in found:
        part[name] = _OF_PROMPTS[name]
    return bool(found)


def _parts(pre_tokenizer: Any) -> list[Any]:
    """A pre-tokenizer and, if it is a sequence, all within."""
    if not pre_tokenizer:
        return []
    return [pre_tokenizer, *(part for one in pre_tokenizer.get("pretokenizers") or () for part in _parts(one))]


def byte_vocabulary() -> GrammarVocabulary:
    """One token per byte and an end token: enough to check whether a grammar can be used."""
    tokens = byte_tokens()
    return _vocabulary(tokens, tokens.vocab_size, SpecialTokens(num_tokens=tokens.vocab_size, tokens=()))


def _vocabulary(tokens: Any, vocab_size: int, special_tokens: SpecialTokens) -> GrammarVocabulary:
    num_words = ceil_div(vocab_size, MASK_TOKENS)
    end_mask = np.zeros(num_words * MASK_TOKENS, dtype=np.uint8)
    end_mask[[token_id for token_id in tokens.eos_tokens if token_id < vocab_size]] = 1
    return GrammarVocabulary(
        tokens=tokens,
        num_words=num_words,
        num_own_words=ceil_div(tokens.vocab_size, MASK_TOKENS),
        end_mask=np.packbits(end_mask, bitorder="little").view("<i4"),
        special_tokens=special_tokens,
    )
