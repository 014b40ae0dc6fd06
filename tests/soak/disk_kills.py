"""Engines with a disk tier that are killed at random moments, one after the other on one directory.

::

    life    start | says again what it must know | conversations go on, others begin, pauses |
                                                 random moment of all this: SIGKILL to all ranks

Each answer is a line in a file before the next prompt is sent, so that what a life had said is known after its end.  A
conversation's prompts are beginnings of one row of tokens; what is generated is not part of them.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tests.ranks.warm_ranks import started_ranks, warm_ranks
from tp_engine import LLM, SamplingParams
from tp_engine.config import EngineConfig
from tp_engine.engine.start import serve_rank
from tp_engine.system import env
from tp_engine.system.units import GIB

MODEL: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 4, "head_dim": 64}
_BLOCK_SIZE, _FIRST_TOKENS, _MORE_TOKENS, _NUM_TURNS = 16, 40, 24, 9
_BLOCK_BYTES = 2 * 2 * _BLOCK_SIZE * 4 * 64 * 4  # layers, K and V, tokens, heads, elements, bytes
_NUM_KNOWN = 12  # conversations that are asked again
_OPEN = 4  # conversations that a life has at least
_EARLY_SHARE, _EARLY_S, _LATE_S = 0.2, 1.0, 2.4
_START_S = 60.0
_OLD_S = 1.0
_OPTIONS: dict[str, Any] = {
    "device": "cpu", "dtype": "float32", "max_model_len": 288, "num_gpu_blocks_override": 48, "max_num_seqs": 4,
    "max_num_batched_tokens": 128, "block_size": _BLOCK_SIZE,
}  # fmt: skip
_DISK: dict[str, Any] = {"kv_offloading_size": 64.5 * _BLOCK_BYTES / GIB, "kv_disk_size": 1024.5 * _BLOCK_BYTES / GIB}


@dataclass
class DiskKills:
    """The lives so far.  ``said`` has the answer to each prompt, (conversation, turn), ``known`` the last turn of each
    conversation that was answered more than a second before a kill."""

    folder: Path
    scratch: Path
    num_ranks: int
    seed: int
    said: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    known: dict[int, int] = field(default_factory=dict)
    count: Counter[str] = field(default_factory=Counter)

    def options(self, **more: Any) -> dict[str, Any]:
        """Those of an engine."""
        return {"model": str(self.folder), "tensor_parallel_size": self.num_ranks, **_OPTIONS, **more}


def disk_kills(
    folder: Path, scratch: Path, num_kills: int, *, num_ranks: int, seed: int, least_share: float = 0.95
) -> Counter[str]:
    """Kill ``num_kills`` engines; counts of what happened.  ``folder`` has a checkpoint of ``MODEL``.

    Raises ``AssertionError`` for a token that differs from one of an engine without tiers, or if less than
    ``least_share`` of the blocks that were cached for more than a second before a kill is found after it.
    """
    kills, rng = DiskKills(folder, scratch, num_ranks, seed), random.Random(seed)
    for life in range(num_kills + 1):
        is_last = life == num_kills
        early_s = rng.uniform(0, _EARLY_S) if rng.random() < _EARLY_SHARE and not is_last else None
        _live(
            kills, life, early_s, 0.0 if is_last else rng.uniform(0, _LATE_S), until="checked" if is_last else "ready"
        )
    count = kills.count
    count["wrong answers"] = _num_wrong(kills)
    assert not count["wrong answers"], f"an engine with a disk tier says something else: {count}"
    share = count["reused blocks"] / max(1, count["blocks that should be there"])
    assert share >= least_share, f"only {share:.1%} of the blocks older than {_OLD_S:g} s were reused: {count}"
    return count


def _live(kills: DiskKills, life: int, early_s: float | None, late_s: float, *, until: str) -> None:
    """Run one engine, and kill it ``late_s`` after it said ``until``, or ``early_s`` after its start."""
    lines = kills.scratch / f"life-{life}"
    lines.touch()
    again = sorted(kills.known.items())[-_NUM_KNOWN:]
    options = kills.options(kv_disk_path=str(kills.scratch / "kv"), **_DISK)
    with started_ranks(kills.num_ranks, talk, options, life, again, str(lines), kills.seed + life) as (ranks, log):
        started_s = time.monotonic()
        if early_s is None:
            while not any(one[0] == until for one in _read(lines)):
                text = log.read_text(encoding="utf-8", errors="replace")
                assert all(rank.is_alive() for rank in ranks), f"life {life} ended by itself:\n{text[-4000:]}"
                assert time.monotonic() < started_s + _START_S, f"life {life} is not {until}:\n{text[-4000:]}"
                time.sleep(0.01)
            time.sleep(late_s)
        else:
            time.sleep(early_s)
        killed_s = time.monotonic()
        for rank in ranks:
            rank.kill()
    _learn(kills, _read(lines), dict(again), killed_s)


def _learn(kills: DiskKills, lines: list[list[Any]], again: dict[int, int], killed_s: float) -> None:
    count = kills.count
    count["kills"] += 1
    count["kills during a start"] += not lines
    for kind, when_s, *rest in lines:
        if kind not in ("again", "new"):
            continue
        conversation, turn, num_cached, tokens = rest
        if kind == "again":
            assert again[conversation] == turn
            count["blocks that should be there"] += (len(prompt(conversation, turn)) - 1) // _BLOCK_SIZE
            count["reused blocks"] += num_cached // _BLOCK_SIZE
        before = kills.said.setdefault((conversation, turn), tokens)
        count["answers"] += 1
        count["answers that changed"] += before != tokens
        if when_s < killed_s - _OLD_S:
            kills.known[conversation] = max(turn, kills.known.get(conversation, 0))
    assert not count["answers that changed"], f"an answer is not what it was in an earlier life: {count}"


def _num_wrong(kills: DiskKills) -> int:
    """How many answers are not those of an engine without tiers."""
    asked, answers = kills.scratch / "asked.json", kills.scratch / "answers.json"
    asked.write_text(json.dumps(sorted(kills.said)))
    warm_ranks(kills.num_ranks, answer_all, kills.options(num_gpu_blocks_override=1024), str(asked), str(answers))
    expected = json.loads(answers.read_text())
    return sum(kills.said[key] != tokens for key, tokens in zip(sorted(kills.said), expected, strict=True))


def _read(lines: Path) -> list[list[Any]]:
    """The whole lines."""
    return [json.loads(line) for line in lines.read_bytes().split(b"\n")[:-1]]


# What runs on the ranks.


def prompt(conversation: int, turn: int) -> list[int]:
    """The token ids of a turn's prompt."""
    tokens: list[int] = (
        np.random.default_rng(conversation).integers(3, 200, _FIRST_TOKENS + turn * _MORE_TOKENS).tolist()
    )
    return tokens


