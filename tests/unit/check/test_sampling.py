"""Draws and processed log-probabilities beside the oracle's logits: no alarm for what is right, each fault is found.

The engine here is a few lines of numpy, which draws from softmax by a seeded generator.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from tp_engine.apps.check import sampling
from tp_engine.apps.check.prompts import CheckPrompt
from tp_engine.apps.check.report import CheckStatus
from tp_engine.apps.check.sampling import (
    PENALTIES,
    SETTINGS,
    Draws,
    Reals,
    check_draws,
    check_processed,
    distribution,
    penalised_logits,
)

VOCAB, NUM_PENALISED = 203, 12
PROMPT = CheckPrompt("p", tuple(range(3, 40, 2)))

Edit = Callable[[dict[str, Any]], dict[str, Any]]


def logits_of(seed: int, spread: float) -> Reals:
    """(n, V): after the prompt and each token of an answer."""
    return np.random.default_rng(seed).normal(size=(NUM_PENALISED + 1, VOCAB)) * spread


def drawn(logits: Reals, seed: int, num_draws: int, edit: Edit = lambda setting: setting) -> Draws:
    """What a right engine draws, whose requests have been changed by ``edit``."""
    rng, counts = np.random.default_rng(seed), {}
    for name, setting in SETTINGS.items():
        own = edit(dict(setting))
        shares = distribution(penalised_logits(logits[0], PROMPT.token_ids, (), own), own)
        counts[name] = Counter(rng.choice(VOCAB, num_draws, p=shares / shares.sum()).tolist())
    answer: list[int] = []
    for place in range(NUM_PENALISED):
        answer.append(int(penalised_logits(logits[place], PROMPT.token_ids, answer, edit(dict(PENALTIES))).argmax()))
    return Draws(PROMPT, counts, tuple(answer))


@pytest.mark.parametrize(("spread", "error"), [(0.3, 1e-4), (1.0, 1e-4), (3.0, 1e-4), (1.0, 0.05), (3.0, 0.3)])
def test_right_draws_raise_no_alarm(spread: float, error: float) -> None:
    """Oracle: the generator; 40 engines, in float32 and with errors of logits as large as the bound."""
    for seed in range(40):
        exact = logits_of(seed, spread)
        own = exact + np.random.default_rng(seed + 1000).uniform(-error, error, exact.shape)
        found = check_draws(drawn(own, seed, 128), exact, error)
        assert found.status is CheckStatus.RIGHT, found.detail


def without(*names: str) -> Edit:
    return lambda setting: {name: value for name, value in setting.items() if name not in names}


# Fault -> how it changes a setting, and which settings it changes.
FAULTS: Mapping[str, tuple[Edit, tuple[str, ...]]] = {
    "every temperature doubled": (
        lambda one: {**one, "temperature": 2 * one.get("temperature", 0.5)}, tuple(SETTINGS)
    ),
    "top_k is one more": (lambda one: {**one, "top_k": one["top_k"] + 1} if "top_k" in one else one, ("top_k 5",)),
    "no top_p": (without("top_p"), ("top_p 0.6",)),
    "no min_p": (without("min_p"), ("min_p 0.2",)),
    "no repetition penalty": (without("repetition_penalty"), ("repetition_penalty 2", "penalties")),
    "no penalties of OpenAI's API": (without("presence_penalty", "frequency_penalty"), ("penalties",)),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_of_sampling_is_found(fault: str) -> None:
    """Oracle: the setting that was changed, in ten engines; 512 draws each."""
    edit, places = FAULTS[fault]
    num_found = 0
    for seed in range(10):
        exact = logits_of(seed, 1.5)
        if fault == "no penalties of OpenAI's API":
            exact[1:] = exact[0]  # the same tokens again
        found = check_draws(drawn(exact, seed, 512, edit), exact, 1e-4)
        assert found.status is CheckStatus.RIGHT or found.place in places, found
        num_found += found.status is CheckStatus.WRONG
    assert num_found >= 8
    if fault != "no repetition penalty":  # which some prompts' tokens are too unlikely to show
        assert num_found == 10


@pytest.mark.parametrize("kind", ["one token", "another row", "shifted by one id"])
def test_draws_that_ignore_the_distribution_are_found(kind: str) -> None:
    """Oracle: the same noise for each draw, the distribution of another prompt, ids of a neighbour."""
    exact = logits_of(3, 1.5)
    draws = drawn(logits_of(4, 1.5) if kind == "another row" else exact, 3, 128)
    if kind == "one token":
        draws = Draws(PROMPT, {name: {max(one, key=one.__getitem__): 128} for name, one in draws.counts.items()}, ())
    elif kind == "shifted by one id":
        moved = {name: {(t + 1) % VOCAB: count for t, count in one.items()} for name, one in draws.counts.items()}
        draws = Draws(PROMPT, moved, ())
    assert check_draws(draws, exact, 1e-4).status is CheckStatus.WRONG


@pytest.mark.parametrize("fault", ["none", *list(FAULTS)[:5]])
def test_processed_log_probabilities(fault: str) -> None:
    """Oracle: the formulas of the filters; what an engine with a fault would show is off in that setting."""
    exact, shown = logits_of(7, 1.5)[0], {}
    edit, places = FAULTS.get(fault, (lambda one: one, ()))
    for name, setting in SETTINGS.items():
        own = edit(dict(setting))
        shares = distribution(penalised_logits(exact, PROMPT.token_ids, (), own), own)
        best = np.argsort(-shares)[:5]
        shown[name] = {int(one): math.log(shares[one]) if shares[one] else -math.inf for one in best}
    found = check_processed(shown, PROMPT, exact, 1e-4)
    if fault == "none":
        assert found.status is CheckStatus.RIGHT, found
    else:
        assert found.status is CheckStatus.WRONG and found.place.startswith(places), found


def test_the_tail_of_a_binomial_count() -> None:
    """Oracle: by hand: ten throws of a coin; and a share of none or all."""
    assert sampling._tail(10, 10, 0.5, 0.5) == pytest.approx(2.0**-10)
    assert sampling._tail(1, 10, 0.5, 0.6) == pytest.approx(11 * 2.0**-10)
    assert sampling._tail(5, 10, 0.4, 0.6) == 1.0
    assert sampling._tail(1, 10, 0.0, 0.0) == sampling._tail(9, 10, 1.0, 1.0) == 0.0
