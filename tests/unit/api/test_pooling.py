"""Requests that generate nothing: what they ask of the engine, what becomes of its answer, and which are refused."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.fake_engine import MODEL_INFO
from tests.pooling_models import eos_tokenizer, yes_no_tokenizer
from tests.text_tokenizers import byte_level_tokenizer
from tests.unit.sched.scheduler_harness import FakeWorker, limits
from tp_engine.api.input_processor import InputProcessor
from tp_engine.api.pooling import Pooler, PoolingParams
from tp_engine.api.scoring import ScorePairs, fields_of, paired
from tp_engine.errors import ConfigError, RequestError
from tp_engine.model_config.classifier import YES_OR_NO, ClassifierSpec, HeadLinear
from tp_engine.model_config.pooling import read_pooling
from tp_engine.plan import POOLS_ALL, POOLS_LAST, StepPlan, StepResult
from tp_engine.requests.outputs import CompletionOutput, RequestOutput
from tp_engine.requests.request import EngineRequest, FinishReason, Pooling
from tp_engine.requests.sampling_params import SamplingParams
from tp_engine.sched.scheduler import Scheduler

EMBED = msgspec.structs.replace(MODEL_INFO, convert="embed", hidden_size=8, dimensions=())
ONE_LABEL = ClassifierSpec(
    labels=("LABEL_0",),
    activation="sigmoid",
    linears=(HeadLinear(name="score", out_size=1, has_bias=False),),
    pad_token_id=0,
)
HEAD = msgspec.structs.replace(MODEL_INFO, convert="classify", classifier=ONE_LABEL, hidden_size=8)
RANK = msgspec.structs.replace(MODEL_INFO, convert="classify", classifier=YES_OR_NO, hidden_size=8)
BROKEN = 9  # the token of which nothing can be made
STATE = np.array([3.0, 0.0, 4.0, 0.0, 0.0, 0.0, 0.0, 12.0], dtype=np.float32)


def output(request_id: str, pooled: Sequence[float]) -> RequestOutput:
    return RequestOutput(
        request_id=request_id, prompt=None, prompt_token_ids=[7, 8], pooled=np.array(pooled, dtype=np.float32)
    )


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, [3 / 13, 0, 4 / 13, 0, 0, 0, 0, 12 / 13]),
        ({"dimensions": 3}, [0.6, 0.0, 0.8]),
        ({"dimensions": 3, "use_activation": False}, [3.0, 0.0, 4.0]),
    ],
)
def test_vectors(params: dict[str, Any], expected: list[float]) -> None:
    """Oracle: by hand, 3-4-5 and 5-12-13; a cut vector has length 1 again."""
    assert PoolingParams(**params).vector(STATE).tolist() == pytest.approx(expected, abs=1e-7)


def test_a_vector_of_zeros_stays_one() -> None:
    """Oracle: no division by zero."""
    assert PoolingParams().vector(STATE * 0).tolist() == [0.0] * 8


def test_errors_name_the_text_that_the_client_sent() -> None:
    """Oracle: the field and the number of the one empty text, for both kinds of models that score."""
    documents = ["a", "b", "", "c"]
    pairs, fields = paired("q", documents), fields_of("q", documents, ("query", "documents"))
    assert fields[1] == ("query", "documents[1]")
    processor = InputProcessor(EMBED, byte_level_tokenizer())
    with pytest.raises(RequestError) as error:
        ScorePairs.of(processor, pairs, request_id="s", fields=fields)
    assert error.value.param == "documents[2]" and "documents[2] is empty" in str(error.value)
    long = ["a", "b" * 5000]
    pairs, fields = paired(["q", "r"], long), fields_of(["q", "r"], long, ("queries", "documents"))
    with pytest.raises(RequestError) as error:
        ScorePairs.of(InputProcessor(RANK, yes_no_tokenizer()), pairs, request_id="s", fields=fields)
    assert error.value.param == "documents[1]"
    with pytest.raises(RequestError) as error:
        Pooler.of(processor).request("", request_id="r", prompt_field="input[3]")
    assert error.value.param == "input[3]"


def test_truncation_from_either_side() -> None:
    """Oracle: transformers, which keeps the special token at the end of a text; token ids are cut as they are."""
    tokenizer = eos_tokenizer()
    processor = InputProcessor(EMBED, tokenizer)
    text = "the quick brown fox"

    def kept(prompt: Any, side: Any) -> list[int]:
        params = PoolingParams(truncate_prompt_tokens=4, truncation_side=side)
        return Pooler.of(processor, params).request(prompt, request_id="r").prompt_token_ids

    plain = tokenizer.encode(text, add_special_tokens=False)
    assert kept(text, "right") == [*plain[:3], tokenizer.eos_token_id]
    assert kept(text, None) == kept(text, "left") == [*plain[-3:], tokenizer.eos_token_id]
    assert kept([5, 6, 7, 8, 9, 1], "right") == [5, 6, 7, 8]
    (request,) = ScorePairs.of(
        InputProcessor(RANK, yes_no_tokenizer()), [("q", "fox " * 100)], request_id="s",
        params=PoolingParams(truncate_prompt_tokens=500, truncation_side="left"),
    ).requests  # fmt: skip
    assert len(request.prompt_token_ids) == 500


@pytest.mark.parametrize(
    ("model", "params", "words"),
    [
        (MODEL_INFO, {}, ("--convert embed",)),
        (RANK, {}, ("--convert embed",)),
        (msgspec.structs.replace(EMBED, dimensions=None), {"dimensions": 4}, ("4", "have 8", "is_matryoshka")),
        (EMBED, {"dimensions": 9}, ("9", "from 1 to 8")),
        (EMBED, {"dimensions": 0}, ("0", "from 1 to 8")),
        (msgspec.structs.replace(EMBED, dimensions=(2, 4)), {"dimensions": 3}, ("3", "one of 2, 4")),
    ],
)
def test_embeddings_that_are_refused(model: Any, params: dict[str, Any], words: Sequence[str]) -> None:
    """Oracle: the message names the value, the rule and the remedy."""
    with pytest.raises(RequestError) as caught:
        Pooler.of(InputProcessor(model, None), params, "embed")
    assert all(word in str(caught.value) for word in words), caught.value


def test_a_model_for_embeddings_generates_no_text() -> None:
    """Oracle: the message names the endpoint."""
    processor = InputProcessor(EMBED, eos_tokenizer())
    with pytest.raises(RequestError, match="/v1/embeddings"):
        processor.process("hi", SamplingParams(), request_id="r")


def test_lengths_of_an_embedded_prompt() -> None:
    """Oracle: the whole context may be the prompt; a longer one is refused, or cut at its beginning."""
    model = msgspec.structs.replace(EMBED, max_model_len=16)
    processor = InputProcessor(model, eos_tokenizer())
    whole = Pooler.of(processor).request(list(range(16)), request_id="r")
    assert whole.prompt_token_ids == list(range(16)) and whole.pooling == Pooling()
    with pytest.raises(RequestError, match=r"17 tokens.*truncate_prompt_tokens"):
        Pooler.of(processor).request(list(range(17)), request_id="r")
    cut = Pooler.of(processor, {"truncate_prompt_tokens": -1}).request(list(range(17)), request_id="r")
    assert cut.prompt_token_ids == list(range(1, 17))
    text = Pooler.of(processor).request("the quick", request_id="r")
    assert text.prompt_token_ids[-1] == eos_tokenizer().eos_token_id


def test_scores_of_a_reranker() -> None:
    """Oracle: the model card's formula; the two ids are those of yes and no; each pair is one prompt."""
    tokenizer = yes_no_tokenizer()
    processor = InputProcessor(RANK, tokenizer)
    pairs = ScorePairs.of(processor, [("q", "first"), ("q", "second")], request_id="s", instruction="Rate!")
    ids = tuple(tokenizer.convert_tokens_to_ids(word) for word in ("yes", "no"))
    assert [request.pooling for request in pairs.requests] == [Pooling(token_ids=ids)] * 2
    text = tokenizer.decode(pairs.requests[1].prompt_token_ids)
    assert "<Instruct>: Rate!\n<Query>: q\n<Document>: second<|im_end|>" in text and text.endswith("</think>\n\n")
    scores = pairs.scores([output("a", [2.0, 1.0]), output("b", [-400.0, 400.0])])
    assert scores == pytest.approx([1 / (1 + np.exp(-1.0)), 0.0])
    first, _ = pairs.outputs([output("a", [0.0, 0.0]), output("b", [9.0, 0.0])])
    assert first.outputs.score == 0.5 and first.prompt_token_ids == [7, 8]


