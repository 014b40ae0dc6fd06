"""Is what the engine gave right?  Log-probabilities, tokens, layers and products, each beside its bound.

::

    float32                       equal tokens, log-probabilities to 1e-4, layers to 64 steps of float32; else as below,
                                  beside transformers in float64
    16 bits, or quantised         at most 1.5 times the error that transformers itself has with the same rounding

The error of transformers (the *twin*) comes from the same prompts, and for layers from the same states.  Each of the
two is drawn: the roundings of another program fall elsewhere.  Half and nine tenths of the errors, which many
positions make, are the same for both, and are held to the bound.  The largest one is a draw of its own, of a few
positions that are very sensitive (a sum that nearly cancels, a value far above the others): it may be 1.5 times as far
again, and that of a layer is compared with the twin's largest at any layer.  Where a model has experts, two of them may
be nearly as likely, and rounding decides; where rows, weights, or keys and values have 8 bits or fewer, a few answers
are far off in any engine.  The largest error has no bound then; with 8 bits or fewer, that of layers has one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from tp_engine.apps.check.answers import Answer, Floats, Ids
from tp_engine.apps.check.linears import LinearFault
from tp_engine.apps.check.observed import Observed
from tp_engine.apps.check.passes import Passed, logprobs_of, questions
from tp_engine.apps.check.ranks import rank_apart, rank_of_slice
from tp_engine.apps.check.report import CheckFinding
from tp_engine.apps.check.rounding import Rounding
from tp_engine.apps.check.sampling import PROCESSED, check_draws, check_processed
from tp_engine.apps.check.set_ups import ALONE, BATCH, CACHED, OTHERS, SEVERAL
from tp_engine.apps.check.watched import Watched
from tp_engine.model_config import padded_vocab_size

EXACT_LOGPROBS = 1e-4
EXACT_LAYERS = 64 * 2.0**-23
FACTOR = 1.5
SCATTER = 1.5
_SHARES = (0.5, 0.9)

_EVERY_ANSWER = "answers differ from the model's own, for every request"
_REMEDIES = {
    BATCH: "--max-num-seqs 1, then --enforce-eager",
    CACHED: "--no-enable-prefix-caching",
    SEVERAL: "several requests instead of n above 1",
    **{name: one.remedy for name, one in OTHERS.items()},
}
_FIRST_REMEDIES = "--enforce-eager, --attention-backend torch, --dtype float32; --bisect tries them"


@dataclass(frozen=True, slots=True)
class Errors:
    """Errors (k,) at ``positions`` (k,), and those of the twin there, None for an engine in float32.

    ``furthest`` is the twin's error that bounds the largest one; infinite if nothing does.  ``spread`` is how much
    further apart the usual errors of both may be: those of few positions are draws, as the largest one is.
    """

    own: Floats
    twin: Floats | None
    positions: Ids
    floor: float
    furthest: float
    spread: float = 1.0

    @staticmethod
    def between(given: Floats, exact: Floats, twin: Floats | None, *, floor: float) -> Errors:
        """The absolute errors of ``given`` (n, m) where ``exact`` is a number; a given NaN is infinitely off."""
        is_compared = ~np.isnan(exact)
        own = np.nan_to_num(np.abs(given - exact)[is_compared], nan=np.inf, posinf=np.inf)
        known = None if twin is None else np.abs(twin - exact)[is_compared]
        furthest = 0.0 if known is None else float(known.max(initial=0.0))
        return Errors(own, known, np.nonzero(is_compared)[0], floor, furthest)

    @property
    def worst(self) -> int:
        """The position of the largest error."""
        return int(self.positions[self.own.argmax()]) if self.own.size else 0

    @property
    def first(self) -> int:
        """The first position whose error is above the bound of the largest one."""
        furthest = 0.0 if self.twin is None else float(self.twin.max(initial=0.0))
        beyond = self.positions[self.own > FACTOR * SCATTER * furthest + self.floor]
        return int(beyond.min()) if beyond.size else self.worst

    @property
    def largest(self) -> float:
        return float(self.own.max(initial=0.0))

    @property
    def excess(self) -> float:
        """The largest ratio of an error to its bound; at most 1 is right."""
        if not self.own.size:
            return 0.0
        if self.twin is None:
            return self.largest / self.floor
        pairs = [
            (float(np.quantile(self.own, one)), self.spread * float(np.quantile(self.twin, one))) for one in _SHARES
        ]
        pairs.append((self.largest, SCATTER * self.furthest))
        return max(0.0 if other == np.inf > one else one / (FACTOR * other + self.floor) for one, other in pairs)


def joined(parts: Sequence[Errors]) -> Errors:
    """The errors of several answers as one; positions are each answer's own."""
    twins = [one.twin for one in parts if one.twin is not None]
    return Errors(
        np.concatenate([one.own for one in parts]),
        np.concatenate(twins) if twins else None,
        np.concatenate([one.positions for one in parts]),
        parts[0].floor,
        max(one.furthest for one in parts),
    )


