"""An output head that the checkpoint stores is used, whatever config.json says: at the start and in updates."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.ranks.launch import TWO_RANKS
from tp_engine import LLM, SamplingParams
from tp_engine.errors import RequestError

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("warm_children")]

OPTIONS: dict[str, Any] = {**TWO_RANKS, "num_gpu_blocks_override": 32, "max_model_len": 64, "block_size": 8}
PROMPTS = [[5, 6, 7], [9, 3]]
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
HEAD = "lm_head.weight"


def tokens_of(llm: LLM) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


def oracle(folder: Path) -> list[list[int]]:
    """transformers' greedy tokens."""
    from transformers import AutoModelForCausalLM

    model, found = AutoModelForCausalLM.from_pretrained(folder).eval(), []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            for _ in range(8):
                ids = torch.cat((ids, model(input_ids=ids).logits[:, -1:].argmax(-1)), 1)
        found.append(ids[0, len(prompt) :].tolist())
    return found


@pytest.fixture
def folders(checkpoint: Callable[..., Path], tmp_path: Path) -> tuple[Path, Path]:
    """A tied model, and the same with a head of its own beside a config.json that ties."""
    tied, own = checkpoint("llama", tie=True), tmp_path / "own"
    shutil.copytree(tied, own)
    tensors = load_file(own / "model.safetensors")
    assert HEAD not in tensors
    generator = torch.Generator().manual_seed(3)
    tensors[HEAD] = torch.randn(tensors["model.embed_tokens.weight"].shape, generator=generator) * 0.2
    save_file(tensors, own / "model.safetensors", {"format": "pt"})
    return tied, own


@pytest.mark.parametrize("tensor_parallel_size", [1, 2])
def test_a_head_of_its_own_is_used(tensor_parallel_size: int, folders: tuple[Path, Path]) -> None:
    """Oracle: transformers, which does not tie what differs; a copy of the embedding is tied; a sleep changes nothing.

    Updates bring a head of their own to an engine that was tied, and take it away again.
    """
    tied, own = folders
    tied_tokens, own_tokens = map(oracle, folders)
    assert tied_tokens != own_tokens
    tensors, with_copy = load_file(own / "model.safetensors"), load_file(tied / "model.safetensors")
    with_copy[HEAD] = with_copy["model.embed_tokens.weight"].clone()
    with LLM(str(own), **{**OPTIONS, "tensor_parallel_size": tensor_parallel_size}) as llm:
        assert tokens_of(llm) == own_tokens
        llm.update_weights(with_copy.items())
        assert tokens_of(llm) == tied_tokens
        llm.update_weights(tensors.items())
        assert tokens_of(llm) == own_tokens
        llm.sleep()
        llm.wake_up()
        assert tokens_of(llm) == own_tokens
        llm.update_weights_from_disk(tied)
        assert tokens_of(llm) == tied_tokens
        llm.update_weights_from_disk(own)
        assert tokens_of(llm) == own_tokens


def test_an_untied_model_needs_its_head(checkpoint: Callable[..., Path]) -> None:
    """Oracle: config.json does not tie, so tensors without a head are refused by its name and change nothing."""
    folder = checkpoint("llama", tie=False)
    tensors = load_file(folder / "model.safetensors")
    with LLM(str(folder), **{**OPTIONS, "tensor_parallel_size": 1}) as llm:
        before = tokens_of(llm)
        with pytest.raises(RequestError, match=r"missing: lm_head\.weight"):
            llm.update_weights((name, tensor) for name, tensor in tensors.items() if name != HEAD)
        assert tokens_of(llm) == before == oracle(folder)