def test_a_reranker_cuts_the_document_and_keeps_its_template() -> None:
    """Oracle: the tokenizer; the last tokens are the template's, whatever is cut."""
    model = msgspec.structs.replace(RANK, max_model_len=600)
    processor = InputProcessor(model, yes_no_tokenizer())

    def prompts(**options: Any) -> list[list[int]]:
        pairs = ScorePairs.of(processor, [("q", "fox " * 100)], request_id="s", **options)
        return [request.prompt_token_ids for request in pairs.requests]

    ((cut,), (fewer,)) = (prompts(params=PoolingParams(truncate_prompt_tokens=500)), prompts(max_tokens_per_doc=5))
    assert len(cut) == 500
    text = yes_no_tokenizer().decode(fewer)
    assert text.count("fox") in (1, 2, 3) and text.endswith("</think>\n\n")
    with pytest.raises(RequestError, match="truncate_prompt_tokens is 10"):
        prompts(params=PoolingParams(truncate_prompt_tokens=10))
    with pytest.raises(RequestError, match="max_tokens_per_doc is 0"):
        prompts(max_tokens_per_doc=0)


def test_scores_of_embeddings() -> None:
    """Oracle: cosines by hand; each distinct text is one request."""
    processor = InputProcessor(EMBED, eos_tokenizer())
    pairs = ScorePairs.of(processor, paired("q", ["a", "b", "a"]), request_id="s")
    assert len(pairs.requests) == 3
    vectors = [output("q", [1.0, 0.0]), output("a", [2.0, 2.0]), output("b", [0.0, 5.0])]
    assert pairs.scores(vectors) == pytest.approx([0.5**0.5, 0.0, 0.5**0.5])
    assert [len(one.prompt_token_ids) for one in pairs.outputs(vectors)] == [4, 4, 4]
    with pytest.raises(RequestError, match="instruction"):
        ScorePairs.of(processor, [("q", "a")], request_id="s", instruction="Rate!")


