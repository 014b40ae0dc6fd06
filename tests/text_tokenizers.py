"""Small tokenizers of the kinds that language models use; each encodes every text.

In all of them ids 0 to 2 are special: unknown or start, end (EOS), padding.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizer, PreTrainedTokenizerFast

SPECIALS = ("<s>", "</s>", "<pad>")
TRAINING_TEXT = [
    "the quick brown fox jumps over the lazy dog, again and again and again.",
    "Stop! In the name of love; stop, stop. STOP words END here.",
    "你好世界今天天气很好。 こんにちは世界 안녕하세요",
    "smile 😀 family 👨‍👩‍👧‍👦 flag 🇩🇪 café naïve Zürich e\u0301",
]
CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message.role not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('unknown role ' + message.role) }}{% endif %}"
    "<s>{{ message.role }}: {{ message.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant:{% if shout %}!{% endif %}{% endif %}"
)


@cache
def byte_level_tokenizer() -> Any:
    """Byte-level BPE, as in GPT-2, Llama 3 and Qwen; characters outside ASCII span tokens."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=360, initial_alphabet=alphabet, special_tokens=list(SPECIALS), show_progress=False
    )
    backend.train_from_iterator(TRAINING_TEXT, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="<pad>", chat_template=CHAT_TEMPLATE
    )


@cache
def byte_fallback_tokenizer() -> Any:
    """SentencePiece-like BPE with byte fallback, as in Llama 2 and Mistral: unknown characters become byte tokens."""
    pieces = ["▁", *"abcdefghijklmnopqrstuvwxyzSTOPEND.,!;'", "é", "世", "界", "\ufffd"]
    merges = [("▁", "t"), ("▁t", "h"), ("▁th", "e"), ("s", "t"), ("o", "p"), ("st", "op"), ("世", "界"), ("▁", "▁")]
    tokens = [*SPECIALS, *(f"<0x{byte:02X}>" for byte in range(256)), *pieces, *(a + b for a, b in merges)]
    vocab = {token: index for index, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True, fuse_unk=True, unk_token="<s>"))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<s>", eos_token="</s>", pad_token="<pad>")


@cache
def metaspace_tokenizer() -> Any:
    """Unigram with metaspace, as in T5 and Gemma: a leading space belongs to the word; the text's first is dropped."""
    backend = Tokenizer(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=120, special_tokens=list(SPECIALS), unk_token="<s>", show_progress=False
    )
    backend.train_from_iterator(TRAINING_TEXT, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<s>", eos_token="</s>", pad_token="<pad>")


class SlowByteTokenizer(PreTrainedTokenizer):  # type: ignore[misc]  # transformers is not followed: its class is Any
    """A tokenizer in Python with one token per byte of UTF-8, as in ByT5."""

    def __init__(self, **options: Any) -> None:
        super().__init__(unk_token="<s>", eos_token="</s>", pad_token="<pad>", **options)

    @property
    def vocab_size(self) -> int:
        return 256

    def get_vocab(self) -> dict[str, int]:
        added: dict[str, int] = self.added_tokens_encoder
        return {chr(byte): byte for byte in range(256)} | added

    def _tokenize(self, text: str, **options: Any) -> list[str]:
        return [chr(byte) for byte in text.encode()]

    def _convert_token_to_id(self, token: str) -> int:
        return ord(token)

    def _convert_id_to_token(self, index: int) -> str:
        return chr(index)

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        data = b"".join(bytes([ord(token)]) if len(token) == 1 else token.encode() for token in tokens)
        return data.decode(errors="replace")


@cache
def slow_tokenizer() -> Any:
    """The tokenizer in Python; its special tokens follow the 256 bytes."""
    return SlowByteTokenizer()
