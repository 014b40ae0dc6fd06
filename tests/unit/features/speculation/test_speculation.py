"""Draft tokens on rank 0: runs, draft rows, blocks, counters.  Oracle: the fake model on each sequence alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import ANY

import numpy as np
import pytest

from tests.tiers import slow_but
from tests.unit.sched.scheduler_harness import VOCABULARY, RandomLoad, Simulation, expected_tokens, limits
from tp_engine.api.openai.answer_shape import Usage
from tp_engine.config import EngineConfig
from tp_engine.errors import ConfigError
from tp_engine.features.speculation.feature import BASE_ROWS, COUNTERS, KEPT_ROWS, SpeculationCounters
from tp_engine.features.speculation.options import METHODS, SpeculativeConfig
from tp_engine.features.speculation.proposer import Proposal, Proposer
from tp_engine.features.speculation.proposers import Acceptance, DraftPart, Proposers, make_source
from tp_engine.features.structured_output.scheduling import CONSTRAINED, Constrained
from tp_engine.plan import IntArray, StepResult
from tp_engine.requests.request import FinishReason
from tp_engine.sched.sequence import Sequence
from tp_engine.worker.effective_config import resolve

MOST = 6
PROMPT = [8, 36, 48, 4, 16, 7, 31, 48, 28]  # the fake model answers with different tokens, with seed 3


class ScriptedSource(Proposer):
    """``make`` turns the tokens that are right, and how many are wanted, into the draft token."""

    def __init__(self, make: Callable[[list[int], int, random.Random], list[int]]) -> None:
        self.simulation: Simulation
        self.most_matched = {"scripted": 3}
        self._make = make
        self._random = random.Random(5)

    def proposals(self, sequence: Sequence, tokens: IntArray, count: int) -> list[Proposal]:
        """See ``Proposer``."""
        made = self._make(self._right(tokens.tolist(), count), count, self._random)
        return [Proposal(np.array(made[:count], dtype=np.int32), self._random.randint(0, 3), "scripted")]

    def _right(self, tokens: list[int], count: int) -> list[int]:
        for request in self.simulation.requests.values():
            start = len(request.prompt_token_ids)
            for index in range(request.params.n if tokens[:start] == request.prompt_token_ids else 0):
                expected, _ = self.simulation.expected(request, index)
                if tokens[start:] == expected[: len(tokens) - start]:
                    return expected[len(tokens) - start :][:count]
        return []


def noise(count: int, rng: random.Random) -> list[int]:
    return [rng.randrange(VOCABULARY) for _ in range(count)]


def changed(right: list[int], rng: random.Random) -> list[int]:
    """Right up to a random place."""
    place = rng.randint(0, len(right))
    return [*right[:place], *((token + 1) % VOCABULARY for token in right[place:])]


PROPOSERS: dict[str, Callable[[list[int], int, random.Random], list[int]]] = {
    "right": lambda right, count, rng: right,
    "wrong": lambda right, count, rng: [(token + 1) % VOCABULARY for token in right],
    "random": lambda right, count, rng: noise(rng.randint(0, count), rng),
    "longest": lambda right, count, rng: [*right, *noise(count - len(right), rng)],
    "partly right": lambda right, count, rng: changed(right, rng),
}


def simulate(kind: str, *, ahead: int = 0, most_rows: int = 24, **changes: object) -> Simulation:
    """A simulation whose draft tokens are those of ``PROPOSERS``."""
    source = ScriptedSource(PROPOSERS[kind])
    config = SpeculativeConfig(num_speculative_tokens=MOST, max_step_rows=most_rows)
    simulation = Simulation(limits(speculation=config, **changes), ahead=ahead, proposer=source)
    source.simulation = simulation
    return simulation


def counters(simulation: Simulation) -> SpeculationCounters:
    found = COUNTERS.get(simulation.scheduler.stats())
    assert found is not None
    return found


@pytest.mark.parametrize("kind", PROPOSERS)
@pytest.mark.parametrize("ahead", slow_but([1], [0, 1]))
def test_random_loads_give_the_tokens_of_single_steps(kind: str, ahead: int) -> None:
    """Chunks, forks, stops, aborts, preemptions, shared prefixes.  Oracle: the fake model; no block is lost, and what
    prompts find cached is their own history, recurrent states too (``FakeWorker``)."""
    num_preemptions = num_accepted = num_hits = 0
    for seed in range(6):
        sizes = {"num_blocks": 14 + 8 * (seed % 3), "max_num_batched_tokens": 12 + 20 * (seed % 2), "max_num_seqs": 8}
        windows = {"windows": (None, 8), "tile_tokens": 4, "num_blocks": 40} if seed == 3 else {}
        states = {"has_states": True, "num_snapshots": 4 * (seed - 3)} if seed > 3 else {}
        simulation = simulate(kind, ahead=ahead, most_rows=12, **{**sizes, **windows, **states})
        load = RandomLoad(simulation, seed)
        for _ in range(200):
            load.act()
        simulation.run()
        num_preemptions += simulation.scheduler.stats().num_preemptions
        num_hits += simulation.scheduler.stats().num_prefix_hit_tokens
        num_accepted += counters(simulation).num_accepted_tokens
        assert counters(simulation).num_draft_tokens > 0
    assert num_preemptions > 0 and num_hits > 0, "the load was too light"
    assert num_accepted > 0 or kind in ("wrong", "random")


@pytest.mark.parametrize("ahead", [0, 1])
def test_right_draft_tokens_take_one_step_for_their_run(ahead: int) -> None:
    """By hand: 1 token of the prompt's step, then 1 + 6 per step."""
    simulation = simulate("right", ahead=ahead)
    simulation.add([1, 2, 3], max_tokens=1 + 3 * (MOST + 1), ignore_eos=True)
    simulation.run()
    assert [len(BASE_ROWS.of(plan)) for plan in simulation.plans] == [0, MOST, MOST, MOST]
    found = counters(simulation)
    assert (found.num_drafts, found.num_draft_tokens, found.num_accepted_tokens) == (3, 3 * MOST, 3 * MOST)
    assert found.accepted_at == [3] * MOST


