"""Structured output on a tiny model, from the Python API to the devices' samplers, on one rank and on two.

Oracle of tokens: transformers' full logits, masked by a loop over the grammar library's own bits.  Oracle of texts:
``jsonschema``, ``re`` and the list of choices.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import llguidance
import pytest
import torch

from tests.covers import covers
from tests.services import engine_of, stepping
from tests.text_tokenizers import byte_level_tokenizer
from tests.tiny_models import make_checkpoint
from tests.unit.grammar.structured_cases import Case, cases, choice_case, regex_case, schema_case
from tp_engine import LLM, SamplingParams, StructuredOutputsParams
from tp_engine.engine.engine import Engine
from tp_engine.features.structured_output.feature import MASKS
from tp_engine.plan import StepPlan
from tp_engine.requests.outputs import RequestOutput
from tp_engine.requests.request import EngineRequest, FinishReason, SequenceDelta

pytestmark = pytest.mark.usefixtures("warm_children")

VOCAB, EOS = 384, 1
PROMPT = "the quick brown fox jumps over the lazy dog, again"
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 4}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
ROOMY: dict[str, Any] = {"max_model_len": 256, "num_gpu_blocks_override": 512, "max_num_seqs": 128, "block_size": 8}
# Prompts run in chunks, and the cache is too small for all sequences of one call at once.
TIGHT = ROOMY | {"num_gpu_blocks_override": 40, "max_num_seqs": 24, "max_num_batched_tokens": 32}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = make_checkpoint(tmp_path_factory.mktemp("model"), "qwen3", vocab_size=VOCAB, eos_token_id=EOS)
    byte_level_tokenizer().save_pretrained(made)
    return made


def start(folder: Path, options: dict[str, Any]) -> LLM:
    return LLM(str(folder), device="cpu", dtype="float32", **options)


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    """One rank with a small cache."""
    with start(folder, TIGHT) as engine:
        yield engine
        engine.engine.check_integrity()
        assert engine.engine.stats().num_used_blocks == 0


@pytest.fixture(scope="module")
def two_ranks(folder: Path) -> Iterator[LLM]:
    """Two ranks with room for all sequences; rank 0 sends plans ahead."""
    with start(folder, {**ROOMY, "tensor_parallel_size": 2}) as engine:
        yield engine
        assert engine.engine.stats().num_used_blocks == 0


def generate(llm: LLM, params: list[SamplingParams], *, is_shared: bool = True) -> list[RequestOutput]:
    prompts = [PROMPT if is_shared else f"{number} {PROMPT}" for number in range(len(params))]
    return llm.generate(prompts, params, use_tqdm=False)


def greedy(structured: StructuredOutputsParams | None, **options: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, structured_outputs=structured, **{"max_tokens": 60, **options})


CONSTRAINTS: list[Case] = [
    schema_case(PERSON),
    regex_case("[a-c]{3,7}-[0-9]{2}x"),
    choice_case(["yes", "no", "maybe 世界"]),
    (StructuredOutputsParams(grammar='root ::= "a" ("b" | "c") root | "end"'), lambda text: text.endswith("end")),
]


class Oracle:
    """Greedy decoding, one full pass per token, under the library's own masks."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.tokens = llguidance.LLTokenizer((folder / "tokenizer.json").read_text(), n_vocab=VOCAB, eos_token=[EOS])

    def logits(self, token_ids: list[int]) -> torch.Tensor:
        with torch.no_grad():
            found: torch.Tensor = self.model(torch.tensor([token_ids])).logits[0, -1]
        return found

    def tokens_under(self, grammar: str, prompt: list[int], max_tokens: int = 60) -> list[int]:
        matcher = llguidance.LLMatcher(self.tokens, grammar)
        generated: list[int] = []
        while len(generated) < max_tokens and not matcher.is_stopped():
            bits = matcher.compute_bitmask()
            logits = self.logits([*prompt, *generated])
            for token_id in range(VOCAB):
                if not bits[token_id // 8] >> (token_id % 8) & 1:
                    logits[token_id] = -torch.inf
            generated.append(int(logits.argmax()))
            assert matcher.consume_token(generated[-1])
        return generated


def library_grammar(params: StructuredOutputsParams) -> str:
    """The grammar, made with the library's own functions."""
    if params.json is not None:
        schema = params.json if isinstance(params.json, str) else dict(params.json)
        return str(llguidance.LLMatcher.grammar_from_json_schema(schema, {"whitespace_flexible": False}))
    if params.regex is not None:
        return str(llguidance.LLMatcher.grammar_from_regex(params.regex))
    text: Any = params.choice or params.grammar
    return str(llguidance.grammar_from("choice" if params.choice else "grammar", text))


@covers("grammars", lambda: [("qwen3", 1), ("qwen3", 2)])
def test_tokens_are_those_of_masked_full_logits(llm: LLM, two_ranks: LLM, folder: Path) -> None:
    """Oracle: masked full logits; a request without structure, in the same steps, gets the tokens of a run alone."""
    oracle, plain = Oracle(folder), greedy(None, max_tokens=30, ignore_eos=True)
    for engine in (llm, two_ranks):
        (alone,) = generate(engine, [plain])
        *outputs, beside = generate(engine, [*(greedy(params) for params, _ in CONSTRAINTS), plain])
        for (params, judge), output in zip(CONSTRAINTS, outputs, strict=True):
            found = output.outputs[0]
            assert found.token_ids == oracle.tokens_under(library_grammar(params), output.prompt_token_ids)
            assert judge(found.text) == (found.finish_reason == "stop")
            assert found.finish_reason == "stop" or len(found.token_ids) == 60
        assert beside.outputs[0].token_ids == alone.outputs[0].token_ids


WAYS: list[dict[str, Any]] = [
    {"temperature": 1.5},
    {"temperature": 2.0, "top_k": 5},
    {"temperature": 2.0, "top_p": 0.8},
    {"temperature": 1.5, "min_p": 0.02, "repetition_penalty": 1.2},
    {"temperature": 0.0, "frequency_penalty": 0.5, "logprobs": 2},
    {"temperature": 1.0, "logit_bias": {40: 5.0}, "seed": 5},
]


def test_random_constraints_in_every_way_of_sampling(llm: LLM, two_ranks: LLM) -> None:
    """Oracle: the constraints, for every complete output; chunks, preemption, forks and two ranks change no token."""
    asked = [*(regex_case("[a-z]{60,70}") for _ in range(10)), *cases(7, 54)]
    params = [
        SamplingParams(structured_outputs=one, max_tokens=120, n=1 + i % 2, **{"seed": i, **WAYS[i % len(WAYS)]})
        for i, (one, _) in enumerate(asked)
    ]
    before = llm.engine.stats().num_preemptions
    tight, roomy = (generate(engine, params, is_shared=False) for engine in (llm, two_ranks))
    assert llm.engine.stats().num_preemptions > before
    num_complete = 0
    for (constraint, judge), one, other in zip(asked, tight, roomy, strict=True):
        assert [c.token_ids for c in one.outputs] == [c.token_ids for c in other.outputs]
        for completion in one.outputs:
            num_complete += completion.finish_reason == "stop"
            assert completion.finish_reason == "length" or judge(completion.text), (constraint, completion.text)
    assert num_complete > 60, num_complete


def test_plans_too_large_for_the_ring_wait_for_the_step_in_flight(
    llm: LLM, two_ranks: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: one rank's tokens; every plan with a mask waited while a step was in flight."""
    engine, held = engine_of(two_ranks), []
    publisher = engine._publisher
    assert publisher is not None
    is_large = publisher.may_block
    monkeypatch.setattr(publisher, "_ample_bytes", 0)  # every plan is too large; only plans with a mask wait
    monkeypatch.setattr(publisher, "may_block", lambda plan: MASKS.of(plan).size > 0 and is_large(plan))
    send = engine._send

    def watched(plan: StepPlan) -> None:
        held.append((publisher.may_block(plan), len(engine._sent) + len(engine._launched)))
        send(plan)

    monkeypatch.setattr(engine, "_send", watched)
    params = [greedy(None, max_tokens=n, ignore_eos=True) for n in (30, 31, 32)]
    params[1:1] = [greedy(constraint) for constraint, _ in CONSTRAINTS[:2]]
    outputs = [generate(one, params, is_shared=False) for one in (llm, two_ranks)]
    assert [o.outputs[0].token_ids for o in outputs[0]] == [o.outputs[0].token_ids for o in outputs[1]]
    assert (True, 0) in held and (True, 1) not in held and (False, 1) in held


def test_where_outputs_end(llm: LLM) -> None:
    """Oracle: a limit cuts; a stop string ends; the end of the grammar ends, whatever min_tokens and ignore_eos say."""
    letters = StructuredOutputsParams(regex="(abc){9}")
    digits = StructuredOutputsParams(regex="[0-9]*")
    cut, stopped, ended, endless = generate(
        llm,
        [
            greedy(letters, max_tokens=7),
            greedy(letters, stop=["cab"]),
            greedy(StructuredOutputsParams(choice=["ab"]), min_tokens=20, ignore_eos=True),
            greedy(digits, ignore_eos=True, max_tokens=25),
        ],
    )
    assert ("abc" * 9).startswith(cut.outputs[0].text) and cut.outputs[0].finish_reason == "length"
    assert (stopped.outputs[0].text, stopped.outputs[0].finish_reason) == ("ab", "stop")
    assert stopped.outputs[0].stop_reason == "cab"
    assert (ended.outputs[0].text, ended.outputs[0].finish_reason) == ("ab", "stop")
    assert re.fullmatch("[0-9]+", endless.outputs[0].text) and len(endless.outputs[0].token_ids) == 25


def test_log_probabilities_are_the_models_own(llm: LLM, folder: Path) -> None:
    """Oracle: transformers' log-softmax of raw logits; the chosen tokens are far from the likeliest ones."""
    oracle, constraint = Oracle(folder), StructuredOutputsParams(choice=["zebra"])
    (output,) = generate(llm, [greedy(constraint, logprobs=1)])
    found, known = output.outputs[0], list(output.prompt_token_ids)
    assert found.logprobs is not None and found.text == "zebra"
    for token_id, scores in zip(found.token_ids, found.logprobs, strict=True):
        expected = torch.log_softmax(oracle.logits(known), -1)
        assert scores[token_id].logprob == pytest.approx(float(expected[token_id]), abs=1e-4)
        assert int(expected.argmax()) in scores
        known.append(token_id)


def run_until(engine: Engine, is_done: Callable[[list[SequenceDelta]], bool]) -> list[SequenceDelta]:
    deltas: list[SequenceDelta] = []
    while not is_done(deltas):
        assert engine.has_unfinished
        deltas += engine.step()
    return deltas


@pytest.mark.slow
def test_a_grammar_that_only_the_compiler_refuses(llm: LLM) -> None:
    """Oracle: an unchecked request with a bad grammar ends with its own error; the next one is served; a third is
    aborted."""

    def request(name: str, constraint: StructuredOutputsParams) -> EngineRequest:
        params = greedy(constraint)
        return EngineRequest(request_id=name, prompt_token_ids=[5, 6], params=params, eos_token_ids=(EOS,))

    with stepping(llm) as engine:
        engine.add_request(request("bad", StructuredOutputsParams(json={"$ref": "#"})))
        engine.add_request(request("good", StructuredOutputsParams(regex="good|fine")))
        engine.add_request(request("gone", StructuredOutputsParams(regex="[a-z]{40}")))
        (gone,) = engine.abort(["gone"])
        assert gone.finish_reason is FinishReason.ABORT
        deltas = run_until(engine, lambda found: sum(delta.finish_reason is not None for delta in found) == 2)
    ends = {delta.request_id: delta for delta in deltas if delta.finish_reason is not None}
    assert ends["bad"].finish_reason is FinishReason.ERROR and "no output fits it" in str(ends["bad"].error)
    assert ends["good"].finish_reason is FinishReason.STOP
    assert not llm.engine.has_unfinished
