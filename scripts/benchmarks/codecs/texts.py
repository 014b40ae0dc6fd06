"""What the models of the codecs' benchmark read: chats for the demo model, random tokens for random weights."""

from __future__ import annotations

import random
from typing import Protocol

import demo_tasks
import numpy as np

from tp_engine.model_config import load_model_config

_TASKS = (demo_tasks.addition, demo_tasks.reverse, demo_tasks.sort, demo_tasks.copy)


class Texts(Protocol):
    """Prompts of one model, each by its number, and what may follow a prompt."""

    def prompt(self, number: int) -> list[int]:
        """Token ids."""

    def endings(self, number: int, count: int) -> list[list[int]]:
        """``count`` continuations of a prompt, behind which a model says one token."""


class RandomTexts:
    """``num_tokens`` random tokens; an ending has eight."""

    def __init__(self, model: str, num_tokens: int) -> None:
        self._vocab_size = load_model_config(model)[0].vocab_size
        self._num_tokens = num_tokens

    def prompt(self, number: int) -> list[int]:
        """See ``Texts``."""
        return self._draw(number, self._num_tokens)

    def endings(self, number: int, count: int) -> list[list[int]]:
        """See ``Texts``."""
        return [self._draw(1000 * (number + 1) + index, 8) for index in range(count)]

    def _draw(self, seed: int, count: int) -> list[int]:
        found: list[int] = np.random.default_rng(seed).integers(3, self._vocab_size, count).tolist()
        return found


class DemoChats:
    """Chats of the demo model's tasks, of at most ``num_tokens``; an ending is one more question."""

    def __init__(self, model: str, num_tokens: int) -> None:
        from transformers import AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(model)
        self._num_tokens = num_tokens

    def prompt(self, number: int) -> list[int]:
        """See ``Texts``."""
        return self._render(self._chat(number))

    def endings(self, number: int, count: int) -> list[list[int]]:
        """See ``Texts``."""
        chat, rng = self._chat(number), random.Random(1000 * (number + 1))
        start, found = self._render(chat), []
        for _ in range(count):
            question, _ = rng.choice(_TASKS)(rng)
            tokens = self._render([*chat, {"role": "user", "content": question}], asks=True)
            assert tokens[: len(start)] == start, "the template renders turns one by one"
            found.append(tokens[len(start) :])
        return found

    def _chat(self, number: int) -> list[dict[str, str]]:
        rng, chat = random.Random(number), list[dict[str, str]]()
        while True:
            question, answer = rng.choice(_TASKS)(rng)
            longer = [*chat, {"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            if len(self._render(longer)) > self._num_tokens:
                return chat
            chat = longer

    def _render(self, chat: list[dict[str, str]], *, asks: bool = False) -> list[int]:
        found: list[int] = self._tokenizer.apply_chat_template(chat, add_generation_prompt=asks, return_dict=False)
        return found