def test_a_stop_within_a_run_ends_the_sequence_there() -> None:
    """By hand: what was verified behind the stop token is dropped."""
    expected = expected_tokens(PROMPT, 3, 24, frozenset())
    stop = next(token for token in expected[3:] if expected.index(token) > 2)
    other = simulate("right")
    other.add(PROMPT, max_tokens=15, seed=3, ignore_eos=True, stop_token_ids=(stop,))
    other.run()
    output = other.outputs["r0", 0]
    assert output.token_ids == expected[: expected.index(stop) + 1]
    assert output.finish_reason is FinishReason.STOP and output.deltas[-1].stop_reason == stop


def test_a_sequence_tells_its_figures_at_its_end() -> None:
    """By hand: as the totals, with one request."""
    simulation = simulate("partly right")
    simulation.add([1, 2, 3], max_tokens=60, ignore_eos=True)
    simulation.run()
    found, last = counters(simulation), simulation.outputs["r0", 0].deltas[-1]
    assert (last.num_draft_tokens, last.num_accepted_tokens) == (found.num_draft_tokens, found.num_accepted_tokens)
    assert 0 < last.num_accepted_tokens < last.num_draft_tokens


def test_many_rows_are_planned_ahead_without_draft_tokens() -> None:
    """By hand: 5 rows are more than half of 8."""
    simulation = simulate("right", ahead=1, most_rows=8)
    for number in range(5):
        simulation.add([number, 3], max_tokens=9, ignore_eos=True)
    simulation.run()
    assert not any(len(BASE_ROWS.of(plan)) for plan in simulation.plans)
    assert len(simulation.plans) == 9


def test_rows_never_exceed_the_budget() -> None:
    """By hand: 3 rows and 5 draft rows are 8."""
    simulation = simulate("right", most_rows=8)
    for number in range(3):
        simulation.add([number, 3], max_tokens=30, ignore_eos=True)
    simulation.run()
    sizes = {len(plan.decode_rows) for plan in simulation.plans}
    assert max(sizes) == 8


