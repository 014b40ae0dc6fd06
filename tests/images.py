"""Pictures made by tests, and a tokenizer and a model's description that take them."""

from __future__ import annotations

import base64
import io
import tempfile
from collections.abc import Mapping
from functools import cache
from typing import Any

import msgspec
import numpy as np
from PIL import Image, ImageDraw
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.fake_engine import MODEL_INFO
from tests.text_tokenizers import byte_level_tokenizer
from tp_engine.engine.messages import ModelInfo
from tp_engine.images.decoding import Size
from tp_engine.images.loading import OpenedImage
from tp_engine.images.settings import ImageSettings

IMAGE_TOKENS = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "[IMG_BREAK]", "[IMG_END]")
TEMPLATE = (
    "{% for message in messages %}<s>{{ message.role }}: {% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}{% if part.type == 'image' %}"
    "{% if message.role == 'system' %}{{ raise_exception('System message cannot contain images') }}{% endif %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}</s>"
    "{% endfor %}{% if add_generation_prompt %}<s>assistant:{% endif %}"
)


def picture(width: int = 64, height: int = 48, mode: str = "RGB") -> Image.Image:
    """A picture with shapes, no two places alike; ``mode`` is one of Pillow's."""
    image = Image.fromarray(np.indices((height, width)).sum(0).astype(np.uint8)).convert("RGB")
    draw = ImageDraw.Draw(image)
    draw.ellipse((0, 0, width // 2, height // 2), fill=(220, 30, 30))
    draw.rectangle((width // 2, height // 2, width, height), fill=(30, 30, 220))
    return image.convert(mode)


def file_of(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    """The bytes of an image's file."""
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def data_url(data: bytes | Image.Image, media_type: str = "image/png") -> str:
    """A data URL of a file, or of a picture as PNG."""
    content = file_of(data) if isinstance(data, Image.Image) else data
    return f"data:{media_type};base64,{base64.b64encode(content).decode()}"


def pixels_of(image: OpenedImage) -> np.ndarray[Any, Any]:
    """The pixels of an image in its own size."""
    height, width = image.height, image.width
    with tempfile.TemporaryFile() as file:
        image.write(file.fileno(), 0, Size(height, width, height, width, Image.Resampling.BICUBIC), 100.0)
        return np.frombuffer(file.read(), np.uint8).reshape(height, width, 3)


def image_part(data: bytes | Image.Image, **fields: Any) -> dict[str, Any]:
    """A part of a chat's message."""
    return {"type": "image_url", "image_url": {"url": data_url(data), **fields}}


@cache
def image_tokenizer() -> Any:
    """The byte-level tokenizer with the tokens of images, and a template that writes them."""
    backend = byte_level_tokenizer().backend_tokenizer
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=type(backend).from_str(backend.to_str()),
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        chat_template=TEMPLATE,
    )
    tokenizer.add_special_tokens({"additional_special_tokens": list(IMAGE_TOKENS)})
    return tokenizer


def numbered_tokenizer(mark: str = "<|image_pad|>") -> Any:
    """A token per byte, and the tokens of images at the ids of ``tests/image_models.py``; the template writes ``mark``
    for an image."""
    names = {300: "<|image_pad|>", 301: "<|video_pad|>", 302: "<|vision_start|>", 303: "<|vision_end|>"}
    names |= {305: "[IMG_BREAK]", 306: "[IMG_END]"}
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {name: number for number, name in enumerate(("<pad>", "<s>", "</s>", *letters))}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<pad>", "<s>", "</s>"])
    backend.add_special_tokens([names.get(number, f"<{number}>") for number in range(len(vocab), 320)])
    template = TEMPLATE.replace("<|vision_start|><|image_pad|><|vision_end|>", mark)
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=template, **special)


def image_info(family: str = "qwen3_5", processor: Mapping[str, Any] | None = None, **limits: Any) -> ModelInfo:
    """A model that takes images of cells of 32 pixels, 4 cells at least."""
    start, image, end = map(image_tokenizer().convert_tokens_to_ids, IMAGE_TOKENS[:3])
    half = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    settings = ImageSettings(
        family=family,
        image_token_id=image,
        start_token_id=start,
        end_token_id=end,
        cell=32,
        processor={"size": {"shortest_edge": 4096, "longest_edge": 1 << 20}, **half, **(processor or {})},
        origin="preprocessor_config.json",
        **limits,
    )
    return msgspec.structs.replace(MODEL_INFO, vocab_size=len(image_tokenizer()), images=settings)
