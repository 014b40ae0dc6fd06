"""Rounds in which the servers take turns, and the comparison of their answers.

A round asks every server for every workload, with prompts that no server has seen.  Its order moves on from round to
round, so that no server always follows the same one.  One more round before them is not counted.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from figures.engines import Ids, Server
from tp_engine.api.server_client import ServerClient
from tp_engine.apps.bench.serving.client import Target, send_all
from tp_engine.apps.bench.serving.metrics import tpot
from tp_engine.apps.bench.serving.traffic import Request
from tp_engine.apps.bench.workloads import SMALL_WORKLOADS, WORKLOADS, BenchWorkload

PER_TOKEN, FIRST, RATE = "ms per token", "ms to the first token", "tokens/s"
_SETTLE_S = 0.3  # OpenMP's threads spin for 0.2 s after their last work and would slow the next engine
_IDLE_S = 2.0
_SINGLES = 3  # runs of the one request in a round, of which the median counts
_COMPARED, _COMPARED_TOKENS, _TOP = 8, 32, 20
_WARM_UP_SEED = 1_000_000
_EXTRA = {"temperature": 0, "ignore_eos": True}


@dataclass(frozen=True)
class Cell:
    """What is measured of an engine: the values of its rounds, in ``unit``."""

    workload: str
    unit: str
    engine: str


Runs = dict[Cell, list[float]]


def rounds(servers: Sequence[Server], vocab_size: int, number: int, end_s: float, failures: dict[str, str]) -> Runs:
    """Up to ``number`` rounds; none begins that would not end before the monotonic time ``end_s``, but the first.  A
    server that fails is asked no more; ``failures`` gets the reason."""
    found: Runs = {}
    for _ in _round(servers, vocab_size, _WARM_UP_SEED, failures):
        pass
    longest_s = 0.0
    for index in range(number):
        began_s = time.monotonic()
        if index and began_s + longest_s > end_s:
            break
        first = index % len(servers)
        for cell, value in _round([*servers[first:], *servers[:first]], vocab_size, index * _SINGLES, failures):
            found.setdefault(cell, []).append(value)
        longest_s = max(longest_s, time.monotonic() - began_s)
    return {cell: values for cell, values in found.items() if cell.engine not in failures}


def _round(
    servers: Sequence[Server], vocab_size: int, seed: int, failures: dict[str, str]
) -> Iterator[tuple[Cell, float]]:
    for name in SMALL_WORKLOADS:
        for server in (one for one in servers if one.name not in failures):
            repeats = _SINGLES if name == "latency" else 1
            try:
                runs = [_ask(server, WORKLOADS[name](vocab_size, seed + repeat)) for repeat in range(repeats)]
            except RuntimeError as error:
                failures[server.name] = str(error)
                continue
            for unit in runs[0]:
                yield Cell(name, unit, server.name), median(run[unit] for run in runs)


def _ask(server: Server, workload: BenchWorkload) -> Mapping[str, float]:
    """Send all requests at once.  ``RuntimeError`` unless each answer has exactly the tokens that were asked for."""
    target = Target(base_url=server.url, endpoint="/v1/completions", model=server.model, extra_body=_EXTRA)
    requests = [Request(*one) for one in zip(workload.prompts, workload.max_tokens, strict=True)]
    answers, seconds = asyncio.run(send_all(target, requests, [0.0] * len(requests), None))
    time.sleep(_SETTLE_S)
    for request, answer in zip(requests, answers, strict=True):
        if not answer.success or answer.output_tokens != request.max_tokens:
            told = answer.error or f"{answer.output_tokens} tokens instead of {request.max_tokens}"
            raise RuntimeError(f"{workload.name}: {told}")
    if len(answers) == 1:
        return {PER_TOKEN: tpot(answers[0]) * 1e3, FIRST: answers[0].ttft * 1e3}
    return {RATE: workload.num_output_tokens / seconds}


def idle_shares(servers: Sequence[Server]) -> dict[str, float]:
    """The share of a core that each server uses while nobody asks it: what it takes from those whose turn it is."""
    before = [server.cpu_s() for server in servers]
    time.sleep(_IDLE_S)
    return {
        server.name: round((server.cpu_s() - began_s) / _IDLE_S, 3)
        for server, began_s in zip(servers, before, strict=True)
    }


def compare_answers(servers: Sequence[Server], vocab_size: int) -> list[dict[str, Any]]:
    """How the greedy answers of each peer differ from the first server's.

    In 16 bits engines round in different places, so a token may differ where the two best ones are nearly equal.
    ``largest_gap`` is what the first server says of the worst such place: its best token's log-probability less that of
    the peer's token.
    """
    ours, *peers = servers
    prompts = WORKLOADS["throughput"](vocab_size, _WARM_UP_SEED).prompts[:_COMPARED]
    own = [ours.answer(prompt, _COMPARED_TOKENS) for prompt in prompts]
    found = []
    for peer in peers:
        gaps = []
        for prompt, expected in zip(prompts, own, strict=True):
            got = peer.answer(prompt, _COMPARED_TOKENS)
            place = next((at for at, pair in enumerate(zip(expected, got, strict=True)) if pair[0] != pair[1]), None)
            if place is not None:
                gaps.append(_gap(ours, prompt + expected[:place], got[place]))
        entry = {"engine": peer.name, "answers": len(prompts), "equal": len(prompts) - len(gaps)}
        found.append(entry | {"largest_gap": round(max(gaps, default=0.0), 3)})
    return found


def _gap(server: Server, prompt: Ids, other: int) -> float:
    """By how much the next token's best log-probability exceeds that of ``other``; infinite if it is not near."""
    body = {"model": server.model, "prompt": prompt, "max_tokens": 1, "logprobs": _TOP, **_EXTRA}
    answer = ServerClient(server.url).post("/v1/completions", body | {"return_tokens_as_token_ids": True})
    top = answer["choices"][0]["logprobs"]["top_logprobs"][0]
    return float(max(top.values()) - top.get(f"token_id:{other}", -math.inf))
