"""From the engine's deltas to text; the fake engine is the source."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.fake_engine import FakeEngine, says
from tests.text_tokenizers import byte_fallback_tokenizer, byte_level_tokenizer
from tp_engine.api.output_streams import Outputs, Processed
from tp_engine.api.request_state import SequenceUpdate
from tp_engine.engine.sequence_text import SequenceText
from tp_engine.requests.outputs import Logprob, RequestOutput
from tp_engine.requests.request import EngineRequest, FinishReason, SequenceDelta
from tp_engine.requests.sampling_params import SamplingParams

TOKENIZER = byte_level_tokenizer()
EOS = 1


def ids_of(text: str) -> list[int]:
    return list(TOKENIZER.encode(text, add_special_tokens=False))


def make_request(request_id: str = "r", prompt: list[int] | None = None, **params: Any) -> EngineRequest:
    return EngineRequest(
        request_id=request_id,
        prompt_token_ids=prompt or [5, 6, 7],
        params=SamplingParams(**{"max_tokens": 100, **params}),
        eos_token_ids=(EOS,),
        arrival_s=1000.0,
    )


class Job:
    """Runs requests to their end through the output streams, and keeps all output."""

    def __init__(self, token_ids: list[int], *requests: EngineRequest, tokenizer: Any = TOKENIZER) -> None:
        self.engine = FakeEngine(says(token_ids))
        self.streams = Outputs(tokenizer)
        self.updates: list[SequenceUpdate] = []
        self.outputs: dict[str, RequestOutput] = {}
        for request in requests:
            self.engine.add_request(request)
            self.streams.add(request)
        while self.engine.has_unfinished:
            self._take(self.streams.process(self.engine.step()))

    def _take(self, processed: Processed) -> None:
        self.updates += processed.updates
        self.outputs |= {output.request_id: output for output in processed.finished}
        if processed.aborts:
            assert not self.streams.process(self.engine.abort(processed.aborts)).updates

    def text(self, index: int = 0) -> str:
        return "".join(update.text for update in self.updates if update.index == index)


@pytest.mark.parametrize("text", ["the quick 😀 世界 e\u0301nd", "", "a"])
def test_streams_equal_the_output_and_the_text(text: str) -> None:
    """Oracle: the text of the engine's ids; EOS is among the ids and not in the text."""
    job = Job(ids_of(text), make_request())
    completion = job.outputs["r"].outputs[0]
    assert job.text() == completion.text == text
    assert completion.token_ids == [*ids_of(text), EOS]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", None)
    assert job.updates[-1].request_output is job.outputs["r"] and len(job.streams) == 0
    assert [update.num_output_tokens for update in job.updates] == list(range(1, len(completion.token_ids) + 1))


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("include", [True, False])
def test_text_of_stop_tokens(skip: bool, include: bool) -> None:
    """Oracle: EOS is shown only if special tokens and the stop are; an ordinary stop token, if the stop is."""
    shown: dict[str, Any] = {"skip_special_tokens": skip, "include_stop_str_in_output": include}
    eos = Job(ids_of("the"), make_request(**shown)).outputs["r"].outputs[0]
    assert eos.text == ("the</s>" if include and not skip else "the")
    stop_id = ids_of("x")[0]
    stop = Job(ids_of("the x z"), make_request(stop_token_ids=[stop_id], **shown)).outputs["r"].outputs[0]
    assert (stop.text, stop.stop_reason) == ("the x" if include else "the ", stop_id)
    assert stop.token_ids[-1] == stop_id


def test_a_special_token_that_does_not_stop() -> None:
    """With ignore_eos, EOS is an ordinary token, whose text follows skip_special_tokens. Oracle: by hand."""
    ids = [*ids_of("a"), EOS, *ids_of("b")]
    for skip, text in ((True, "ab"), (False, "a</s>b</s>")):
        request = make_request(ignore_eos=True, skip_special_tokens=skip)
        assert Job(ids, request).outputs["r"].outputs[0].text == text


@pytest.mark.parametrize("include", [True, False])
def test_a_stop_string_cuts_text_and_tokens(include: bool) -> None:
    """Oracle: the text up to the stop; the tokens up to the one that completed it; the engine gets an abort."""
    text = "the quick brown stop and more"
    job = Job(ids_of(text), make_request(stop=["zzz", "brown st"], include_stop_str_in_output=include))
    completion = job.outputs["r"].outputs[0]
    assert completion.text == job.text() == ("the quick brown st" if include else "the quick ")
    assert (completion.finish_reason, completion.stop_reason) == ("stop", "brown st")
    decoded = TOKENIZER.decode(completion.token_ids)
    assert text.startswith(decoded) and "brown st" in decoded
    assert "brown st" not in TOKENIZER.decode(completion.token_ids[:-1])
    assert job.engine.aborted == ["r"]


