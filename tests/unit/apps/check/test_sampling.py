"""Draws and processed log-probabilities beside the oracle's logits: no alarm for what is right, each fault is found.

The engine here is a few lines of numpy, which draws from softmax by a seeded generator.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tp_engine.apps.check import sampling
from tp_engine.apps.check.prompts import CheckPrompt
from tp_engine.apps.check.report import CheckStatus
from tp_engine.apps.check.sampling import (
    FEW,
    FEW_BIAS,
    FEW_PENALTIES,
    FEW_SHARES,
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
    likeliest = np.argsort(-logits[0])[: len(FEW_SHARES)].tolist()
    level = float(np.logaddexp.reduce(logits[0]))
    bias = {
        token: FEW_BIAS + math.log(share) - float(logits[0][token]) + level
        for token, share in zip(likeliest, FEW_SHARES, strict=True)
    }
    told = Draws(PROMPT, {}, (), (), bias)
    for name, setting in {**SETTINGS, **FEW}.items():
        own = edit(dict(setting))
        row = told.biased(logits[0]) if name in FEW else logits[0]
        shares = distribution(penalised_logits(row, PROMPT.token_ids, (), own), own)
        counts[name] = Counter(rng.choice(VOCAB, num_draws, p=shares / shares.sum()).tolist())
    answers: list[list[int]] = [[], []]
    biased = np.stack([told.biased(row) for row in logits])
    for answer, given, setting in zip(answers, (logits, biased), (PENALTIES, FEW_PENALTIES), strict=True):
        for place in range(NUM_PENALISED):
            own = edit(dict(setting))
            answer.append(int(penalised_logits(given[place], PROMPT.token_ids, answer, own).argmax()))
    return Draws(PROMPT, counts, tuple(answers[0]), tuple(answers[1]), bias)


@pytest.mark.parametrize(("spread", "error"), [(0.3, 1e-4), (1.0, 1e-4), (3.0, 1e-4), (1.0, 0.05), (3.0, 0.3)])
def test_right_draws_raise_no_alarm(spread: float, error: float) -> None:
    """Oracle: the generator; 40 engines, in float32 and with errors of logits as large as the bound."""
    for seed in range(40):
        exact = logits_of(seed, spread)
        own = exact + np.random.default_rng(seed + 1000).uniform(-error, error, exact.shape)
        found = check_draws(drawn(own, seed, 128), exact, error, exact)
        assert found.status is CheckStatus.RIGHT, found.detail


def without(*names: str) -> Edit:
    return lambda setting: {name: value for name, value in setting.items() if name not in names}


# Fault -> how it changes a setting, and which settings it changes.
FAULTS: Mapping[str, tuple[Edit, tuple[str, ...]]] = {
    "every temperature doubled": (
        lambda one: {**one, "temperature": 2 * one.get("temperature", 0.5)}, (*SETTINGS, *FEW)
    ),
    "top_k is one more": (lambda one: {**one, "top_k": one["top_k"] + 1} if "top_k" in one else one,
                         ("top_k 5", "top_k 3 of few")),
    "no top_p": (without("top_p"), ("top_p 0.6", "top_p 0.55 of few")),
    "no min_p": (without("min_p"), ("min_p 0.2", "min_p 0.4 of few")),
    "presence is rewarded": (
        lambda one: {**one, "presence_penalty": -one["presence_penalty"]} if "presence_penalty" in one else one,
        ("penalties",),
    ),
    "no frequency penalty": (without("frequency_penalty"), ("penalties",)),
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
        if fault in ("no penalties of OpenAI's API", "presence is rewarded", "no frequency penalty"):
            exact[1:] = exact[0]  # the same tokens again
        found = check_draws(drawn(exact, seed, 512, edit), exact, 1e-4, exact)
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


def test_a_nucleus_that_is_one_token_short_is_found() -> None:
    """Oracle: the token that reaches top_p is never drawn; 128 draws of few tokens show it."""
    exact = logits_of(5, 1.5)
    draws = drawn(exact, 5, 128)
    name = "top_p 0.55 of few"
    last = min(draws.counts[name], key=draws.biased(exact[0]).__getitem__)
    kept = {token: count for token, count in draws.counts[name].items() if token != last}
    assert len(kept) == 1
    short = {**draws.counts, name: dict.fromkeys(kept, 128)}
    found = check_draws(replace(draws, counts=short), exact, 1e-4, exact)
    assert found.status is CheckStatus.WRONG and found.place == name


@pytest.mark.parametrize(
    "fault", ["none", "every temperature doubled", "top_k is one more", "no top_p", "no min_p", "no repetition penalty"]
)
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