@pytest.mark.parametrize(
    ("queries", "documents", "text"),
    [("q", [], "documents is empty"), ([], ["d"], "queries is empty"), (["a", "b"], ["d"] * 3, "2 queries for 3")],
)
def test_pairs_that_are_refused(queries: Any, documents: Any, text: str) -> None:
    """Oracle: the message names the counts and the rule."""
    with pytest.raises(RequestError, match=text):
        paired(queries, documents)


@pytest.mark.parametrize(
    ("prompt", "kept"), [([5, 0, 7, 0, 0], [5, 0, 7]), ([5], [5]), ([0, 0], [0]), ([0, 6], [0, 6])]
)
def test_padding_at_the_end_is_not_pooled(prompt: list[int], kept: list[int]) -> None:
    """Oracle: transformers' rule: the rightmost token that is no padding, or the first one; each token has scores of
    its own, padding too."""
    processor = InputProcessor(HEAD, None)
    assert Pooler.of(processor).request(prompt, request_id="r").prompt_token_ids == kept
    assert Pooler.of(processor, None, "token_classify").request(prompt, request_id="r").prompt_token_ids == prompt


@pytest.mark.parametrize(
    ("activation", "scores", "expected"),
    [
        ("softmax", [1000.0, 1000.0, -1000.0], [0.5, 0.5, 0.0]),
        ("sigmoid", [0.0, 1000.0, -1000.0], [0.5, 1.0, 0.0]),
        ("none", [2.0, -3.0, 0.0], [2.0, -3.0, 0.0]),
    ],
)
def test_activations(activation: Any, scores: list[float], expected: list[float]) -> None:
    """Oracle: by hand; large scores overflow nothing, and ``use_activation`` False leaves them as they are."""
    spec = dataclasses.replace(ONE_LABEL, labels=("a", "b", "c"), activation=activation)
    processor = InputProcessor(msgspec.structs.replace(HEAD, classifier=spec), None)
    with np.errstate(all="raise", under="ignore"):
        assert Pooler.of(processor).values(output("r", scores)).tolist() == pytest.approx(expected)
        plain = Pooler.of(processor, {"use_activation": False}).classification(output("r", scores)).outputs
    assert plain.probs == scores and plain.num_classes == 3


