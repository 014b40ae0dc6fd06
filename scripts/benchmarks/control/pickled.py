"""The usual small-engine control plane as a contender: pickled sequences, one shared page, an Event per reader."""

from __future__ import annotations

import multiprocessing
import pickle
from collections.abc import Sequence as Seq
from ctypes import c_char
from multiprocessing.sharedctypes import RawArray
from typing import Any

import numpy as np

from benchmarks.control.objects import Scheduler, Sequence
from benchmarks.control.plans import EOS, LONGEST_FIRST, NEW_LENGTH, NUM_NEW, STOPS, VOCABULARY
from benchmarks.control.readers import TIMEOUT_S, Readers, Receive

PAGE_BYTES = 1 << 20
METHOD = "run"
SPAWN = multiprocessing.get_context("spawn")


def open_channel(page: Any, events: Seq[Any], spins: bool, index: int) -> Receive:
    """Open the channel in a reader's process."""
    view, event = memoryview(page).cast("B"), events[index]

    def receive() -> object:
        if spins:
            while not event.is_set():
                pass
        else:
            event.wait(TIMEOUT_S)
        size = int.from_bytes(view[:4], "little")
        message = pickle.loads(view[4 : 4 + size])
        event.clear()
        return message

    return receive


class PickledContender:
    """The same load as ``PlanContender``'s, in blocks of ``block_size`` tokens.

    ``spins``: readers poll their Event and never block.
    """

    name = "pickled objects"

    def __init__(self, num_readers: int, num_rows: int, num_steps: int, *, block_size: int, spins: bool) -> None:
        self._rng = np.random.default_rng(0)
        blocks_per_row = (LONGEST_FIRST + 2 * num_steps) // block_size + 2
        self._scheduler = Scheduler(
            num_blocks=num_rows * blocks_per_row + 2 * NUM_NEW * (NEW_LENGTH // block_size + 2),
            block_size=block_size,
            max_num_seqs=num_rows + NUM_NEW,
            max_num_batched_tokens=num_rows + NUM_NEW * NEW_LENGTH,
        )
        self._prompts: list[list[int]] = []
        self._add(self._draw(self._rng.integers(33, LONGEST_FIRST + 1, num_rows).tolist()))
        self._new: list[Sequence] = []
        while self._scheduler.waiting:
            step = self._scheduler.schedule()
            self._scheduler.postprocess(step, self.sample(step))
        self._page = RawArray(c_char, PAGE_BYTES)
        self._view = memoryview(self._page).cast("B")
        self._events = [SPAWN.Event() for _ in range(num_readers)]
        self.readers = Readers(SPAWN, num_readers, open_channel, (self._page, self._events, spins))
        self.readers.wait_ready()

    def draw(self) -> None:
        self._prompts = self._draw([NEW_LENGTH] * NUM_NEW)

    def admit(self) -> None:
        self._new = self._add(self._prompts)

    def schedule(self) -> list[Sequence]:
        step = self._scheduler.schedule()
        assert not self._scheduler.waiting
        return step

    def publish(self, step: list[Sequence]) -> None:
        data = pickle.dumps([METHOD, step])
        self._view[:4] = len(data).to_bytes(4, "little")
        self._view[4 : 4 + len(data)] = data
        for event in self._events:
            event.set()

    def encode(self, step: list[Sequence]) -> bytes:
        return pickle.dumps([METHOD, step])

    def decode(self, data: bytes) -> None:
        pickle.loads(data)

    def sample(self, step: list[Sequence]) -> list[int]:
        tokens: list[int] = self._rng.integers(0, VOCABULARY, len(step)).tolist()
        return tokens

    def update(self, step: list[Sequence], tokens: list[int]) -> object:
        self._scheduler.postprocess(step, tokens)
        return [(sequence.seq_id, sequence.token_ids) for sequence in step if sequence.is_finished]

    def retire(self) -> None:
        self._scheduler.remove(self._new)
        self._new = []

    def close(self) -> None:
        """End the readers."""
        self.readers.close()
        self._events.clear()

    def _draw(self, lengths: list[int]) -> list[list[int]]:
        return [self._rng.integers(0, VOCABULARY, length).tolist() for length in lengths]

    def _add(self, prompts: list[list[int]]) -> list[Sequence]:
        """Add requests of different priorities."""
        made = [
            Sequence(
                prompt,
                priority=number % 3,
                max_tokens=1 << 30,
                stop_ids=frozenset((EOS, *STOPS)),
            )
            for number, prompt in enumerate(prompts)
        ]
        for sequence in made:
            self._scheduler.add(sequence)
        return made
