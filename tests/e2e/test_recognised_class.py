"""A class of transformers that no family describes, with what engines do for families."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from tests.lora_adapters import greedy_by_peft, make_adapter, needs_peft
from tests.quantised.checkpoints import compress
from tests.text_tokenizers import byte_level_tokenizer
from tests.unit.models import test_class_model, test_recognition
from tp_engine import LLM, LoRARequest, SamplingParams, StructuredOutputsParams
from tp_engine.model_config import families
from tp_engine.models.recognition import child

RECOGNISED, BY_MODULES = "ArceeForCausalLM", "Starcoder2ForCausalLM"
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "block_size": 4,
    "max_num_batched_tokens": 16,
    "skip_tokenizer_init": True,
}


@pytest.fixture(autouse=True)
def _ask_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask in this process, which spares the child's imports."""
    monkeypatch.setattr(families, "ask", child.answer)


def save_model(folder: Path, architecture: str) -> Path:
    """Write a checkpoint of a class that native layers run, or its own modules."""
    if architecture == RECOGNISED:
        return test_recognition.save_model(folder, architecture)
    return test_class_model.save_model(folder, test_class_model.values(architecture))


def tokens(llm: LLM, prompts: list[list[int]], **options: Any) -> list[list[int]]:
    found = llm.generate(prompts, GREEDY, use_tqdm=False, **options)
    llm.engine.check_integrity()
    return [list(one.outputs[0].token_ids) for one in found]


@needs_peft
@pytest.mark.parametrize(
    ("architecture", "adapted"),
    [(RECOGNISED, ["q_proj", "o_proj", "down_proj"]), (BY_MODULES, ["q_proj", "o_proj", "c_fc", "c_proj"])],
)
def test_features_of_families(architecture: str, adapted: list[str], tmp_path: Path) -> None:
    """Oracle: PEFT's model on transformers' class in float32.  So few blocks that requests are preempted; prompts that
    begin alike, twice; drafts by n-grams; an adapter in the same steps."""
    folder = save_model(tmp_path / "model", architecture)
    adapter = make_adapter(tmp_path / "adapter", folder, r=4, target_modules=adapted)
    draw = np.random.default_rng(1)
    shared = draw.integers(3, 200, 13).tolist()
    prompts = [shared + draw.integers(3, 200, count).tolist() for count in (3, 17, 8)]
    adapters = [None, adapter, None]
    expected = [greedy_by_peft(folder, one, prompt, 12)[0] for prompt, one in zip(prompts, adapters, strict=True)]
    draft = '{"method": "ngram", "num_speculative_tokens": 3}'
    with LLM(
        str(folder), num_gpu_blocks_override=20, enable_lora=True, max_loras=1, speculative_config=draft, **OPTIONS
    ) as llm:
        llm.load_lora_adapter("own", str(adapter))
        wanted = [None if one is None else LoRARequest("own") for one in adapters]
        for _ in range(2):
            assert tokens(llm, prompts, lora_request=wanted) == expected


@pytest.mark.parametrize("name", ["awq", "fp8-tensor-dynamic"])
@pytest.mark.parametrize("architecture", [RECOGNISED, BY_MODULES])
def test_quantised_checkpoints(architecture: str, name: str, tmp_path: Path) -> None:
    """Oracle: the checkpoint's twin, whose plain weights have the values that the codes stand for."""
    folder = save_model(tmp_path / "float", architecture)
    compress(folder, tmp_path / "target", tmp_path / "twin", name, group=32 if name == "awq" else None)
    found = []
    for own in ("target", "twin"):
        with LLM(str(tmp_path / own), num_gpu_blocks_override=64, **OPTIONS) as llm:
            found.append(tokens(llm, [[5, 9, 33, 70, 12, 99, 101, 40]]))
    assert found[0] == found[1]


def test_a_grammar_and_free_text(tmp_path: Path) -> None:
    """Oracle: the grammar; and transformers' greedy tokens of the row beside it.  The class's name ends as those of
    decoders without a head do."""
    found = test_class_model.values("GPT2LMHeadModel", vocab_size=384, eos_token_id=1)
    folder, prompts = test_class_model.save_model(tmp_path, found), [[5, 9], [7, 33, 70]]
    byte_level_tokenizer().save_pretrained(folder)
    model = transformers.GPT2LMHeadModel.from_pretrained(folder).eval()
    how: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    expected = model.generate(torch.tensor(prompts[1:]), **how)[0, 3:].tolist()
    digits = SamplingParams(temperature=0, max_tokens=6, structured_outputs=StructuredOutputsParams(regex="[0-9]{4}"))
    with LLM(str(folder), num_gpu_blocks_override=20, **{**OPTIONS, "skip_tokenizer_init": False}) as llm:
        bound, free = llm.generate(prompts, [digits, GREEDY], use_tqdm=False)
    assert re.fullmatch("[0-9]{4}", bound.outputs[0].text) and list(free.outputs[0].token_ids) == expected