def test_scores_of_too_many_tokens_are_refused() -> None:
    """Oracle: 2^20 numbers are the most: 1,024 tokens with 1,024 labels, but not one label more."""
    for num_labels in (1024, 1025):
        spec = dataclasses.replace(ONE_LABEL, labels=tuple(map(str, range(num_labels))))
        processor = InputProcessor(msgspec.structs.replace(HEAD, classifier=spec), None)
        pooler = Pooler.of(processor, None, "token_classify")
        if num_labels == 1024:
            assert pooler.request([5] * 1024, request_id="r").pooling == Pooling(per_token=True)
        else:
            with pytest.raises(RequestError, match=r"prompt has 1024 tokens.* 1025 labels.*at most 1023 tokens"):
                pooler.request([5] * 1024, request_id="r")


def test_results_that_are_none() -> None:
    """Oracle: outputs that are no numbers are the model's fault, an abort is not: both say what to do."""
    pooler = Pooler.of(InputProcessor(HEAD, None))
    failed = RequestOutput(request_id="r", prompt=None, prompt_token_ids=[7])
    with pytest.raises(RuntimeError, match=r"not numbers.*--dtype"):
        pooler.values(failed)
    failed.outputs = [CompletionOutput(index=0, text="", token_ids=[], finish_reason="abort")]
    with pytest.raises(RequestError, match="aborted before its result; send it again"):
        pooler.values(failed)


def test_pairs_of_a_classifier() -> None:
    """Oracle: the tokenizer's own pairs, and a template with the roles query and document; its score is a sigmoid."""
    tokenizer = eos_tokenizer()
    processor = InputProcessor(HEAD, tokenizer)
    pairs = ScorePairs.of(processor, [("q", "first"), ("q", "second one")], request_id="s")
    assert [request.pooling for request in pairs.requests] == [Pooling()] * 2
    assert pairs.requests[1].prompt_token_ids == tokenizer.encode("q", "second one")
    assert pairs.scores([output("a", [0.0]), output("b", [-800.0])]) == [0.5, 0.0]
    cut = ScorePairs.of(
        processor, [("q", "a" * 100)], request_id="s", params=PoolingParams(truncate_prompt_tokens=9)
    ).requests[0]
    assert cut.prompt_token_ids == tokenizer.encode("q", "a" * 100)[:9]
    with pytest.raises(RequestError, match="instruction is 'Rate!'; this model takes none"):
        ScorePairs.of(processor, [("q", "a")], request_id="s", instruction="Rate!")
    with pytest.raises(RequestError, match="reduce its length"):
        ScorePairs.of(processor, [("q", "a" * 5000)], request_id="s")

    written = copy.deepcopy(tokenizer)
    written.chat_template = "{% for m in messages %}{{ m['role'] }}={{ m['content'] }};{% endfor %}"
    assert not InputProcessor(HEAD, written).chat.writes_pairs
    written.chat_template = (
        "{% for m in messages %}{% if m['role'] == 'query' %}Q: {% elif m['role'] == 'document' %}D: {% endif %}"
        "{{ m['content'] }} {% endfor %}"
    )
    processor = InputProcessor(HEAD, written)
    pairs = ScorePairs.of(processor, [("tea", "a drink")], request_id="s", instruction="Rate!")
    assert tokenizer.decode(pairs.requests[0].prompt_token_ids) == "Rate! Q: tea D: a drink "
    with pytest.raises(RequestError, match="set max_tokens_per_doc"):
        params = PoolingParams(truncate_prompt_tokens=9)
        ScorePairs.of(processor, [("tea", "a drink")], request_id="s", params=params)


