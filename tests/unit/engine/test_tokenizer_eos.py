"""Outputs end with the tokenizer's EOS too: which token that is, and that an engine stops there."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.text_tokenizers import byte_level_tokenizer
from tp_engine import LLM, SamplingParams
from tp_engine.engine.tokenizer import tokenizer_eos_ids
from tp_engine.requests.outputs import RequestOutput

OPTIONS: dict[str, Any] = {"num_gpu_blocks_override": 32, "max_model_len": 64}
PROMPT = [5, 6, 7]


@pytest.mark.parametrize(
    ("config", "marks"),
    [
        ({}, {}),
        ({"eos_token": None}, {}),
        ({"eos_token": None}, {"eos_token": "</s>"}),
        ({"eos_token": "</s>"}, {"eos_token": "<pad>"}),
        ({"eos_token": "</s>"}, {"eos_token": None}),
        ({"eos_token": "the"}, {}),
        ({"eos_token": {"__type": "AddedToken", "content": "<pad>", "lstrip": False, "normalized": False}}, {}),
        ({"eos_token": ...}, {"eos_token": "<pad>"}),
        ({"eos_token": ...}, {"eos_token": {"content": "<s>", "lstrip": False, "rstrip": False, "normalized": False}}),
        ({"eos_token": ...}, {}),
        ({"eos_token": ..., "tokenizer_class": "Qwen2Tokenizer"}, {}),
    ],
)
def test_the_tokenizers_eos_is_that_of_transformers(
    config: dict[str, Any], marks: dict[str, Any], tmp_path: Path
) -> None:
    """Oracle: ``eos_token_id`` of the tokenizer that transformers loads from the same files."""
    from transformers import AutoTokenizer

    byte_level_tokenizer().save_pretrained(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    written = {**json.loads(path.read_text()), **config}
    path.write_text(json.dumps({name: value for name, value in written.items() if value is not ...}))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(marks))
    expected = AutoTokenizer.from_pretrained(tmp_path).eos_token_id
    assert tokenizer_eos_ids(str(tmp_path)) == (() if expected is None else (expected,))


def test_usual_files_need_no_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the answer although transformers cannot be imported, whose import would take seconds of a start."""
    byte_level_tokenizer().save_pretrained(tmp_path)
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert tokenizer_eos_ids(str(tmp_path)) == (byte_level_tokenizer().eos_token_id,)


def test_a_folder_without_a_tokenizer_has_no_eos(tmp_path: Path) -> None:
    """Oracle: token ids alone are served."""
    assert tokenizer_eos_ids(str(tmp_path)) == ()


@pytest.fixture
def model(checkpoint: Callable[..., Path], tmp_path: Path) -> Callable[..., Path]:
    """A model in a folder of its own, with a tokenizer whose EOS is the token given, and other ids in its files."""
    source = checkpoint("qwen2", vocab_size=360, eos_token_id=3)

    def make(eos: int | None, config_eos: Any = 3, generation_eos: Any = ...) -> Path:
        folder = tmp_path / f"{eos} {config_eos} {generation_eos}"
        folder.mkdir()
        (folder / "model.safetensors").symlink_to(source / "model.safetensors")
        config = json.loads((source / "config.json").read_text())
        config["eos_token_id"] = config_eos
        (folder / "config.json").write_text(json.dumps(config))
        if generation_eos is not ...:
            (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": generation_eos}))
        tokenizer = byte_level_tokenizer()
        tokenizer.save_pretrained(folder)
        path = folder / "tokenizer_config.json"
        token = None if eos is None else tokenizer.convert_ids_to_tokens(eos)
        path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token": token}))
        return folder

    return make


def ask(folder: Path, **params: Any) -> RequestOutput:
    with LLM(str(folder), **OPTIONS) as llm:
        asked = SamplingParams(temperature=0, **{"max_tokens": 12, **params})
        return llm.generate([PROMPT], asked, use_tqdm=False)[0]


def test_an_engine_stops_at_the_tokenizers_eos(model: Callable[..., Path], caplog: pytest.LogCaptureFixture) -> None:
    """Oracle: the tokens of a model without any EOS, up to the first that the tokenizer ends with; ``ignore_eos``,
    ``min_tokens`` and draft tokens as with an EOS of config.json.  A model without any is warned of."""
    with caplog.at_level(logging.WARNING, "tp_engine"):
        free = list(ask(model(None, config_eos=None)).outputs[0].token_ids)
    assert len(free) == 12 and "no token ends an output" in caplog.text
    caplog.clear()
    eos = free[2]
    stopped = free[: free.index(eos) + 1]
    by_tokenizer, by_config = model(eos), model(None, config_eos=eos)
    draft_tokens: dict[str, Any] = {"speculative_config": {"method": "suffix", "num_speculative_tokens": 4}}
    with LLM(str(by_tokenizer), **OPTIONS, **draft_tokens) as guessing, LLM(str(by_config), **OPTIONS) as other:
        for params in ({}, {"ignore_eos": True}, {"min_tokens": 6}):
            asked = SamplingParams(temperature=0, max_tokens=12, **params)
            found, expected = (llm.generate([PROMPT], asked, use_tqdm=False)[0].outputs[0] for llm in (guessing, other))
            assert (found.token_ids, found.finish_reason) == (expected.token_ids, expected.finish_reason)
            if not params:
                assert list(found.token_ids) == stopped and found.finish_reason == "stop"
    assert "no token ends" not in caplog.text