def test_ngrams() -> None:
    """By hand: the longest match, the last of equal ones, a period at the end, and none."""
    source = make_source(SpeculativeConfig(prompt_lookup_min=2, prompt_lookup_max=3))

    def look(text: str, count: int = 4) -> tuple[str, int]:
        (found,) = source.proposals(ANY, np.array([ord(c) for c in text], dtype=np.int32), count)
        return "".join(map(chr, found.tokens)), found.matched

    assert look("abcdefgabc") == ("defg", 3)
    assert look("abcd-xbce-ybc") == ("e-yb", 2)
    assert look("xyxyx") == ("yxyx", 3)
    assert look("zzzz", 3) == ("zzz", 3)
    for none in ([1, 2, 3], [1, 2, 4, 2], [1]):
        assert not [*source.proposals(ANY, np.array(none, dtype=np.int32), 4)]


class Fixed(Proposer):
    """Always draft tokens ``tokens``, and keeps what it is told."""

    def __init__(self, name: str, tokens: list[int]) -> None:
        self.most_matched = {name: 3}
        self.tokens = np.array(tokens, dtype=np.int32)
        self.results: list[int] = []
        self.ended: list[list[int]] = []

    def proposals(self, sequence: Sequence, tokens: IntArray, count: int) -> list[Proposal]:
        """See ``Proposer``."""
        return [Proposal(self.tokens[:count], 2, *self.most_matched)]

    def take(self, result: StepResult) -> None:
        """See ``Proposer``."""
        self.results.append(result.step_id)

    def learn(self, sequence: Sequence) -> None:
        """See ``Proposer``."""
        self.ended.append(sequence.token_ids.tolist())


FREE: Any = SimpleNamespace(extensions={})


def test_the_likelier_source_is_verified() -> None:
    """By hand: the longer draft token at first, and the other source once the first one has been wrong."""
    sources = Proposers([Fixed("long", [1, 2, 3, 4]), Fixed("short", [8, 9])], most_tokens=4)
    assert list(sources.counts) == ["grammar", "long", "short"]
    tokens = np.array([5], dtype=np.int32)
    found = sources.propose(FREE, tokens, 4)
    assert found.parts == [DraftPart("long", 2, 4)] and len(found.tokens) == len(found.likelihoods) == 4
    for _ in range(9):
        sources.note([DraftPart("long", 2, 4)], 4, 0)
        sources.note([DraftPart("short", 2, 2)], 2, 1)
    assert sources.propose(FREE, tokens, 4).parts[0].source == "short"


def test_what_a_grammar_forces_comes_first() -> None:
    """By hand: two forced tokens, then another source's, as far as there is room; each is measured alone."""
    sources = Proposers([Fixed("fixed", [7, 8, 9])], most_tokens=4)
    place: Any = SimpleNamespace(forced=lambda: [1, 2])
    constrained: Any = SimpleNamespace(extensions={CONSTRAINED.name: Constrained(place)})
    tokens = np.array([5], dtype=np.int32)
    found = sources.propose(constrained, tokens, 4)
    assert found.tokens.tolist() == [1, 2, 7, 8] and found.parts == [
        DraftPart("grammar", 0, 2),
        DraftPart("fixed", 2, 2),
    ]
    assert found.likelihoods == pytest.approx([0.8, 0.8**2, 0.8**3, 0.8**4])
    for _ in range(20):
        sources.note(found.parts, 4, 2)
    found = sources.propose(constrained, tokens, 4)
    assert found.tokens.tolist() == [1, 2] and found.likelihoods[1] > 0.8
    for _ in range(150):
        sources.note(found.parts, 1, 0)
    assert not len(sources.propose(constrained, tokens, 1).tokens), "neither pays any more"


