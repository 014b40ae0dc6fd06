"""Random requests to one engine, and checks of their answers.

Half of the requests are greedy and come from a fixed pool of prompts; an undisturbed run gives their tokens.  The
others use all of the sampler's options; only their ends are checked.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from tp_engine.api.input_processor import InputProcessor
from tp_engine.engine.engine import Engine
from tp_engine.requests.request import FinishReason, SequenceDelta
from tp_engine.requests.sampling_params import SamplingParams

VOCABULARY = 203
LONGEST_ANSWER = 48
_NUM_PROMPTS = 24
_LONGEST_PROMPT = 90
_MOST_UNFINISHED = 30


def prompt_pool(seed: int) -> list[list[int]]:
    """Prompts of 1 to 90 tokens; many share a beginning."""
    rng = random.Random(seed)
    trunk = [rng.randrange(3, VOCABULARY) for _ in range(_LONGEST_PROMPT)]
    pool = []
    for _ in range(_NUM_PROMPTS):
        shared = rng.choice((0, 0, 16, 33, 64))
        own = rng.randint(1, _LONGEST_PROMPT - shared)
        pool.append(trunk[:shared] + [rng.randrange(3, VOCABULARY) for _ in range(own)])
    return pool


def greedy(max_tokens: int, **changes: object) -> SamplingParams:
    """Parameters whose tokens depend on the prompt alone."""
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **changes)  # type: ignore[arg-type]


@dataclass
class Asked:
    """An unfinished request: the prompt's number in the pool (if its answer is known), and the tokens so far."""

    prompt: int | None
    params: SamplingParams
    tokens: dict[int, list[int]] = field(default_factory=dict)
    num_finished: int = 0


class Workload:
    """Adds, aborts and checks requests of one engine; ``count`` has the numbers of events.

    ``reference[i]`` are the ``LONGEST_ANSWER`` greedy tokens of ``pool[i]``; without a reference no token is compared.
    """

    def __init__(
        self, engine: Engine, pool: list[list[int]], rng: random.Random, reference: list[list[int]] | None
    ) -> None:
        self.engine = engine
        self.count: Counter[str] = Counter()
        self.answers: dict[str, list[int]] = {}
        self._pool = pool
        self._rng = rng
        self._reference = reference
        self._inputs = InputProcessor(engine.model_info, None)
        self._asked: dict[str, Asked] = {}
        self._next_id = 0

    def turn(self) -> None:
        """Add a random number of requests, perhaps abort one, and run one step."""
        rng = self._rng
        if rng.random() < 0.3:
            for _ in range(rng.randint(1, min(6, _MOST_UNFINISHED))):
                if len(self._asked) < _MOST_UNFINISHED:
                    self._ask_something()
        if self._asked and rng.random() < 0.06:
            self._abort(rng.choice(list(self._asked)))
        self._step()

    def finish(self) -> None:
        """Add no more requests; return when every request has ended."""
        while self.engine.has_unfinished:
            self._step()
        assert not self._asked, f"requests without an end although the engine is idle: {sorted(self._asked)}"

    def ask(self, prompt: int | None, token_ids: list[int], params: SamplingParams, priority: int = 0) -> str:
        """Queue one request and return its id."""
        request_id = f"soak-{self._next_id}"
        self._next_id += 1
        request = self._inputs.process(
            token_ids, params, request_id=request_id, priority=priority, arrival_s=time.monotonic()
        )
        self.engine.add_request(request)
        self._asked[request_id] = Asked(prompt, params)
        self.count["asked"] += 1
        return request_id

    def _ask_something(self) -> None:
        rng = self._rng
        number = rng.randrange(len(self._pool))
        priority = rng.choice((0, 0, 0, 1, -1))
        if rng.random() < 0.5:
            params = greedy(
                rng.randint(1, LONGEST_ANSWER), n=rng.choice((1, 1, 1, 2)), cache_salt=rng.choice((None, "b"))
            )
            self.ask(number, self._pool[number], params, priority)
        else:
            self.ask(None, self._pool[number], self._any_params(), priority)

    def _any_params(self) -> SamplingParams:
        rng = self._rng
        return SamplingParams(
            n=rng.choice((1, 1, 3)),
            temperature=rng.choice((0.5, 1.0, 1.7)),
            top_p=rng.choice((1.0, 0.8)),
            top_k=rng.choice((0, 1, 20)),
            min_p=rng.choice((0.0, 0.05)),
            presence_penalty=rng.choice((0.0, 0.6)),
            repetition_penalty=rng.choice((1.0, 1.3)),
            logit_bias=rng.choice((None, {5: 3.0, 9: -100.0})),
            seed=rng.choice((None, rng.randrange(1 << 31))),
            stop_token_ids=rng.choice(((), (7, 8))),
            max_tokens=rng.randint(1, LONGEST_ANSWER),
            min_tokens=rng.choice((0, 1)),
            logprobs=rng.choice((None, None, 2)),
            prompt_logprobs=rng.choice((None, None, None, 1)),
        )

    def _abort(self, request_id: str) -> None:
        self._take(self.engine.abort([request_id]))
        self._asked.pop(request_id, None)
        self.count["aborted"] += 1

    def _step(self) -> None:
        self._take(self.engine.step())
        self.count["steps"] += 1

    def _take(self, deltas: Iterable[SequenceDelta]) -> None:
        for delta in deltas:
            asked = self._asked.get(delta.request_id)
            if asked is None:
                continue
            tokens = asked.tokens.setdefault(delta.index, [])
            tokens += delta.new_token_ids
            self.count["tokens"] += len(delta.new_token_ids)
            if delta.finish_reason is not None:
                assert delta.finish_reason in (FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT), delta
                self._end_sequence(delta.request_id, asked, tokens, delta.finish_reason)

    def _end_sequence(self, request_id: str, asked: Asked, tokens: list[int], reason: FinishReason) -> None:
        asked.num_finished += 1
        if asked.num_finished == asked.params.n:
            del self._asked[request_id]
            self.count["answered"] += 1
        if asked.prompt is None or reason is FinishReason.ABORT:
            return
        self.answers[request_id] = tokens
        if self._reference is not None:
            expected = self._reference[asked.prompt][: asked.params.max_tokens]
            assert tokens == expected, f"prompt {asked.prompt} gave {tokens}, undisturbed it gave {expected}"
            self.count["compared"] += 1
            del self.answers[request_id]


def undisturbed_answers(engine: Engine, pool: list[list[int]]) -> list[list[int]]:
    """The reference: every prompt of the pool, greedy, at full length."""
    load = Workload(engine, pool, random.Random(0), None)
    ids = [load.ask(number, prompt, greedy(LONGEST_ANSWER)) for number, prompt in enumerate(pool)]
    load.finish()
    return [load.answers[request_id] for request_id in ids]