def test_what_may_begin_a_stop_string_is_shown_at_the_end() -> None:
    """Oracle: a text that ends with half a stop string, by EOS and by length."""
    assert Job(ids_of("well sto"), make_request(stop="stop")).text() == "well sto"
    ids = ids_of("well sto")
    assert Job(ids, make_request(stop="stop", max_tokens=len(ids))).text() == "well sto"


def test_a_stop_string_completed_by_the_last_token_wins_over_length() -> None:
    """Oracle: both end at the same token; the reason is the stop, and no abort is needed."""
    ids = ids_of("well stop")
    job = Job(ids, make_request(stop="stop", max_tokens=len(ids)))
    completion = job.outputs["r"].outputs[0]
    assert (completion.text, completion.finish_reason, completion.stop_reason) == ("well ", "stop", "stop")
    assert job.engine.aborted == []


def test_a_stop_string_in_held_bytes_is_found_at_the_end() -> None:
    """Byte fallback holds a run of bytes; the stop in it is found when the run is flushed. Oracle: by hand."""
    tokenizer = byte_fallback_tokenizer()
    ids = tokenizer.encode("a😀", add_special_tokens=False)
    completion = Job(ids, make_request(stop="😀"), tokenizer=tokenizer).outputs["r"].outputs[0]
    assert (completion.text, completion.stop_reason) == ("a", "😀")


def test_min_tokens_lets_early_stop_strings_pass() -> None:
    """Oracle: with min_tokens at the end of the first stop, the second stop counts."""
    text = "a stop b stop c"
    num_first = len(ids_of("a stop"))
    job = Job(ids_of(text), make_request(stop="stop", min_tokens=num_first))
    assert job.outputs["r"].outputs[0].text == "a stop b "
    assert Job(ids_of(text), make_request(stop="stop", min_tokens=1)).outputs["r"].outputs[0].text == "a "


def test_n_sequences_end_by_themselves() -> None:
    """Oracle: deltas by hand; a stopped sequence ignores later tokens; the abort follows when all have stopped."""
    outputs = Outputs(TOKENIZER)
    outputs.add(make_request(n=2, stop="x"), "the prompt")
    ids_x, ids_a = ids_of("x"), ids_of("a")

    def step(*pairs: tuple[int, list[int], FinishReason | None]) -> Processed:
        return outputs.process(
            SequenceDelta(request_id="r", index=index, new_token_ids=ids, finish_reason=reason)
            for index, ids, reason in pairs
        )

    first = step((0, ids_a + ids_x + ids_a, None), (1, ids_a, None))
    assert [(u.index, u.text, u.token_ids, u.finish_reason) for u in first.updates] == [
        (0, "a", ids_a + ids_x, "stop"),
        (1, "a", ids_a, None),
    ]
    assert (first.aborts, first.finished) == ([], [])
    second = step((0, ids_a, None), (1, [EOS], FinishReason.STOP))
    assert [u.index for u in second.updates] == [1]
    assert second.aborts == ["r"]
    output = second.finished[0]
    assert output.prompt == "the prompt" and [o.text for o in output.outputs] == ["a", "a"]
    assert step((0, ids_a, FinishReason.ABORT)).updates == []


def test_abort_and_error_end_a_request() -> None:
    """Oracle: the engine's finish reasons pass through, held text is shown, and no second abort is sent."""
    for reason, error in ((FinishReason.ABORT, None), (FinishReason.ERROR, "rank 1: broke")):
        outputs = Outputs(TOKENIZER)
        outputs.add(make_request(stop="stop"))
        deltas = [
            SequenceDelta(request_id="r", index=0, new_token_ids=ids_of("a st")),
            SequenceDelta(request_id="r", index=0, new_token_ids=[], finish_reason=reason, error=error),
        ]
        processed = outputs.process(deltas)
        last = processed.updates[-1]
        assert (last.text, last.finish_reason, last.error) == ("st", reason.value, error)
        assert processed.finished[0].outputs[0].text == "a st" and processed.aborts == []


def test_logprobs() -> None:
    """Oracle: the fake engine's rule: the chosen token has -0.5 and rank 1, each next id 0.5 less."""
    ids = ids_of("a世")
    job = Job(ids, make_request(logprobs=2, prompt_logprobs=1, prompt=[5, 6, 7]))
    output, first = job.outputs["r"], ids[0]
    completion = output.outputs[0]
    assert completion.logprobs is not None and len(completion.logprobs) == len(ids) + 1
    assert completion.logprobs[0] == {
        first: Logprob(logprob=-0.5, rank=1, decoded_token="a"),
        first + 1: Logprob(logprob=-1.0, rank=2, decoded_token=TOKENIZER.decode([first + 1])),
    }
    assert completion.cumulative_logprob == pytest.approx(-0.5 * (len(ids) + 1))
    assert [position for update in job.updates for position in update.logprobs or []] == completion.logprobs
    assert output.prompt_logprobs is not None and output.prompt_logprobs[0] is None
    assert [next(iter(position)) for position in output.prompt_logprobs[1:] if position] == [6, 7]