def test_sources_are_told_results_and_ends() -> None:
    """By hand: every step's result, and a sequence's tokens at its end."""
    source = Fixed("fixed", [1])
    simulation = Simulation(limits(speculation=SpeculativeConfig()), proposer=source)
    simulation.add([1, 2, 3], max_tokens=5, ignore_eos=True)
    simulation.run()
    assert source.results == [plan.step_id for plan in simulation.plans]
    assert source.ended == [[1, 2, 3, *simulation.outputs["r0", 0].token_ids]]


def test_past_answers_are_drafted() -> None:
    """By hand: a request comes again, and its answer is found behind the end of its prompt."""
    simulation = Simulation(limits(speculation=SpeculativeConfig(method="suffix", num_speculative_tokens=MOST)))
    num_steps = []
    for _ in range(2):
        simulation.add(PROMPT, max_tokens=15, seed=3, ignore_eos=True)
        num_steps.append(simulation.run())
    assert num_steps[1] <= num_steps[0] / 2, num_steps


def test_every_method_has_a_source() -> None:
    """Oracle: the option's methods; ``suffix`` drafts from past answers and, as ``ngram`` does, from the own text."""
    made = {
        method: make_source(SpeculativeConfig(method=method, model="a head" if method == "eagle3" else None))
        for method in METHODS
    }
    assert {method: list(source.most_matched) for method, source in made.items()} == {
        "ngram": ["ngram"],
        "suffix": ["suffix", "ngram"],
        "eagle3": ["eagle3"],
        "mtp": ["mtp"],
    }
    assert type(made["ngram"]) is type(made["suffix"])


def test_suffix_draft_tokens_all_that_ngram_does() -> None:
    """Oracle: ``ngram``, beside which ``suffix`` also draft tokens from answers that it has seen, and only it."""
    rng = random.Random(7)
    own, both = (make_source(SpeculativeConfig(method=method)) for method in ("ngram", "suffix"))
    num_own = num_more = 0
    for _ in range(200):
        text = np.array([rng.randrange(4) for _ in range(rng.randint(1, 40))], dtype=np.int32)
        sequence: Any = SimpleNamespace(token_ids=text, num_prompt_tokens=0, group=SimpleNamespace(cache_key=""))
        expected, found = ([*one.proposals(sequence, text, 6)] for one in (own, both))
        assert [proposal.source for proposal in expected] in ([], ["ngram"])
        assert [(one.tokens.tolist(), one.matched) for one in found if one.source == "ngram"] == [
            (one.tokens.tolist(), one.matched) for one in expected
        ]
        num_own += len(expected)
        num_more += len(found) - len(expected)
        for source in (own, both):
            source.learn(sequence)
    assert num_own > 100 and num_more > 100


def test_acceptance_falls_with_failures_and_is_forgotten() -> None:
    """By hand: (right + 2) / (tried + 2.5), which goes back to 0.8."""
    acceptance = Acceptance(3, 4)
    assert acceptance.likelihoods(2, 3).tolist() == pytest.approx([0.8, 0.64, 0.512])
    for _ in range(50):
        acceptance.note(2, 3, 0)
    assert acceptance.likelihoods(2, 3)[0] < 0.05
    assert acceptance.likelihoods(1, 1)[0] == 0.8
    for _ in range(400):
        late = acceptance.likelihoods(2, 1)[0]
    assert late > 0.7
    for _ in range(50):
        acceptance.note(3, 4, 4)
    assert acceptance.likelihoods(3, 4)[-1] > 0.85


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "which is not JSON"),
        ("4", "it must be a JSON object, such as"),
        ('{"metod": "ngram"}', "names 'metod'; it can set method,"),
        ('{"method": "medusa"}', "method is 'medusa'; choose one of ngram, suffix, eagle3, mtp"),
        ('{"method": "eagle", "model": "a head"}', "speculative_config: method is 'eagle'; choose one of"),
        ('{"method": "mtp", "model": 3}', "model is 3 of type int"),
        (
            '{"method": "eagle3"}',
            "'eagle3' and the model None; eagle3 needs the folder or the hub name of a draft head",
        ),
        ('{"method": "ngram", "model": "a head"}', "'ngram' and the model 'a head'; eagle3 needs"),
        ('{"num_speculative_tokens": 0}', "num_speculative_tokens is 0; it must be at least 1, and at most 16"),
        ('{"num_speculative_tokens": true}', "num_speculative_tokens is True of type bool; it must be of type int"),
        ('{"num_speculative_tokens": 17}', "num_speculative_tokens is 17; it must be at least 1, and at most 16"),
        ('{"prompt_lookup_min": 4, "prompt_lookup_max": 3}', "prompt_lookup_min 4 above prompt_lookup_max 3"),
        ('{"suffix_decoding_min_token_prob": 1.5}', "prob is 1.5; it must be above 0, and at most 1"),
        ('{"suffix_decoding_max_spec_factor": "x"}', "factor is 'x' of type str; it must be of type float"),
        ('{"max_step_rows": 1}', "max_step_rows is 1; it must be at least 2"),
    ],
)
def test_wrong_options_are_refused(text: str, message: str) -> None:
    """By hand: the value, the rule and the remedy."""
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**dict[str, Any](speculative_config=text))


