"""Steps that compute a prompt, for ``bench_steps --prompts``: alone, and beside requests that decode."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

_WARM_UP = 4


def compare_prompts(folder: Path, options: Mapping[str, Any], sizes: list[str], *shape: int) -> list[dict[str, Any]]:
    """The figures of an engine for each of ``sizes`` (values of ``cudagraph_prefill_capture_sizes``), one after the
    other.

    ``shape`` is the number of requests that decode, of tokens of a prompt, and of steps.  ``equal_tokens`` is the share
    of the greedy tokens that equals the first engine's: padding may make a library choose a product that rounds
    differently.
    """
    found = [_measure(folder, {**options, "cudagraph_prefill_capture_sizes": one}, *shape) for one in sizes]
    tokens = [one.pop("tokens") for one in found]
    for one, own in zip(found, tokens, strict=True):
        one["equal_tokens"] = sum(a == b for a, b in zip(own, tokens[0], strict=True)) / len(own)
    return found


def _measure(
    folder: Path, options: Mapping[str, Any], batch_size: int, prompt_len: int, repeats: int
) -> dict[str, Any]:
    """The figures of one engine, and the first tokens of the prompts that ran alone."""
    from tp_engine import LLM

    num_tokens = 2 * repeats + batch_size + 32  # the requests that decode outlive all that is measured
    own = {"max_model_len": prompt_len + num_tokens, "max_num_seqs": batch_size + 8, "enable_prefix_caching": False}
    started = time.perf_counter()
    with LLM(str(folder), **(own | dict(options))) as llm:
        start_s = time.perf_counter() - started
        vocab_size = json.loads((folder / "config.json").read_text(encoding="utf-8"))["vocab_size"]
        requests = _Requests(llm, vocab_size, prompt_len)
        alone, tokens = requests.alone(_WARM_UP + repeats)
        requests.start_decoding(batch_size, num_tokens)
        decodes, mixed = requests.steps(repeats, has_prompts=False), requests.steps(repeats, has_prompts=True)
        graph_bytes = llm.engine.report().ranks[0].memory["cuda_graphs"]
    return {
        "sizes": options["cudagraph_prefill_capture_sizes"],
        "ms_to_first_token": round(statistics.median(alone[_WARM_UP:]) * 1e3, 4),
        "decode_step_ms": round(decodes * 1e3, 4),
        "mixed_step_ms": round(mixed * 1e3, 4),
        "start_s": round(start_s, 2),
        "graph_mib": round(graph_bytes / 2**20, 1),
        "tokens": tokens,
    }


class _Requests:
    """Greedy requests with random prompts, the same for each engine."""

    def __init__(self, llm: Any, vocab_size: int, prompt_len: int) -> None:
        self._llm, self._vocab_size, self._prompt_len = llm, vocab_size, prompt_len
        self._rng, self._count = np.random.default_rng(0), 0

    def alone(self, count: int) -> tuple[list[float], list[int]]:
        """Seconds until the first token of each of ``count`` prompts, and these tokens."""
        times, tokens = [], []
        for _ in range(count):
            started = time.perf_counter()
            self._add(1)
            outputs: list[Any] = []
            while self._llm.engine.has_unfinished:
                outputs += self._llm.engine.step()
            times.append(time.perf_counter() - started)
            tokens += [token for output in outputs for token in output.new_token_ids]
        return times, tokens

    def start_decoding(self, count: int, num_tokens: int) -> None:
        """Let ``count`` requests decode, each for ``num_tokens`` tokens."""
        for _ in range(count):
            self._add(num_tokens)
        for _ in range(_WARM_UP + count):
            self._llm.engine.step()

    def steps(self, count: int, *, has_prompts: bool) -> float:
        """Seconds per step, results included; in each a new prompt begins if ``has_prompts``."""
        started = time.perf_counter()
        for _ in range(count):
            if has_prompts:
                self._add(1)
            self._llm.engine.step()
        return (time.perf_counter() - started) / count

    def _add(self, num_tokens: int) -> None:
        from tp_engine import SamplingParams

        prompt = self._rng.integers(3, self._vocab_size, self._prompt_len).tolist()
        params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=num_tokens)
        self._count += 1
        self._llm.engine.add_request(self._llm.input_processor.process(prompt, params, request_id=str(self._count)))
