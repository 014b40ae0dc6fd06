"""Images through whole engines: a server with a tiny Qwen3.5 that sees, and ``LLM`` with other families.

Oracle: transformers' model and processor, in float32, on the same pixels and the text with every image written out.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from PIL import Image

from tests.e2e.serving import WarmServer, warm_serving
from tests.image_models import IMAGE, Oracle, Prompt, draw_pixels, make_image_model
from tests.images import data_url, file_of, image_part, numbered_tokenizer, picture
from tp_engine import LLM, SamplingParams, run_batch
from tp_engine.images.image_input import ImageInput

pytestmark = pytest.mark.slow

NUM_TOKENS = 6
PICTURES = picture(96, 64), picture(40, 100)
BETWEEN = " and "
# family -> what its template writes for an image, and what stands around its tokens; of Mistral a row's end.
WRITTEN = {
    "qwen3.5-vision": ("<|image_pad|>", "", "", ""),
    "mistral3-vision": ("<|image_pad|>", "", "", "[IMG_BREAK]"),
    "gemma3-vision": ("<|vision_start|>", "\n\n<|vision_start|>", "<|vision_end|>\n\n", ""),
    "gemma4-vision": ("<|image_pad|>", "<|vision_start|>", "<|vision_end|>", ""),
}


def make_model(folder: Path, family: str) -> Path:
    make_image_model(folder, family)
    numbered_tokenizer(WRITTEN[family][0]).save_pretrained(folder)
    return folder


def messages(*images: Image.Image) -> list[dict[str, Any]]:
    parts: list[Any] = ["see "]
    for image in images:
        parts += [image_part(image), BETWEEN]
    return [{"role": "user", "content": parts}]


def prompt_of(folder: Path, family: str, *images: Image.Image) -> Prompt:
    """The prompt of ``messages``, with every image written out in the text."""
    _, before, behind, row_end = WRITTEN[family]
    text, pixels, sizes = "<s>user: see ", [], []
    for image in images:
        height, width = draw_pixels(folder, image.height, image.width, 0).shape[:2]
        cell = {"qwen3.5-vision": 32, "mistral3-vision": 28, "gemma3-vision": 28, "gemma4-vision": 48}[family]
        rows, columns = height // cell, width // cell
        tokens = ("<|image_pad|>" * columns + row_end) * rows
        tokens = tokens.removesuffix(row_end) + "[IMG_END]" if row_end else tokens
        text += before + tokens + behind + BETWEEN
        pixels.append(np.asarray(image.resize((width, height), 2 if family == "gemma3-vision" else 3)))
        sizes.append(rows * (columns + bool(row_end)))
    tokenizer = numbered_tokenizer()
    ids: list[int] = tokenizer.encode(text + "</s><s>assistant:", add_special_tokens=False)
    found, start = Prompt(ids, pixels), 0
    for size in sizes:
        start = ids.index(IMAGE, start)
        where = {"start": start, "num_tokens": size, "grid": (1, 1), "digest": b"", "pid": 0, "fd": 0, "offset": 0}
        found.images.append(ImageInput(**where, height=1, width=1))
        start += size
    return found


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[WarmServer, Path]]:
    folder = make_model(tmp_path_factory.mktemp("qwen"), "qwen3.5-vision")
    options = ["--model", str(folder), "--device", "cpu", "--dtype", "float32", "--num-gpu-blocks-override", "256"]
    with warm_serving(1, *options) as found:
        yield found, folder


def test_a_server_answers_as_transformers_does(server: tuple[WarmServer, Path]) -> None:
    """Oracle: tokens and log-probabilities; the second request finds the images in the prefix cache; texts and wrong
    images beside them change nothing."""
    running, folder = server
    client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0)
    oracle = Oracle(folder, "qwen3.5-vision")
    for images in ((), PICTURES[:1], PICTURES, PICTURES):
        prompt = prompt_of(folder, "qwen3.5-vision", *images)
        chat: Any = client.chat.completions.create(
            model=folder.name,
            messages=messages(*images),  # type: ignore[arg-type]  # parts of plain text are taken too
            max_tokens=NUM_TOKENS,
            temperature=0,
            logprobs=True,
            extra_body={"ignore_eos": True, "return_token_ids": True},
        )
        assert chat.prompt_token_ids == prompt.ids
        assert (chat.usage.prompt_tokens_details.image_tokens or 0) == prompt.ids.count(IMAGE)
        logprobs = [one.logprob for one in chat.choices[0].logprobs.content]
        assert oracle.problem(prompt, chat.choices[0].token_ids, logprobs) is None
    assert chat.usage.prompt_tokens_details.cached_tokens > 0
    with pytest.raises(openai.BadRequestError, match="no image that is known"):
        client.chat.completions.create(
            model=folder.name,
            messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": data_url(b"GIF89a")}}]}],
        )


@pytest.mark.parametrize("family", ["mistral3-vision", "gemma3-vision", "gemma4-vision"])
def test_python_answers_as_transformers_does(family: str, tmp_path: Path) -> None:
    """Oracle: tokens and log-probabilities of ``LLM.chat`` and of ``LLM.generate`` with ``multi_modal_data``."""
    folder = make_model(tmp_path, family)
    prompt = prompt_of(folder, family, *PICTURES)
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True, logprobs=0)
    mark = WRITTEN[family][0]
    text = f"<s>user: see {mark}{BETWEEN}{mark}{BETWEEN}</s><s>assistant:"
    with LLM(str(folder), device="cpu", dtype="float32", num_gpu_blocks_override=256, max_num_seqs=8) as llm:
        given = {"prompt": text, "multi_modal_data": {"image": list(PICTURES)}}
        for output in (*llm.chat(messages(*PICTURES), params, False), *llm.generate(given, params, False)):
            assert output.prompt_token_ids == prompt.ids
            answer = output.outputs[0]
            assert answer.logprobs is not None
            logprobs = [one[token].logprob for one, token in zip(answer.logprobs, answer.token_ids, strict=True)]
            assert Oracle(folder, family).problem(prompt, answer.token_ids, logprobs) is None


def test_a_batch_answers_as_transformers_does(tmp_path: Path) -> None:
    """Oracle: tokens and log-probabilities of each line, and 400 for a file whose second half is missing; the check of
    all lines, which reads headers, takes that for good, and refuses one that is no image."""
    folder = make_model(tmp_path / "model", "qwen3.5-vision")
    cut = image_part(file_of(PICTURES[0])[:200])
    fields = {
        "max_tokens": NUM_TOKENS,
        "temperature": 0,
        "logprobs": True,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    chats = [messages(*PICTURES), messages(), [{"role": "user", "content": [cut]}], messages(*PICTURES[:1])]
    lines = [
        {"custom_id": str(number), "method": "POST", "url": "/v1/chat/completions", "body": {"messages": one, **fields}}
        for number, one in enumerate([*chats, [{"role": "user", "content": [image_part(b"GIF89a")]}]])
    ]
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "num_gpu_blocks_override": 256, "max_num_seqs": 8}
    checked = run_batch(source, "", str(folder), validate_only=True, **options)
    assert (checked.num_lines, checked.num_failed) == (5, 1)
    summary = run_batch(source, target, str(folder), **options)
    assert (summary.num_succeeded, summary.num_failed) == (3, 2)
    results = {one["custom_id"]: one for one in map(json.loads, target.read_text().splitlines())}
    assert "truncated" in results["2"]["error"]["message"] and "no image" in results["4"]["error"]["message"]
    oracle = Oracle(folder, "qwen3.5-vision")
    for number, images in ((0, PICTURES), (1, ()), (3, PICTURES[:1])):
        (choice,) = results[str(number)]["response"]["body"]["choices"]
        logprobs = [one["logprob"] for one in choice["logprobs"]["content"]]
        prompt = prompt_of(folder, "qwen3.5-vision", *images)
        assert oracle.problem(prompt, choice["token_ids"], logprobs) is None