def test_logprobs_zero_and_none() -> None:
    """Oracle: 0 gives the chosen token alone; None gives no scores; a prompt of one token has no position to score."""
    chosen = Job([9], make_request(logprobs=0, prompt_logprobs=0, prompt=[5])).outputs["r"]
    assert [list(position) for position in chosen.outputs[0].logprobs or []] == [[9], [EOS]]
    assert chosen.prompt_logprobs == [None]
    nothing = Job([9], make_request()).outputs["r"]
    assert (nothing.outputs[0].logprobs, nothing.outputs[0].cumulative_logprob) == (None, None)
    assert nothing.prompt_logprobs is None


def test_logprobs_end_with_the_tokens_at_a_stop_string() -> None:
    """Oracle: one position per kept token."""
    completion = Job(ids_of("the stop more"), make_request(stop="stop", logprobs=1)).outputs["r"].outputs[0]
    assert completion.logprobs is not None and len(completion.logprobs) == len(completion.token_ids)


def test_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: times by hand, on a clock that the test moves; TPOT is the mean after the first token."""
    outputs = Outputs(None)
    request = make_request()
    outputs.add(request)
    now_s = request.arrival_s + 0.25
    monkeypatch.setattr("tp_engine.api.output_streams.time", SimpleNamespace(monotonic=lambda: now_s))
    first = SequenceDelta(
        request_id="r", index=0, new_token_ids=[5], num_cached_tokens=2, first_scheduled_s=request.arrival_s + 0.001
    )
    outputs.process([first])
    now_s += 0.125
    last = SequenceDelta(request_id="r", index=0, new_token_ids=[6, 7], finish_reason=FinishReason.LENGTH)
    output = outputs.process([last]).finished[0]
    metrics = output.metrics
    assert metrics is not None and output.num_cached_tokens == 2
    assert metrics.queue_s == pytest.approx(0.001)
    assert [metrics.ttft_s, metrics.tpot_s, metrics.e2e_s] == pytest.approx([0.25, 0.125 / 2, 0.375])


def test_without_a_tokenizer_ids_and_logprobs_still_come() -> None:
    """Oracle: the engine's ids."""
    output = Job([5, 6], make_request(logprobs=0, stop="x"), tokenizer=None).outputs["r"]
    assert (output.outputs[0].text, output.outputs[0].token_ids) == ("", [5, 6, EOS])
    assert output.outputs[0].logprobs is not None
    assert output.outputs[0].logprobs[0][5].decoded_token is None


def test_so_far_is_a_copy() -> None:
    """Oracle: a snapshot lacks later tokens; a request that has ended or never existed has none."""
    outputs = Outputs(TOKENIZER)
    outputs.add(make_request())
    outputs.process([SequenceDelta(request_id="r", index=0, new_token_ids=ids_of("the"))])
    so_far = outputs.so_far("r")
    outputs.process([SequenceDelta(request_id="r", index=0, new_token_ids=ids_of(" fox"))])
    assert so_far is not None and (so_far.outputs[0].text, so_far.finished) == ("the", False)
    outputs.forget("r")
    outputs.forget("r")
    assert outputs.so_far("r") is None


def test_a_sequence_costs_nothing_before_its_first_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """A body may ask for 200,000 sequences, of which 256 run.  Oracle: a count; those that never began are there in the
    end, with what an aborted one has."""
    made = []

    class Counted(SequenceText):
        def __init__(self, *arguments: Any) -> None:
            made.append(1)
            super().__init__(*arguments)

    monkeypatch.setattr("tp_engine.api.request_state.SequenceText", Counted)
    outputs = Outputs(TOKENIZER)
    outputs.add(make_request(n=1000, logprobs=1))
    assert not made
    outputs.process([SequenceDelta(request_id="r", index=7, new_token_ids=ids_of("the"))])
    assert len(made) == 1
    ends = [
        SequenceDelta(request_id="r", index=index, new_token_ids=[], finish_reason=FinishReason.ABORT)
        for index in range(1000)
    ]
    (output,) = outputs.process(ends).finished
    assert [one.index for one in output.outputs] == list(range(1000))
    assert {(one.text, one.finish_reason, one.cumulative_logprob) for one in output.outputs} == {
        ("", "abort", 0.0), ("the", "abort", 0.0),
    }  # fmt: skip
    assert all(one.logprobs == [] for one in output.outputs)