@dataclass(frozen=True)
class Judge:
    """Makes findings of what the engines gave, what the oracle gives, and what its twin gives (None: float32).

    ``rounding`` is the engine's.
    """

    observed: Observed
    exact: Passed
    twin: Passed | None
    rounding: Rounding
    has_experts: bool

    @property
    def is_rough(self) -> bool:
        """Whether log-probabilities of a few positions may be far off, because of experts or of quantised rows, weights
        or keys and values; float64 leaves nothing to chance."""
        is_finer = self.rounding.is_exact and self.twin is not None
        return not is_finer and (self.has_experts or self.rounding.is_rough)

    @cached_property
    def _asked(self) -> Mapping[tuple[int, ...], Ids]:
        return questions(self.observed)

    def set_ups(self) -> Iterator[CheckFinding]:
        """Yield a finding for each set-up."""
        for name, answers in self.observed.set_ups.items():
            if isinstance(answers, str):
                yield CheckFinding.skipped(name, answers)
            else:
                yield self._set_up(name, answers)
        for name, reason in self.observed.failures.items():
            yield CheckFinding.wrong(
                name,
                f"the engine failed: {reason}",
                meaning="requests that run this way end with an error",
                remedy=_REMEDIES.get(name, ""),
            )

    def _set_up(self, name: str, answers: Sequence[Answer]) -> CheckFinding:
        parts = [self._errors(answer) for answer in answers]
        errors = joined(parts)
        if name != ALONE:  # few positions: the twin's error on them, or on all prompts, is the measure
            of_all = replace(errors, twin=self._known.twin, furthest=self._known.furthest)
            errors = min(errors, of_all, key=lambda one: one.excess)
        lapses = [float(self._lapses(answer).max(initial=0.0)) / (2 * self.allowed) for answer in answers]
        lapse, lapsed = max((one, index) for index, one in enumerate(lapses))
        ratio = max(errors.excess, lapse)
        what = "prompts and answers" if name == ALONE else "answers"
        detail = (
            f"{len(answers)} {what}, {errors.own.size} log-probabilities: off by at most {errors.largest:.1e}, "
            f"{ratio:.2f} of the bound"
        )
        numbers = {"largest_error": errors.largest, "ratio": ratio, "compared": float(errors.own.size)}
        if ratio <= 1:
            return CheckFinding.right(name, detail, numbers=numbers)
        worst = max(range(len(parts)), key=lambda index: parts[index].largest)
        is_lapse = lapse > errors.excess
        answer = answers[lapsed if is_lapse else worst]
        position = parts[worst].first
        if is_lapse:
            position = len(answer.prompt.token_ids) - 1 + int(self._lapses(answer).argmax())
        where = "answer" if position >= len(answer.prompt.token_ids) - 1 else "prompt"
        meaning, remedy = _EVERY_ANSWER, _FIRST_REMEDIES  # where requests alone are wrong too, the set-up is no cause
        if self._known.excess <= 1:
            meaning = f"a request that runs this way ({name}) gets another answer than one that runs alone would get"
            remedy = _REMEDIES.get(name, "")
        return CheckFinding.wrong(
            name,
            detail,
            place=f"prompt {answer.prompt.name!r}, position {position} ({where})",
            meaning=meaning,
            remedy=remedy,
            numbers=numbers,
        )

    def _errors(self, answer: Answer) -> Errors:
        asked, twin = self._asked[answer.sequence], None
        exact = logprobs_of(self.exact.scores[answer.sequence], asked, answer)
        if self.twin is not None:
            twin = logprobs_of(self.twin.scores[answer.sequence], asked, answer)
        errors = Errors.between(answer.logprobs, exact, twin, floor=EXACT_LOGPROBS)
        return replace(errors, furthest=np.inf) if self.is_rough else errors

    def _lapses(self, answer: Answer) -> Floats:
        """How much likelier the oracle's best token is than each chosen one."""
        scores, first = self.exact.scores[answer.sequence], len(answer.prompt.token_ids) - 1
        chosen = scores.next_logprobs[first:]
        if answer.is_drawn:
            return np.zeros(len(chosen), np.float32)
        return np.asarray(scores.best_logprobs[first : first + len(chosen)] - chosen)

    @cached_property
    def _known(self) -> Errors:
        """The errors of requests that ran alone."""
        return joined([self._errors(answer) for answer in self.observed.alone])

    @property
    def allowed(self) -> float:
        """The largest error of a log-probability that is allowed."""
        if self._known.twin is None:
            return EXACT_LOGPROBS
        return FACTOR * SCATTER * float(self._known.twin.max(initial=0.0)) + EXACT_LOGPROBS

    def layers(self, faults: Sequence[LinearFault]) -> CheckFinding:
        """The finding on hidden states: the first layer beyond its bound, with rank and position."""
        ratio, checked, watched = 0.0, 0, self._watched
        parts = slice(0, watched.num_prompt), slice(watched.num_prompt, len(watched.sequence))
        for layer in range(len(self.exact.layers)):
            for rank, arrays in enumerate(watched.arrays):
                for part in parts:
                    errors = self._of_layer(arrays[f"streams.{layer}"], layer, part)
                    checked += part is parts[0]
                    ratio = max(ratio, errors.excess)
                    if errors.excess > 1:
                        return self._wrong_layer(layer, rank, errors, part, faults)
        detail = (
            f"{checked} outputs of layers, {watched.num_prompt} tokens of a prompt and "
            f"{len(watched.sequence) - watched.num_prompt} decodes, each from the engine's own input: {ratio:.2f} of "
            "the bound at most"
        )
        return CheckFinding.right("hidden states", detail, numbers={"ratio": ratio})

    def _of_layer(self, given: Floats, layer: int, part: slice) -> Errors:
        """Errors of the outputs of a layer for a ``part`` of the rows: the prompt's, or those of decodes.  These are
        few, so that the twin's errors on them, or on all rows, are the measure, with room for how draws scatter."""
        twin = None if self.twin is None else self.twin.layers[layer]
        whole = self._of_rows(given, self.exact.layers[layer], twin)
        of_part = None if whole.twin is None else whole.twin[part]
        own = replace(whole, own=whole.own[part], positions=whole.positions[part], twin=of_part)
        if part.start == 0 or not own.own.size:
            return own
        own = replace(own, spread=SCATTER)
        return min(own, replace(own, twin=whole.twin), key=lambda one: one.excess)

    @property
    def _watched(self) -> Watched:
        assert self.observed.watched is not None, "judged for engines that run here"
        return self.observed.watched

    @cached_property
    def _furthest(self) -> float:
        """The largest relative error of the twin at any layer; infinite with experts, but in float32."""
        if self.has_experts and self.is_rough:
            return np.inf
        known = () if self.twin is None else self.twin.layers
        pairs = zip(known, self.exact.layers, strict=bool(known))
        return max((float(_relative(one, exact).max(initial=0.0)) for one, exact in pairs), default=0.0)

    def _of_rows(self, given: Floats, exact: Floats, twin: Floats | None) -> Errors:
        """Errors (n,) of rows (n, hidden), relative to their size."""
        known = None if twin is None else _relative(twin, exact)
        return Errors(_relative(given, exact), known, np.arange(len(exact)), EXACT_LAYERS, self._furthest)

    def _wrong_layer(
        self, layer: int, rank: int, errors: Errors, rows: slice, faults: Sequence[LinearFault]
    ) -> CheckFinding:
        watched, index = self._watched, layer - 1
        part = self._part(index, rows)
        name = "embeddings" if layer == 0 else f"layer {index}, {part}"
        differs = any(not np.array_equal(one[f"streams.{layer}"], watched.arrays[0][f"streams.{layer}"], equal_nan=True)
                      for one in watched.arrays)  # fmt: skip
        fault = next((one for one in faults if one.layer == index), None)
        of_rank = f"rank {rank}" if differs else "all ranks" if len(watched.arrays) > 1 else "rank 0"
        if fault is not None:
            of_rank = f"rank {fault.rank} ({fault.module})"
        elif not differs and (apart := self._apart(index, part)):
            of_rank = f"rank {apart[0]} ({apart[1]})"
        of_answer = " (answer)" if rows.start else ""
        return CheckFinding.wrong(
            "hidden states",
            f"layer {index} is the first one whose output is wrong: {errors.excess:.3g} times the bound"
            if layer
            else f"the embeddings are wrong: {errors.excess:.3g} times the bound",
            place=f"{name}, {of_rank}, position {errors.first} of prompt {watched.answer.prompt.name!r}{of_answer}",
            meaning="this layer computes something else than transformers' layer, from the same input",
            remedy=_FIRST_REMEDIES if fault is None else "compare the weights' files with the original",
            numbers={"layer": float(layer), "ratio": errors.excess},
        )

    def _apart(self, index: int, part: str) -> tuple[str, str] | None:
        return rank_apart(self._watched, self.exact.reads, self.exact.experts, index, in_mlp=part != "attention")

    def _part(self, index: int, rows: slice) -> str:
        """Which part of a layer is wrong: attention if what the MLP reads is wrong already."""
        exact = self.exact.inner.get(index)
        given = self._watched.arrays[0].get(f"inner.{index}")
        if exact is None or given is None or exact.shape != given.shape:
            return "attention or MLP"
        twin = None if self.twin is None else self.twin.inner.get(index)
        of_rows = None if twin is None else twin[rows]
        is_wrong = self._of_rows(given[rows], exact[rows], of_rows).excess > 1
        return "attention" if is_wrong else ("experts" if self.has_experts else "MLP")

    def head(self) -> CheckFinding:
        """The finding on the final norm and the output head, from the engine's last states."""
        answer, of_exact = self._watched.answer, self.exact.head
        assert of_exact is not None, "what is watched ran"
        length = len(self._watched.sequence)
        exact = np.where(answer.alternatives[:length] >= 0, of_exact.wanted[:length], np.nan)
        twin = None if self.twin is None or self.twin.head is None else self.twin.head.wanted[:length]
        errors = Errors.between(answer.logprobs[:length], exact, twin, floor=EXACT_LOGPROBS)
        detail = f"{errors.own.size} log-probabilities from the engine's last states: {errors.excess:.2f} of the bound"
        if errors.excess <= 1:
            return CheckFinding.right("norm and output head", detail)
        num_ranks, of_rank = len(self._watched.arrays), ""
        if num_ranks > 1:
            differences = np.where(np.isnan(exact), np.nan, answer.logprobs[:length] - exact)
            assert self.exact.logits is not None, "engines that run here draw"
            width = padded_vocab_size(self.exact.logits.shape[1], num_ranks) // num_ranks
            rank = rank_of_slice(differences, answer.alternatives[:length] // width, num_ranks, self.allowed)
            of_rank = "all ranks; " if rank is None else f"rank {rank}'s slice of the vocabulary; "
        return CheckFinding.wrong(
            "norm and output head",
            detail,
            place=f"{of_rank}final norm, output head (tied or not), scale or soft cap of logits; position "
            f"{errors.first}",
            meaning="all layers may be right, and every token is still drawn from other probabilities",
            remedy="compare lm_head, tie_word_embeddings and final_logit_softcapping with the original config.json",
        )

    def sampling(self) -> Iterator[CheckFinding]:
        """Yield the findings on draws and processed log-probabilities, which tell nothing where logits are wrong."""
        if self._known.excess > 1:
            yield CheckFinding.skipped("sampling", f"log-probabilities of requests that run {ALONE} are wrong already")
            return
        draws, processed = self.observed.draws, self.observed.processed
        assert draws is not None and self.exact.logits is not None, "engines that run here draw"
        logits = self.exact.logits.astype(np.float64)
        of_few = None if self.exact.of_few is None else self.exact.of_few.astype(np.float64)
        yield check_draws(draws, logits, self.allowed, of_few)
        if isinstance(processed, str):
            yield CheckFinding.skipped(PROCESSED, processed)
        else:
            yield check_processed(processed, draws.prompt, logits[0], self.allowed)


def _relative(given: Floats, exact: Floats) -> Floats:
    """Errors (n,) of rows (n, hidden), relative to their size; infinite for no number."""
    size = np.maximum(np.linalg.norm(exact, axis=1), 1e-30)
    return np.asarray(np.nan_to_num(np.linalg.norm(given - exact, axis=1) / size, nan=np.inf))