def test_scores_of_several_labels_are_refused() -> None:
    """Oracle: the number of labels, the rule, and the endpoint to use."""
    for spec, words in (
        (dataclasses.replace(ONE_LABEL, labels=("a", "b")), "has 2 labels"),
        (dataclasses.replace(ONE_LABEL, per_token=True), "gives scores to each token"),
    ):
        processor = InputProcessor(msgspec.structs.replace(HEAD, classifier=spec), eos_tokenizer())
        with pytest.raises(RequestError, match=rf"{words}, and .* one label: .*/classify or /pooling"):
            ScorePairs.of(processor, [("q", "d")], request_id="s")


def test_scores_of_other_models_are_refused() -> None:
    """Oracle: the messages name the remedy: an option, or another model."""
    with pytest.raises(RequestError, match="--convert classify"):
        ScorePairs.of(InputProcessor(MODEL_INFO, yes_no_tokenizer()), [("q", "d")], request_id="s")
    with pytest.raises(RequestError, match="no single tokens for yes and no"):
        ScorePairs.of(InputProcessor(RANK, eos_tokenizer()), [("q", "d")], request_id="s")
    with pytest.raises(RequestError, match="no tokenizer"):
        ScorePairs.of(InputProcessor(RANK, None), [("q", "d")], request_id="s")


def folder_of(folder: Path, pooling: dict[str, Any] | None, **config: object) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    if pooling is not None:
        (folder / "modules.json").write_text("[]")
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return folder


@pytest.mark.parametrize(
    ("name", "pooling", "config", "convert", "expected"),
    [
        ("Qwen/Qwen3-0.6B", None, {}, "auto", ("none", None)),
        ("Qwen/Qwen3-Embedding-0.6B", {"pooling_mode_lasttoken": True}, {}, "auto", ("embed", ())),
        ("some/model", {"pooling_mode": "lasttoken"}, {}, "auto", ("embed", None)),
        ("some/model", {"pooling_mode_lasttoken": True}, {"is_matryoshka": True}, "auto", ("embed", ())),
        ("some/model", None, {"matryoshka_dimensions": [64, 32]}, "embed", ("embed", (32, 64))),
        ("Qwen/Qwen3-Reranker-4B", None, {}, "auto", ("classify", None)),
        ("Qwen/Qwen3-Reranker-4B", {"pooling_mode": "cls"}, {}, "auto", ("classify", None)),
        ("Qwen/Qwen3-Reranker-4B", None, {}, "none", ("none", None)),
        ("some/model", {"pooling_mode_mean_tokens": True}, {}, "none", ("none", None)),
        ("intfloat/e5-mistral-7b-instruct", None, {"architectures": ["MistralModel"]}, "auto", ("embed", None)),
    ],
)
def test_what_a_model_is_for(
    name: str, pooling: dict[str, Any] | None, config: dict[str, Any], convert: str, expected: Any, tmp_path: Path
) -> None:
    """Oracle: the files and names of the models on the hub; an explicit choice wins."""
    found = read_pooling(name, folder_of(tmp_path, pooling, **config), convert)
    assert (found.convert, found.dimensions) == expected


@pytest.mark.parametrize(
    ("place", "convert"),
    [
        ("rerankers/Qwen3-0.6B", "none"),
        ("Qwen3-Reranker-0.6B", "classify"),
        ("models--Qwen--Qwen3-Reranker-0.6B/snapshots/0123", "classify"),
    ],
)
def test_folders_of_rerankers(place: str, convert: str, tmp_path: Path) -> None:
    """Oracle: only a model's own name counts, also in the hub's cache."""
    folder = tmp_path / place
    folder.mkdir(parents=True)
    assert read_pooling(str(folder), folder_of(folder, None), "auto").convert == convert


@pytest.mark.parametrize("pooling", [{"pooling_mode_mean_tokens": True}, {"pooling_mode": "cls"}])
def test_other_poolings_are_refused(pooling: dict[str, Any], tmp_path: Path) -> None:
    """Oracle: the message names the file, the mode and the one that is supported."""
    with pytest.raises(ConfigError, match=r"1_Pooling/config.json: .*(mean_tokens|cls).*lasttoken"):
        read_pooling("some/model", folder_of(tmp_path, pooling), "auto")


