"""A picture on its whole way: a chat from Python, its pixels, a tower, the answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.image_models import Oracle, Prompt, make_image_model
from tests.images import IMAGE_TOKENS, image_tokenizer, picture
from tp_engine import LLM, RequestError, SamplingParams
from tp_engine.errors import MemoryBudgetError
from tp_engine.features.images import engine as images
from tp_engine.features.images.engine import tower_work
from tp_engine.models.tower_run import TowerRun
from tp_engine.models.vision_tower import VisionTower

NAMES = ("vision_start_token_id", "image_token_id", "vision_end_token_id")
SMALL: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_model_len": 200, "num_gpu_blocks_override": 60}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3.5 with the tokenizer of tests."""
    tokens = dict(zip(NAMES, map(image_tokenizer().convert_tokens_to_ids, IMAGE_TOKENS), strict=False))
    made = make_image_model(
        tmp_path_factory.mktemp("seeing"), "qwen3.5-vision", whole=tokens, vocab_size=len(image_tokenizer())
    )
    image_tokenizer().save_pretrained(made)
    return made


def test_a_picture_in_a_chat_equals_transformers(folder: Path) -> None:
    """Oracle: transformers' processor and model, given the picture and our token ids; then the text part alone."""
    image = picture(96, 64)
    content = [{"type": "text", "text": "What is it?"}, {"type": "image_pil", "image_pil": image}]
    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, logprobs=1)
    token = image_tokenizer().convert_tokens_to_ids(IMAGE_TOKENS[1])
    with LLM(model=str(folder), **SMALL) as llm:
        (output,) = llm.chat([{"role": "user", "content": content}], params, use_tqdm=False)
    answer = output.outputs[0]
    assert output.prompt_token_ids is not None and output.prompt_token_ids.count(token) == 6
    logprobs = [found[one].logprob for one, found in zip(answer.token_ids, answer.logprobs or (), strict=True)]
    prompt = Prompt(list(output.prompt_token_ids), [np.asarray(image)])
    assert Oracle(folder, "qwen3.5-vision", token).problem(prompt, answer.token_ids, logprobs) is None


def test_an_image_in_parts_has_the_bits_of_one_that_is_encoded_at_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the engine with a step for all of it, with the same chunks; texts go on meanwhile."""
    found, advanced, advance = [], list[int](), TowerRun.advance

    def noted(run: TowerRun, count: int) -> torch.Tensor | None:
        advanced.append(count)
        return advance(run, count)

    monkeypatch.setattr(TowerRun, "advance", noted)
    params = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True, logprobs=1)
    for share in (1.0, 1000.0):
        monkeypatch.setattr(
            images, "tower_work", lambda *own, by=share: tuple(np.multiply(tower_work(*own), (1, by, by)))
        )
        advanced.clear()
        with LLM(model=str(folder), **SMALL) as llm:
            content = [{"type": "image_pil", "image_pil": picture(128, 96)}]
            prompts: list[Any] = [llm.input_processor.chat_prompt([{"role": "user", "content": content}]), "a text"]
            outputs = llm.generate(prompts, params, use_tqdm=False)
        found.append([(one.outputs[0].token_ids, one.outputs[0].cumulative_logprob) for one in outputs])
        assert (len(advanced) > 1) == (share > 1) and sum(advanced) == 4
    assert found[0] == found[1]


def test_a_model_without_its_tower_refuses_pictures(folder: Path) -> None:
    """Oracle: an error that names the option; text is answered."""
    content = [{"type": "image_pil", "image_pil": picture(96, 64)}]
    with LLM(model=str(folder), limit_mm_per_prompt='{"image": 0}', **SMALL) as llm:
        with pytest.raises(RequestError, match="image"):
            llm.chat([{"role": "user", "content": content}], use_tqdm=False)
        assert llm.generate("ab", SamplingParams(max_tokens=1), use_tqdm=False)[0].outputs[0].token_ids


@pytest.mark.slow
def test_too_little_memory_for_the_largest_image_is_found_at_the_start(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: an error that names the image's size and both remedies; with the second one it starts."""

    def fail(_tower: VisionTower, _pixels: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(VisionTower, "forward", fail)
    with pytest.raises(MemoryBudgetError, match=r"128 x 128 pixels.*max_pixels.*limit-mm-per-prompt.*out of memory"):
        LLM(model=str(folder), **SMALL)
    with LLM(model=str(folder), limit_mm_per_prompt='{"image": 0}', **SMALL) as llm:
        assert llm.generate("ab", SamplingParams(max_tokens=1), use_tqdm=False)
