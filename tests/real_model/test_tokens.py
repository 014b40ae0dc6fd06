"""Tokens of SmolLM2 in float32, and the text of its prompts, equal those of transformers on 1 and 3 ranks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tp_engine import LLM, SamplingParams

pytestmark = pytest.mark.slow

TEXT = (Path(__file__).parent / "text.txt").read_text(encoding="utf-8")
LONG = TEXT[:1000]  # about 220 tokens, more than four chunks
QUESTIONS = [
    "What is the capital of France?",
    "Wie heißt die Hauptstadt von Österreich?",
    "Écris une phrase sur la mer.",
    "用一句话介绍你自己。",
    "12 + 34 = ?  Check:\n  1234 🙂",
    "Write a Python function that adds two numbers.",
]
TEXTS = ["def fibonacci(n):\n    if n < 2:\n", "Once upon a time,", LONG]
AGAIN = LONG + "\nThe name of the place is"  # its first blocks are those of the last of TEXTS
OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "max_model_len": 512,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 48,
    "num_gpu_blocks_override": 96,
}


@cache
def oracle(folder: Path) -> tuple[Any, Any]:
    """The model and tokenizer of transformers."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval(), AutoTokenizer.from_pretrained(folder)


def assert_greedy(model: Any, prompt: Sequence[int], answer: Sequence[int]) -> None:
    """Check each token of ``answer`` is the likeliest after those before it, so that it is the greedy answer."""
    import torch

    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *answer[:-1]]])).logits[0, len(prompt) - 1 :]
    assert logits.argmax(-1).tolist() == list(answer)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_tokens_equal_those_of_transformers(num_ranks: int, smollm2: Path) -> None:
    """Oracle: transformers' tokens of each prompt, and its likeliest token at each place of the answer.

    Prompts of several languages and code, as chats and as texts, go into chunks of 48 tokens; the last one finds the
    long one's blocks in the prefix cache.
    """
    model, tokenizer = oracle(smollm2)
    chats: list[list[dict[str, str]]] = [[{"role": "user", "content": text}] for text in QUESTIONS]
    params = SamplingParams(temperature=0, max_tokens=16)
    with LLM(str(smollm2), tensor_parallel_size=num_ranks, **OPTIONS) as llm:
        found = [
            *llm.chat(chats, params, use_tqdm=False),
            *llm.generate(TEXTS, params, use_tqdm=False),
            *llm.generate([AGAIN], params, use_tqdm=False),
        ]
    prompts = tokenizer.apply_chat_template(chats, add_generation_prompt=True)["input_ids"]
    prompts += tokenizer([*TEXTS, AGAIN])["input_ids"]
    assert [output.prompt_token_ids for output in found] == prompts
    assert found[-1].num_cached_tokens > 4 * OPTIONS["max_num_batched_tokens"]
    for output in found:
        assert_greedy(model, output.prompt_token_ids, output.outputs[0].token_ids)


def test_digits_are_tokens_of_their_own(smollm2: Path) -> None:
    """Oracle: the rule that the model was trained with, also after blanks, which would else take the first digit."""
    _, tokenizer = oracle(smollm2)
    assert tokenizer.tokenize("  1984,\n25x") == ["ĠĠ", "1", "9", "8", "4", ",", "Ċ", "2", "5", "x"]
    assert (tokenizer.eos_token, tokenizer.bos_token) == ("<|im_end|>", "<|im_start|>")