class PoolingWorker(FakeWorker):
    """Pools the first token id of each row that pools, or each token id of its chunk."""

    def execute(self, plan: StepPlan) -> StepResult:
        result = super().execute(plan)
        pools = {admission.row: admission.sampling.pools for admission in plan.admitted}
        self.pools = getattr(self, "pools", {}) | pools
        rows = [row for row in plan.prefill_rows[plan.prefill_samples].tolist() if self.pools[row] == POOLS_LAST]
        pooled = {row: np.array(self.rows[row].token_ids[:1], dtype=np.float32) for row in rows}
        for row, count in zip(plan.prefill_rows.tolist(), plan.prefill_tokens.tolist(), strict=True):
            if self.pools[row] == POOLS_ALL:
                end = self.rows[row].computed
                chunk = np.array(self.rows[row].token_ids[end - count : end], dtype=np.float32)
                pooled[row] = np.where(chunk == BROKEN, np.nan, chunk)[:, None]
        return msgspec.structs.replace(result, pooled=pooled)


@pytest.mark.parametrize("ahead", [0, 1])
def test_the_scheduler_ends_pooling_rows_with_their_prompts(ahead: int) -> None:
    """Oracle: prompts of the whole context, beside a row that generates: each gets its own value, with its end.

    One is aborted while its last chunk is computed, and its row's value belongs to none.
    """
    sizes = limits(num_blocks=64, block_size=4, max_model_len=40, max_num_batched_tokens=48)
    scheduler, worker = Scheduler(sizes), PoolingWorker(sizes)
    scheduler.add(EngineRequest(request_id="t", prompt_token_ids=[9, 8], params=SamplingParams(max_tokens=8)))
    params = SamplingParams(max_tokens=1, ignore_eos=True, temperature=0.0)
    for number in (1, 2, 3):
        prompt = [number] * 40
        scheduler.add(EngineRequest(request_id=f"p{number}", prompt_token_ids=prompt, params=params, pooling=Pooling()))
    found: dict[str, list[float]] = {}
    plans: list[StepPlan] = []
    while scheduler.has_unfinished or plans:
        while len(plans) <= ahead and (plan := scheduler.schedule()) is not None:
            plans.append(plan)
        plan = plans.pop(0)
        result = worker.execute(plan)
        if any(values[0] == 2.0 for values in result.pooled.values()):
            scheduler.abort(["p2"])
        for delta in scheduler.update(plan, result):
            if delta.pooled is not None:
                found[delta.request_id] = delta.pooled.tolist()
                assert delta.finish_reason is FinishReason.STOP and not delta.new_token_ids
    assert found == {"p1": [1.0], "p3": [3.0]}
    scheduler.check_integrity()


def test_the_scheduler_joins_what_is_pooled_of_chunks() -> None:
    """Oracle: the prompts, whose tokens are what is pooled: in chunks, behind a cached prefix, which is computed again,
    and after a preemption; what is no number is an error of that request alone."""
    sizes = limits(num_blocks=64, block_size=4, max_model_len=40, max_num_batched_tokens=24)
    scheduler, worker = Scheduler(sizes), PoolingWorker(sizes)
    params = SamplingParams(max_tokens=1, ignore_eos=True, temperature=0.0)
    prompts = {"a": list(range(10, 50)), "b": list(range(10, 42)), "c": [BROKEN, 7]}
    ended: dict[str, Any] = {}
    for number, name in enumerate(("a", "b", "c")):
        scheduler.add(
            EngineRequest(
                request_id=name, prompt_token_ids=prompts[name], params=params, pooling=Pooling(per_token=True)
            )
        )
        for step in range(20):
            plan = scheduler.schedule()
            if plan is None:
                break
            result = worker.execute(plan)
            ended |= {delta.request_id: delta for delta in scheduler.update(plan, result)}
            if number == 0 and step == 0:
                scheduler.preempt_all()
    assert [ended[name].pooled.ravel().tolist() for name in "ab"] == [prompts["a"], prompts["b"]]
    assert (ended["c"].finish_reason, ended["c"].pooled) == (FinishReason.ERROR, None)
    assert "not numbers" in ended["c"].error and ended["c"].error_code is None
    scheduler.check_integrity()
