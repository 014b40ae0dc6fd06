"""Is a token drawn from the distribution that its request asks for?

::

    draws        seeded ones of a prompt's next token: how many fall among the likeliest 1, 2, 4, ... tokens; also
                 where a bias leaves a few tokens, since one more or less at a filter's limit shows only there
    penalties    greedy answers: each token is the likeliest after penalties for those before it
    processed    log-probabilities as the engine shows them after temperature and filters

All are compared with the logits of the oracle, of which temperature and filters are computed here, in float64.  Where
the engine rounds, its logits may differ from the oracle's, and so may what a filter leaves; the expected share of a set
of tokens is an interval then.  A count is wrong if a binomial variable of the interval's nearest share would be as far
off with a probability below ``FALSE_ALARM``, divided by the number of comparisons.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from tp_engine.apps.check.answers import ALTERNATIVES
from tp_engine.apps.check.prompts import CheckPrompt
from tp_engine.apps.check.report import CheckFinding
from tp_engine.requests.outputs import RequestOutput

FALSE_ALARM = 1e-6
"""How likely all draws together raise an alarm where there is no fault."""

SETTINGS: Mapping[str, Mapping[str, float]] = {
    "temperature 0.3": {"temperature": 0.3},
    "temperature 1.5": {"temperature": 1.5},
    "top_k 5": {"temperature": 1.0, "top_k": 5},
    "top_p 0.6": {"temperature": 1.0, "top_p": 0.6},
    "min_p 0.2": {"temperature": 0.8, "min_p": 0.2},
    "repetition_penalty 2": {"temperature": 0.6, "repetition_penalty": 2.0},
}
# Filters where a bias gives the likeliest tokens these shares: each limit lies between two of them.
FEW: Mapping[str, Mapping[str, float]] = {
    "top_k 3 of few": {"temperature": 1.0, "top_k": 3},
    "top_p 0.55 of few": {"temperature": 1.0, "top_p": 0.55},
    "min_p 0.4 of few": {"temperature": 1.0, "min_p": 0.4},
}
FEW_SHARES = (0.4, 0.27, 0.21, 0.12)
FEW_BIAS, _MOST_BIAS = 30.0, 100.0
# Of all tokens, and of few: without the repetition penalty, which outweighs the others.
FEW_PENALTIES: Mapping[str, float] = {"presence_penalty": 0.9, "frequency_penalty": 0.4}
PENALTIES: Mapping[str, float] = {"presence_penalty": 0.9, "frequency_penalty": 0.4, "repetition_penalty": 1.2}
PENALISED, PROCESSED = "penalties", "processed logprobs"
_LIKELIEST = "the likeliest token"
_NUM_PENALISED = 12
_MOST_PROMPT = 64
_BLOCK = 16  # KV blocks have multiples of so many tokens
_SEED = 46

Reals: TypeAlias = npt.NDArray[np.float64]
Generate: TypeAlias = Callable[..., list[RequestOutput]]
"""``LLM.generate`` with the fields of ``SamplingParams`` as a mapping."""


@dataclass(frozen=True, slots=True)
class Draws:
    """What an engine drew after ``prompt``: by setting how often each token came; a greedy answer with ``PENALTIES``,
    and one of ``few`` tokens, empty without a ``bias``, which is theirs (by token)."""

    prompt: CheckPrompt
    counts: Mapping[str, Mapping[int, int]]
    penalised: tuple[int, ...]
    few: tuple[int, ...] = ()
    bias: Mapping[int, float] = field(default_factory=dict)

    @property
    def sequences(self) -> list[tuple[int, ...]]:
        """What the oracle scores: both answers."""
        return [(*self.prompt.token_ids, *one) for one in (self.penalised, self.few)]

    def biased(self, logits: Reals) -> Reals:
        """``logits`` (V,) with the bias."""
        found = logits.copy()
        found[list(self.bias)] += list(self.bias.values())
        return found


Processed: TypeAlias = Mapping[str, Mapping[int, float]]
"""By setting the log-probabilities of a prompt's next token, as an engine shows them after temperature and filters."""


