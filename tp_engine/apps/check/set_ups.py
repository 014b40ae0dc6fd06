"""The ways in which one request can run: alone, in a batch, with a cached prefix, ...

Those of the user's engine come first; each of ``OTHERS`` is another engine, with different options.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tp_engine.api.llm import LLM
from tp_engine.apps.check.answers import Answer

_TIER_GIB = 0.05
CHUNK = 32
_LEFT_IN_BLOCK = 6  # answer tokens that a sequence has when it needs its second block

ALONE, BATCH, CACHED, SEVERAL = "alone", "in a batch", "cached prefix", "several answers"
PREEMPTED_ANSWERS = "preempted decodes"


@dataclass(frozen=True, slots=True)
class Other:
    """A set-up with an engine of its own; ``changes`` are options, given those of the user.

    ``happened`` tells from the engine and its answers whether what it is about took place.  Each prompt runs in so many
    ``copies`` at once, and again alone if it ``repeats``; with ``is_of_blocks`` prompts and answers are as long as the
    KV blocks ask for (``Sizes.crossing``).
    """

    changes: Callable[[Mapping[str, Any], Sizes], dict[str, Any] | None]
    happened: Callable[[LLM, Sequence[Answer]], bool] = lambda _llm, _answers: True
    remedy: str = ""
    repeats: bool = False
    copies: int = 1
    is_of_blocks: bool = False


@dataclass(frozen=True, slots=True)
class Sizes:
    """The ``longest`` sequence, and the KV blocks of ``block_size`` tokens that a sequence needs in chunks of ``CHUNK``
    tokens, by ``blocks_for``."""

    longest: int
    block_size: int
    blocks_for: Callable[[int], int]

    @property
    def num_blocks(self) -> int:
        """Blocks of the longest sequence."""
        return self.blocks_for(self.longest)

    def crossing(self, num_prompt: int, max_tokens: int) -> tuple[int, int]:
        """The lengths of a prompt of at most ``num_prompt`` tokens, and of its answer: the prompt nearly fills a
        block, so that several fit into a pool which the answer of one fills."""
        return min(num_prompt, max(2, self.block_size - _LEFT_IN_BLOCK)), max(max_tokens, self.block_size + 8)


def _tight(options: Mapping[str, Any], sizes: Sizes) -> dict[str, Any]:
    """A cache with room for the longest sequence and little more."""
    blocks = {"num_gpu_blocks_override": sizes.num_blocks + 1, "kv_cache_memory_bytes": None}
    return {**blocks, "max_model_len": sizes.longest, **_chunks(options, sizes)}


def _preempted(options: Mapping[str, Any], sizes: Sizes) -> dict[str, Any]:
    no_tier = {"kv_offloading_size": 0.0, "kv_disk_path": None, "kv_disk_size": 0.0, "kv_offloading_codec": "none"}
    return {**_tight(options, sizes), "enable_prefix_caching": False, **no_tier}


def _preempted_answers(options: Mapping[str, Any], sizes: Sizes) -> dict[str, Any]:
    num_prompt, num_answer = sizes.crossing(sizes.longest, 0)
    longest = num_prompt + num_answer + 1
    num_blocks = max(sizes.blocks_for(longest), 2 * sizes.blocks_for(num_prompt)) + 1
    return {**_preempted(options, sizes), "max_model_len": longest, "num_gpu_blocks_override": num_blocks}


def _chunks(options: Mapping[str, Any], sizes: Sizes) -> dict[str, Any]:
    return {"max_num_batched_tokens": CHUNK, "max_num_seqs": 8, "cudagraph_prefill_capture_sizes": "none"}


def _tier(options: Mapping[str, Any], sizes: Sizes) -> dict[str, Any] | None:
    if options.get("kv_offloading_codec", "none") != "none":
        return None
    size = max(_TIER_GIB, options.get("kv_offloading_size", 0.0))
    return {**_tight(options, sizes), "enable_prefix_caching": True, "kv_offloading_size": size}


def _speculation(options: Mapping[str, Any], sizes: Sizes) -> dict[str, Any] | None:
    if options.get("speculative_config"):
        return {"speculative_config": None}
    return {"speculative_config": json.dumps({"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1})}


def _one_rank(options: Mapping[str, Any], sizes: Sizes) -> dict[str, Any] | None:
    return {"tensor_parallel_size": 1, "device_ids": None} if options.get("tensor_parallel_size", 1) > 1 else None


def was_cached(_llm: LLM, answers: Sequence[Answer]) -> bool:
    """Whether a prompt began with cached tokens."""
    return sum(one.num_cached_tokens for one in answers) > 0


OTHERS: Mapping[str, Other] = {
    "in chunks": Other(_chunks, remedy="--max-num-batched-tokens above the longest prompt"),
    "preempted": Other(
        _preempted,
        lambda llm, _answers: llm.engine.stats().num_preemptions > 0,
        remedy="more KV blocks, so that nothing is preempted",
        copies=2,
    ),
    PREEMPTED_ANSWERS: Other(
        _preempted_answers,
        lambda llm, _answers: llm.engine.stats().num_preempted_answers > 0,
        remedy="more KV blocks, so that nothing is preempted",
        copies=2,
        is_of_blocks=True,
    ),
    "after a tier": Other(_tier, was_cached, remedy="leave out --kv-offloading-size", repeats=True),
    "speculation on or off": Other(_speculation, remedy="leave out --speculative-config"),
    "one rank": Other(_one_rank, remedy="--all-reduce-backend nccl (GPUs) or gloo (CPUs)"),
    "graphs on or off": Other(
        lambda options, _sizes: {"enforce_eager": not options.get("enforce_eager", False)}, remedy="--enforce-eager"
    ),
}