def talk(options: dict[str, Any], life: int, again: list[tuple[int, int]], lines: str, seed: int) -> None:
    """Say ``again`` what is known, then go on for ever; each answer and the kind of it is a line of ``lines``."""
    if not _is_first(options):
        return
    rng, log = random.Random(seed), os.open(lines, os.O_WRONLY | os.O_APPEND)

    def say(*line: Any) -> None:
        os.write(log, json.dumps(line).encode() + b"\n")

    with LLM(**options) as llm:
        say("ready", time.monotonic())
        for conversation, turn in again:
            _ask(llm, "again", [(conversation, turn)], say)
        say("checked", time.monotonic())
        running = {conversation: turn + 1 for conversation, turn in again if turn + 1 < _NUM_TURNS}
        names = itertools.count(life * 1000)
        while True:
            while len(running) < _OPEN:
                running[next(names)] = 0
            chosen = rng.sample(sorted(running), rng.randint(1, 3))
            _ask(llm, "new", [(one, running[one]) for one in chosen], say)
            for one in chosen:
                running[one] += 1
                if running[one] == _NUM_TURNS:
                    del running[one]
            _pause(llm, rng.choice((0.0, 0.005, 0.03, 0.1)))


def answer_all(options: dict[str, Any], asked: str, answers: str) -> None:
    """The tokens of each prompt."""
    if not _is_first(options):
        return
    with LLM(**options) as llm:
        prompts = [prompt(conversation, turn) for conversation, turn in json.loads(Path(asked).read_text())]
        outputs = llm.generate(prompts, _params(), use_tqdm=False)
        Path(answers).write_text(json.dumps([list(output.outputs[0].token_ids) for output in outputs]))


def _is_first(options: dict[str, Any]) -> bool:
    """Whether this is rank 0; the others serve it until its engine ends."""
    launched = env.launched_rank()
    assert launched is not None
    if launched.rank > 0:
        serve_rank(EngineConfig(**options))
    return launched.rank == 0


def _params() -> SamplingParams:
    return SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)


def _ask(llm: LLM, kind: str, turns: list[tuple[int, int]], say: Any) -> None:
    outputs = llm.generate([prompt(*one) for one in turns], _params(), use_tqdm=False)
    for one, output in zip(turns, outputs, strict=True):
        say(kind, time.monotonic(), *one, output.num_cached_tokens, list(output.outputs[0].token_ids))


def _pause(llm: LLM, duration_s: float) -> None:
    """Do what a server does while it has no requests."""
    until_s = time.monotonic() + duration_s
    while time.monotonic() < until_s:
        time.sleep(0.01)