def test_options() -> None:
    """By hand: vLLM's names; a bound that is given alone moves the other one's default."""
    assert SpeculativeConfig.of(None) is None
    assert SpeculativeConfig.of('{"prompt_lookup_min": 7}') == SpeculativeConfig(
        prompt_lookup_min=7, prompt_lookup_max=7
    )
    assert SpeculativeConfig.of('{"prompt_lookup_max": 1}') == SpeculativeConfig(
        prompt_lookup_min=1, prompt_lookup_max=1
    )


@pytest.mark.parametrize(
    ("max_num_seqs", "max_num_batched_tokens", "text", "num_spare_rows", "max_step_decodes"),
    [
        (1, None, '{"num_speculative_tokens": 3}', 3, 4),
        (2, None, '{"num_speculative_tokens": 3}', 7, 8),
        (256, None, '{"num_speculative_tokens": 3}', 31, 256),
        (16, None, '{"num_speculative_tokens": 16, "max_step_rows": 40}', 39, 40),
        (1, 2, '{"num_speculative_tokens": 3}', 1, 2),
        (1, 1, '{"num_speculative_tokens": 3}', 0, 1),
        (4, None, None, 0, 4),
    ],
)
def test_rows_of_draft_tokens(
    max_num_seqs: int, max_num_batched_tokens: int | None, text: str | None, num_spare_rows: int, max_step_decodes: int
) -> None:
    """By hand: all draft tokens that sequences may have in a step, as far as its rows and tokens go, but for one row
    that is a sequence's own."""
    budget: dict[str, Any] = (
        {} if max_num_batched_tokens is None else {"max_num_batched_tokens": max_num_batched_tokens}
    )
    config = EngineConfig(speculative_config=SpeculativeConfig.of(text), max_num_seqs=max_num_seqs, **budget)
    assert (config.num_spare_rows, config.max_step_decodes) == (num_spare_rows, max_step_decodes)


@pytest.mark.parametrize("max_num_seqs", [1, 2])
@pytest.mark.parametrize("kind", ["right", "partly right"])
def test_draft_tokens_beside_few_sequences(kind: str, max_num_seqs: int) -> None:
    """Oracle: the fake model, and by hand: a sequence alone has all of its draft tokens in a step."""
    for has_states in (False, True):
        states = {"has_states": True, "num_snapshots": 3} if has_states else {}
        simulation = simulate(kind, max_num_seqs=max_num_seqs, num_blocks=30, max_num_batched_tokens=20, **states)
        load = RandomLoad(simulation, max_num_seqs)
        for _ in range(150):
            load.act()
        simulation.run()
        most = max(len(BASE_ROWS.of(plan)) for plan in simulation.plans)
        assert MOST <= most <= max_num_seqs * MOST and counters(simulation).num_accepted_tokens > 0


