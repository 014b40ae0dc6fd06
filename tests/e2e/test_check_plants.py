"""``tp-engine check`` finds faults that only sampling, decodes, hits, forks or resumed answers have, and places them; a
right model with an odd tokenizer raises no alarm.

The faults of ``tests.planted`` are planted in this process, whose engine has one rank, or in the second rank of two.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e.test_check import OPTIONS, VOCAB_SIZE, check, wrong
from tests.planted import PLANT, plant
from tests.tiers import slow_but
from tp_engine.apps.check import observed
from tp_engine.apps.check.engine_check import EngineCheck
from tp_engine.apps.check.report import CheckStatus
from tp_engine.apps.check.set_ups import CACHED, OTHERS, PREEMPTED_ANSWERS, SEVERAL
from tp_engine.layers.experts import Experts

pytestmark = pytest.mark.usefixtures("warm_children")


# Plant -> set-ups with an engine of its own that are tried, what is wrong, and words of its place.  Whatever else is
# wrong follows from it.
ALL_RANKS: dict[str, tuple[tuple[str, ...], str, str]] = {
    "rope theta": ((), "hidden states", "layer 0, attention, rank 0, position 1 "),
    "norm eps": ((), "hidden states", "layer 0, attention, rank 0, position 0 "),
    "scale of q": ((), "hidden states", "layer 0, attention, rank 0"),
    "heads rolled": ((), "hidden states", "layer 0, attention, rank 0"),
    "positions of decodes": ((), "alone", "(answer)"),
    "decodes attend otherwise": (
        (),
        "hidden states",
        "layer 0, attention, rank 0, position 96 of prompt 'long' (answer)",
    ),
    "logits rolled": ((), "norm and output head", "output head"),
    "positions of later chunks": (("in chunks",), "in chunks", "prompt"),
    "positions behind a hit": ((), CACHED, "prompt"),
    "hit's second block is the first": ((), CACHED, "prompt"),
    "hit without parent": ((), CACHED, "prompt 'crossed'"),
    "copies are lost": ((), SEVERAL, "prompt"),
    "resumes with another token": ((PREEMPTED_ANSWERS,), PREEMPTED_ANSWERS, "(answer)"),
    "stale after preemption": ((PREEMPTED_ANSWERS,), PREEMPTED_ANSWERS, ""),
    "temperature ignored": ((), "sampling", ""),
    "temperature doubled": ((), "sampling", ""),
    "top_p ignored": ((), "sampling", "top_p"),
    "top_p one short": ((), "sampling", "top_p 0.55 of few"),
    "top_p of the other side": ((), "sampling", "top_p"),
    "top_k one more": ((), "sampling", "top_k"),
    "min_p ignored": ((), "sampling", "min_p"),
    "repetition penalty ignored": ((), "sampling", "penalt"),
    "presence penalty turned": ((), "sampling", "penalties"),
    "seeds alike": ((), "sampling", ""),
}
FAST = ("hit without parent", "copies are lost", "top_p one short", "presence penalty turned")
ALONE_WRONG = ("hit without parent", "copies are lost", "resumes with another token")
RANK_1 = {
    "rope theta": ("hidden states", "rank 1 (what self_attn.o_proj reads), position 1 "),
    "norm eps": ("hidden states", "rank 1 "),
    "scale of q": ("hidden states", "rank 1 (what self_attn.o_proj reads)"),
    "heads rolled": ("hidden states", "rank 1 (what self_attn.o_proj reads)"),
    "decodes attend otherwise": ("hidden states", "rank 1"),
    "rank's part missing in decodes": ("hidden states", "(answer)"),
    "positions of later chunks": (SEVERAL, "prompt"),
    "positions behind a hit": (CACHED, "prompt"),
    "logits rolled": ("norm and output head", "rank 1's slice of the vocabulary"),
}


@pytest.mark.parametrize("name", slow_but(FAST, ALL_RANKS))
def test_a_plant_is_told(name: str, checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: transformers; the finding, and its place, are those of what was planted."""
    others, finding, words = ALL_RANKS[name]
    folder = checkpoint("llama", vocab_size=VOCAB_SIZE)
    monkeypatch.setattr(observed, "OTHERS", {one: OTHERS[one] for one in others})
    plant(name, lambda owner, what, new: monkeypatch.setattr(owner, what, new(getattr(owner, what))))
    options = {"model": str(folder), **OPTIONS, "enforce_eager": True}
    report, _ = EngineCheck(options=options, quick=not others).run()
    found = wrong(report)
    assert report.exit_code == 1 and finding in found and words in found[finding].place, report.as_text()
    if name in ALONE_WRONG or finding == "sampling":
        assert set(found) == {finding}, report.as_text()


@pytest.mark.slow
@pytest.mark.parametrize("name", RANK_1)
def test_a_plant_in_the_second_rank_is_told(
    name: str, checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: transformers; the rank is named where only its own part of a sum, or of the logits, is wrong."""
    finding, words = RANK_1[name]
    monkeypatch.setenv(PLANT, name)
    report = check(checkpoint("llama", vocab_size=VOCAB_SIZE), tensor_parallel_size=2, enforce_eager=True)
    found = wrong(report)
    assert report.exit_code == 1 and finding in found and words in found[finding].place, report.as_text()


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

    def exchanged(self: Experts, x: torch.Tensor, logits: torch.Tensor, *given: Any) -> torch.Tensor:
        if self is made[-1] and (len(x) == 1 or not only_decodes):
            logits = logits.clone()
            logits[:, :4] = logits[:, [1, 0, 3, 2]]
        return forward(self, x, logits, *given)

    monkeypatch.setattr(Experts, "__init__", noted)
    monkeypatch.setattr(Experts, "forward", exchanged)
    report = check(checkpoint("qwen3-moe", vocab_size=VOCAB_SIZE), enforce_eager=True)
    found = wrong(report)["hidden states"]
    assert report.exit_code == 1 and "layer 2, experts, rank 0" in found.place, report.as_text()
    assert found.place.endswith("(answer)") is only_decodes


def test_an_answer_that_resumes_rightly_raises_no_alarm(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: transformers; sequences were preempted while decoding."""
    monkeypatch.setattr(observed, "OTHERS", {PREEMPTED_ANSWERS: OTHERS[PREEMPTED_ANSWERS]})
    options = {"model": str(checkpoint("llama", vocab_size=VOCAB_SIZE)), **OPTIONS}
    report, _ = EngineCheck(options=options).run()
    found = {one.name: one.status for one in report.findings}
    assert found[PREEMPTED_ANSWERS] is CheckStatus.RIGHT, report.as_text()
    assert found["processed logprobs"] is CheckStatus.RIGHT, report.as_text()
    assert report.exit_code == 0


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