def prompt_of(prompts: Sequence[CheckPrompt]) -> CheckPrompt:
    """The prompt that is drawn after: the beginning of the first one, whose end lies within a KV block, so that
    each of several answers needs a copy of it."""
    first = prompts[0].token_ids[:_MOST_PROMPT]
    behind_middle = (len(first) - 1 - _BLOCK // 2) % _BLOCK
    return CheckPrompt(prompts[0].name, first[: max(2, len(first) - behind_middle)])


def draw(generate: Generate, prompt: CheckPrompt, num_draws: int) -> Draws:
    """Draw so often in each of ``SETTINGS``, with seeds, and answer greedily with penalties; no request finds a cached
    prefix, whose faults other set-ups show."""
    given = {"max_tokens": 1, "ignore_eos": True, "detokenize": False, "seed": _SEED, "n": num_draws}
    bias = _bias(generate, prompt)
    settings = {**SETTINGS, **{name: {**one, "logit_bias": bias} for name, one in FEW.items() if bias}}
    asked = [{**given, **setting, "cache_salt": f"check {name}"} for name, setting in settings.items()]
    greedy = {"temperature": 0.0, "n": 1, "max_tokens": _NUM_PENALISED, "cache_salt": f"check {PENALISED}"}
    asked += [{**given, **PENALTIES, **greedy}, {**given, **FEW_PENALTIES, **greedy, "logit_bias": bias}]
    *drawn, penalised, of_few = generate([list(prompt.token_ids)] * len(asked), asked, use_tqdm=False)
    counts = [Counter(one.token_ids[0] for one in output.outputs) for output in drawn]
    few = tuple(of_few.outputs[0].token_ids) if bias else ()
    return Draws(prompt, dict(zip(settings, counts, strict=True)), tuple(penalised.outputs[0].token_ids), few, bias)


def _bias(generate: Generate, prompt: CheckPrompt) -> dict[int, float]:
    """The bias with which the likeliest tokens have ``FEW_SHARES``, by the engine's own log-probabilities; none if
    these are not numbers.  The oracle's logits tell what it really makes."""
    given = {"max_tokens": 1, "ignore_eos": True, "detokenize": False, "temperature": 0.0, "logprobs": ALTERNATIVES}
    [output] = generate([list(prompt.token_ids)], [{**given, "cache_salt": "check few"}], use_tqdm=False)
    row = (output.outputs[0].logprobs or [{}])[0]
    known = sorted(((one.logprob, token) for token, one in row.items()), reverse=True)[: len(FEW_SHARES)]
    found = {
        token: FEW_BIAS + math.log(share) - value for share, (value, token) in zip(FEW_SHARES, known, strict=False)
    }
    is_usable = len(found) == len(FEW_SHARES) and all(abs(one) <= _MOST_BIAS for one in found.values())
    return found if is_usable else {}


def show_processed(generate: Generate, prompt: CheckPrompt) -> Processed:
    """Ask an engine that shows processed log-probabilities for those of the next token."""
    given = {"max_tokens": 1, "ignore_eos": True, "detokenize": False, "seed": _SEED, "logprobs": ALTERNATIVES}
    outputs = generate(
        [list(prompt.token_ids)] * len(SETTINGS), [{**given, **one} for one in SETTINGS.values()], use_tqdm=False
    )
    rows = [(output.outputs[0].logprobs or [{}])[0] for output in outputs]
    return {name: {token: one.logprob for token, one in row.items()} for name, row in zip(SETTINGS, rows, strict=True)}


def penalised_logits(
    logits: Reals, prompt: Sequence[int], generated: Sequence[int], setting: Mapping[str, Any]
) -> Reals:
    """``logits`` (V,) after the penalties of ``setting``: repetition as in transformers, the others as in
    OpenAI's API."""
    found = logits.copy()
    seen = np.unique([*prompt, *generated]).astype(np.int64)
    repetition = float(setting.get("repetition_penalty", 1.0))
    found[seen] = np.where(found[seen] > 0, found[seen] / repetition, found[seen] * repetition)
    for token, count in Counter(generated).items():
        found[token] -= count * setting.get("frequency_penalty", 0.0) + setting.get("presence_penalty", 0.0)
    return found


def distribution(logits: Reals, setting: Mapping[str, float], slack: float = 0.0) -> Reals:
    """The probabilities (V,) of ``logits`` after temperature, top_k, top_p and min_p.

    With ``slack`` filters leave more, or less if it is negative: as if each logit were so much further from a limit.
    """
    scaled, slack = logits / setting["temperature"], slack / setting["temperature"]
    order = np.argsort(-scaled, kind="stable")
    ranked = scaled[order]
    keep = np.ones(len(ranked), np.bool_)
    if "top_k" in setting:
        limit = ranked[int(setting["top_k"]) - 1]
        keep &= (ranked >= limit - slack) if slack >= 0 else (ranked > ranked[int(setting["top_k"])] - slack)
    weights = np.exp(ranked - ranked[0])
    if "top_p" in setting:
        sums = np.concatenate(([0.0], np.cumsum(weights))) / weights.sum()
        num_before = np.searchsorted(-ranked, -(ranked + slack)) - (slack < 0) if slack else np.arange(len(ranked))
        before = sums[num_before]  # of the tokens that are likelier in any case, or that may be
        keep &= before / (before + (1 - before) * math.exp(slack)) < setting["top_p"]
    if "min_p" in setting:
        keep &= ranked - ranked[0] >= math.log(setting["min_p"]) - slack
    keep[0] = True
    found = np.zeros(len(logits))
    found[order[keep]] = weights[keep] / weights[keep].sum()
    return found


def check_draws(draws: Draws, logits: Reals, error: float, of_few: Reals | None = None) -> CheckFinding:
    """The finding on draws and penalties.  ``logits`` (n, V) are the oracle's after the prompt and each token of
    the greedy answer, and ``of_few`` of that of few tokens; those of the engine may be off by ``error``."""
    worst, compared, num_draws, outside = (1.0, "", ""), 0, 0, ""
    sets = list(_sets(draws, logits[0], error))
    for setting, what, count, total, low, high in sets:
        num_draws += total if what == _LIKELIEST else 0
        compared += 1
        chance = _tail(count, total, low, high)
        if high == 0.0 and count:
            outside = f"{setting}: {count} of {total} draws are tokens that the filter leaves out"
        if chance < worst[0]:
            told = (
                f"{setting}: {what} came in {count} of {total} draws, {low * total:.1f} to {high * total:.1f} expected"
            )
            worst = chance, setting, told
    late = _penalty_lapse(draws, logits, error, draws.penalised, PENALTIES)
    if late is None and of_few is not None:
        biased = np.stack([draws.biased(row) for row in of_few])
        late = _penalty_lapse(draws, biased, error, draws.few, FEW_PENALTIES)
    detail = f"{num_draws} draws in {len(draws.counts)} settings, {compared} counts, and greedy answers with penalties"
    limit = FALSE_ALARM / max(1, compared)
    numbers = {"draws": float(num_draws), "chance": worst[0]}
    meaning = "requests are not drawn from the distribution that they ask for, though logits may be right"
    remedy = "--bisect; --enforce-eager; compare with temperature 0, which draws nothing"
    if outside or worst[0] < limit:
        return CheckFinding.wrong(
            "sampling", f"{detail}: {outside or worst[2]}", place=outside.partition(":")[0] or worst[1],
            meaning=meaning, remedy=remedy, numbers=numbers,
        )  # fmt: skip
    if late is not None:
        return CheckFinding.wrong(
            "sampling", f"{detail}: {late}", place=PENALISED, meaning=meaning, remedy=remedy, numbers=numbers
        )
    return CheckFinding.right("sampling", f"{detail}: as expected (false alarms: {FALSE_ALARM:g})", numbers=numbers)


def _sets(draws: Draws, logits: Reals, error: float) -> Iterator[tuple[str, str, int, int, float, float]]:
    """For each setting and set of tokens: how many draws of how many fell into it, and the least and most likely
    share."""
    for name, counts in draws.counts.items():
        setting = SETTINGS.get(name) or FEW[name]
        own = penalised_logits(logits, draws.prompt.token_ids, (), setting)
        if name in FEW:
            own = draws.biased(own)
        off = error * max(1.0, float(setting.get("repetition_penalty", 1.0)))
        shares = [distribution(own, setting, slack) for slack in (0.0, 2 * off, -2 * off)]
        total, shift = sum(counts.values()), 2 * off / setting["temperature"]
        tokens, times = np.array(list(counts), np.int64), np.array(list(counts.values()))
        for what, chosen in _chosen(own, draws.prompt.token_ids):
            found = [float(one[chosen].sum()) for one in shares]
            low, high = _shifted(min(found), -shift), _shifted(max(found), shift)
            yield name, what, int(times[chosen[tokens]].sum()), total, low, high
        yield name, "others", int(times[shares[1][tokens] == 0].sum()), total, 0.0, 0.0


def _chosen(logits: Reals, prompt: Sequence[int]) -> Iterator[tuple[str, npt.NDArray[np.bool_]]]:
    """Sets of tokens: the likeliest 1, 2, 4, ..., and those of the prompt, whose logits a penalty changes."""
    order, size = np.argsort(-logits, kind="stable"), 1
    while size < len(order):
        yield _LIKELIEST if size == 1 else f"the likeliest {size} tokens", np.isin(np.arange(len(order)), order[:size])
        size *= 2
    yield "tokens of the prompt", np.isin(np.arange(len(order)), prompt)


def _shifted(share: float, shift: float) -> float:
    """The share of a set whose logits rise by ``shift`` against those of all others."""
    if share <= 0.0 or share >= 1.0:
        return min(1.0, max(0.0, share))
    return share / (share + (1 - share) * math.exp(-shift))


def _tail(count: int, total: int, low: float, high: float) -> float:
    """How likely ``count`` of ``total``, or one further off, is if the share is the nearest of the interval."""
    if low * total <= count <= high * total:
        return 1.0
    share = low if count < low * total else high
    if share in (0.0, 1.0):
        return 0.0
    counts = np.arange(total + 1)
    logs = np.array([math.lgamma(total + 1) - math.lgamma(one + 1) - math.lgamma(total - one + 1) for one in counts])
    logs += counts * math.log(share) + (total - counts) * math.log1p(-share)
    far = counts <= count if count < low * total else counts >= count
    return float(np.exp(logs[far]).sum())


def _penalty_lapse(
    draws: Draws, logits: Reals, error: float, answer: Sequence[int], setting: Mapping[str, float]
) -> str | None:
    """Which token of a greedy answer is not the likeliest after penalties, if one is not."""
    for place, token in enumerate(answer):
        own = penalised_logits(logits[place].astype(np.float64), draws.prompt.token_ids, answer[:place], setting)
        lapse = float(own.max() - own[token])
        if lapse > 2 * error * setting.get("repetition_penalty", 1.0):
            return f"token {place} of the penalised answer is {lapse:.2g} below the likeliest one"
    return None


def check_processed(processed: Processed, prompt: CheckPrompt, logits: Reals, error: float) -> CheckFinding:
    """The finding on processed log-probabilities; ``logits`` (V,) are the oracle's, as for ``check_draws``."""
    largest, where, compared = 0.0, "", 0
    for name, row in processed.items():
        setting = SETTINGS[name]
        own = penalised_logits(logits, prompt.token_ids, (), setting)
        off = error * max(1.0, float(setting.get("repetition_penalty", 1.0)))
        loose, tight = distribution(own, setting, 2 * off), distribution(own, setting, -2 * off)
        bound = 2 * off / setting["temperature"] + abs(math.log(max(loose.max(), 1e-30) / max(tight.max(), 1e-30)))
        expected = distribution(own, setting)
        for token, value in row.items():
            compared += 1
            if (loose[token] == 0.0) != (tight[token] == 0.0):
                continue  # a filter's limit, where rounding decides
            exact = math.log(expected[token]) if expected[token] > 0 else -math.inf
            ratio = 0.0 if value == exact else min(abs(value - exact), 1e30) / bound
            if ratio > largest:
                largest, where = ratio, f"{name}, token {token}: {value:.4f} instead of {exact:.4f}"
    detail = f"{compared} in {len(processed)} settings: {largest:.2f} of the bound at most"
    if largest <= 1:
        return CheckFinding.right(PROCESSED, detail)
    return CheckFinding.wrong(
        PROCESSED,
        detail,
        place=where,
        meaning="temperature, a filter or a penalty is another than the request asks for",
        remedy="--enforce-eager; --tensor-parallel-size 1",
    )