@pytest.mark.parametrize(
    "text",
    [
        '{"method": "mtp"}',
        '{"method": "qwen3_next_mtp"}',
        '{"method": "deepseek_mtp", "num_speculative_tokens": 1}',
        '{"method": "ernie_mtp", "num_speculative_tokens": null}',
        '{"method": "NEXTN"}',
        '{"method": "eagle"}',
    ],
)
def test_names_of_a_models_own_head(text: str) -> None:
    """By hand: vLLM's names, SGLang's; a head drafts one token unless the option says more."""
    assert SpeculativeConfig.of(text) == SpeculativeConfig(method="mtp", num_speculative_tokens=1)


def test_a_head_without_a_method_is_eagle3() -> None:
    """By hand: vLLM takes the method from the head, and other heads of their own checkpoint are not run here."""
    assert SpeculativeConfig.of('{"model": "a/head"}') == SpeculativeConfig(method="eagle3", model="a/head")


def test_models_without_a_head_are_refused(checkpoint: Callable[..., Path]) -> None:
    """By hand: the remedy is a method that needs none."""
    for name in ("llama", "qwen3.5"):
        config = EngineConfig(
            model=str(checkpoint(name)),
            device="cpu",
            speculative_config=SpeculativeConfig(method="mtp", num_speculative_tokens=1),
        )
        with pytest.raises(ConfigError, match=r"multi-token prediction .* set the method ngram or suffix"):
            resolve(config)


@pytest.mark.parametrize("place", range(4))
def test_golden_states_behind_kept_tokens(place: int) -> None:
    """By hand, 8 rows: of 3 draft tokens in rows 8 to 10 ``place`` are right, and the state behind them is copied."""
    source = ScriptedSource(
        lambda right, count, rng: [*right[:place], *((one + 1) % VOCABULARY for one in right[place:])]
    )
    config = SpeculativeConfig(num_speculative_tokens=3, max_step_rows=8)
    simulation = Simulation(limits(speculation=config, has_states=True, max_num_seqs=8), proposer=source)
    source.simulation = simulation
    simulation.add(PROMPT, max_tokens=12, seed=3, ignore_eos=True)
    simulation.run()
    drafted = [index for index, plan in enumerate(simulation.plans[:-1]) if len(BASE_ROWS.of(plan)) == 3]
    assert drafted
    for index in drafted:
        expected = [[8 + place - 1, 0]] if place else []
        assert simulation.plans[index + 1].state_copies.tolist() == expected


def test_a_row_that_was_left_gets_no_state_of_its_last_occupant() -> None:
    """By hand: a request is preempted when its result is there, and the next plan gives its row to another, which
    begins behind a snapshot."""
    config = SpeculativeConfig(num_speculative_tokens=3, max_step_rows=4)
    source = ScriptedSource(PROPOSERS["right"])
    options = {"has_states": True, "num_snapshots": 4, "max_num_seqs": 4, "block_size": 4}
    simulation = Simulation(limits(speculation=config, **options), proposer=source)
    source.simulation = simulation
    simulation.add(list(range(11)), max_tokens=2, ignore_eos=True)
    simulation.run()  # leaves a snapshot behind 8 tokens
    simulation.add(PROMPT, max_tokens=15, seed=3, ignore_eos=True)
    while not len(BASE_ROWS.of(simulation.plans[-1])):
        simulation.step()
    (row,) = set(BASE_ROWS.of(simulation.plans[-1]).tolist())
    simulation.scheduler.preempt_all()
    simulation.add(list(range(11)), max_tokens=4, ignore_eos=True, priority=-1)
    plan = simulation.step()
    assert plan is not None and plan.admitted[0].row == row and row in KEPT_ROWS.of(plan)
    (source_of_row,) = (start for start, target in plan.state_copies.tolist() if target == row)
    assert source_of_row >= 4 + 3, "the state of a draft row, and no snapshot"
    simulation.run()


def test_usage_tells_what_was_drafted() -> None:
    """By hand: OpenAI's fields for predicted outputs, and none where nothing was drafted."""
    details = Usage(draft_tokens=9, accepted_tokens=4).as_json()["completion_tokens_details"]
    assert details == {"accepted_prediction_tokens": 4, "rejected_prediction_tokens": 5}
    assert "completion_tokens_details" not in Usage().as_json()
