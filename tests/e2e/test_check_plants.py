"""``tp-engine check`` finds faults that only sampling, decodes or a resumed answer have, and places them; a right model
with an odd tokenizer raises no alarm.

The faults are planted in this process, whose engine has one rank.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from tests.e2e.test_check import OPTIONS, VOCAB_SIZE, check, wrong
from tp_engine.apps.check import observed
from tp_engine.apps.check.engine_check import EngineCheck
from tp_engine.apps.check.report import CheckStatus
from tp_engine.apps.check.set_ups import OTHERS, PREEMPTED_ANSWERS
from tp_engine.layers.experts import Experts
from tp_engine.sampling.state import SamplingState
from tp_engine.sched.scheduler_state import SchedulerState

pytestmark = pytest.mark.usefixtures("warm_children")


def test_doubled_temperatures_are_found(checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: transformers' logits, and binomial counts; nothing else is wrong."""
    admit = SamplingState.admit

    def hotter(self: SamplingState, row: int, sampling: Any, *known: Any) -> None:
        admit(self, row, msgspec.structs.replace(sampling, temperature=2 * sampling.temperature), *known)

    monkeypatch.setattr(SamplingState, "admit", hotter)
    report = check(checkpoint("llama", vocab_size=VOCAB_SIZE))
    assert report.exit_code == 1 and set(wrong(report)) == {"sampling"}, report.as_text()


@pytest.mark.parametrize("only_decodes", [True, False])
def test_exchanged_experts_name_layer_and_part(
    only_decodes: bool, checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: by hand: pairs of experts of the last layer are exchanged where a step has one token, or in all steps."""
    forward, made = Experts.forward, list[Experts]()
    init = Experts.__init__

    def noted(self: Experts, *given: Any, **named: Any) -> None:
        init(self, *given, **named)
        made.append(self)

    def exchanged(self: Experts, x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        if self is made[-1] and (len(x) == 1 or not only_decodes):
            logits = logits.clone()
            logits[:, :4] = logits[:, [1, 0, 3, 2]]
        return forward(self, x, logits)

    monkeypatch.setattr(Experts, "__init__", noted)
    monkeypatch.setattr(Experts, "forward", exchanged)
    report = check(checkpoint("qwen3-moe", vocab_size=VOCAB_SIZE), enforce_eager=True)
    found = wrong(report)["hidden states"]
    assert report.exit_code == 1 and "layer 2, experts, rank 0" in found.place, report.as_text()
    assert found.place.endswith("(answer)") is only_decodes


@pytest.mark.parametrize("is_planted", [False, True])
def test_an_answer_that_resumes_wrongly_is_found(
    is_planted: bool, checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: transformers; only sequences that were preempted while decoding resume with another token."""
    preempt = SchedulerState.preempt

    def spoilt(self: SchedulerState, sequence: Any, *why: str) -> None:
        preempt(self, sequence, *why)
        if is_planted and len(sequence.token_ids) - sequence.num_prompt_tokens > 1:
            sequence.token_ids = sequence.token_ids.copy()
            sequence.token_ids[-1] = (sequence.token_ids[-1] + 1) % VOCAB_SIZE

    monkeypatch.setattr(SchedulerState, "preempt", spoilt)
    monkeypatch.setattr(observed, "OTHERS", {PREEMPTED_ANSWERS: OTHERS[PREEMPTED_ANSWERS]})
    options = {"model": str(checkpoint("llama", vocab_size=VOCAB_SIZE)), **OPTIONS}
    report, _ = EngineCheck(options=options).run()
    found = {one.name: one.status for one in report.findings}
    assert found[PREEMPTED_ANSWERS] is (CheckStatus.WRONG if is_planted else CheckStatus.RIGHT), report.as_text()
    assert found["processed logprobs"] is CheckStatus.RIGHT, report.as_text()
    assert report.exit_code == int(is_planted)


@pytest.mark.parametrize("kind", ["no tokens", "words"])
def test_an_odd_tokenizer_raises_no_alarm(kind: str, checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """Oracle: the model is right; a tokenizer that makes no tokens, or that the grammar library does not know, is no
    fault of it: the exit code is 0."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path / "model"
    shutil.copytree(checkpoint("llama", vocab_size=VOCAB_SIZE), folder)
    words = {} if kind == "no tokens" else {"<unk>": 0, "the": 5, "harbour": 6}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    if kind == "no tokens":
        tokenizer = Tokenizer(models.BPE())
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": 2}))
    report = check(folder)
    assert report.exit_code == 0, report.as_text()
