"""A whole engine on the data path of GPUs, without a GPU: its kernels are interpreted."""

from __future__ import annotations

import pytest

from tests.unit.kernels.kernel_harness import interpreted, needs_triton


@needs_triton
@pytest.mark.timeout(300)
def test_interpreted_engine() -> None:
    """Oracle: the tokens of the same engine on plain PyTorch, greedy and sampled."""
    interpreted("kernel_cases_engine", timeout_s=270)


@needs_triton
@pytest.mark.timeout(300)
@pytest.mark.parametrize("quantization", ["fp8", "int4"])
def test_interpreted_engine_with_quantised_weights(quantization: str) -> None:
    """Oracle: the tokens of the same engine on C, greedy and sampled."""
    interpreted("kernel_cases_engine", quantization, timeout_s=270)


@needs_triton
@pytest.mark.timeout(300)
def test_interpreted_tp_invariant_engine() -> None:
    """Oracle: the tokens of the same engine on plain PyTorch, greedy and sampled."""
    interpreted("kernel_cases_engine", "tp_invariant", timeout_s=270)


@needs_triton
@pytest.mark.timeout(300)
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_interpreted_ranks_in_shared_memory(num_ranks: int) -> None:
    """Oracle: one rank's tokens on plain PyTorch, greedy and sampled; recorded steps have no other collectives."""
    interpreted("kernel_cases_ranks_engine", str(num_ranks), timeout_s=270)


@needs_triton
@pytest.mark.timeout(300)
def test_kernels_of_a_layer() -> None:
    """Oracle: by hand: 8 kernels for one row, 9 for many."""
    interpreted("kernel_cases_layer_kernels", timeout_s=270)


@needs_triton
@pytest.mark.timeout(300)
def test_interpreted_norms_with_codes() -> None:
    """Oracle: the same engines whose norms write rows: tokens and log-probabilities are equal bit by bit."""
    interpreted("kernel_cases_codes_engine", timeout_s=270)


@needs_triton
@pytest.mark.timeout(300)
def test_interpreted_masks() -> None:
    """Oracle: the tokens of the same engine on plain PyTorch; one row follows a grammar."""
    interpreted("kernel_cases_masks", timeout_s=270)


@needs_triton
@pytest.mark.timeout(300)
def test_interpreted_groups() -> None:
    """Oracle: the same model with one block table for all layers; tokens and log-probabilities are equal bit by bit."""
    interpreted("kernel_cases_kv_groups", timeout_s=270)


@needs_triton
@pytest.mark.timeout(300)
@pytest.mark.parametrize("path", ["usual", "adapters"])
def test_interpreted_warm_up(path: str) -> None:
    """Oracle: the kernel specialisations of the warm-up; serving adds none, so it compiles nothing."""
    if path == "adapters":
        pytest.importorskip("peft")
    interpreted("kernel_cases_warm_up", path, timeout_s=270)


@needs_triton
@pytest.mark.timeout(300)
def test_interpreted_hybrid() -> None:
    """Oracle: the tokens of the same engine on C; one of its two layers has a recurrent state."""
    interpreted("kernel_cases_hybrid", timeout_s=270)


@needs_triton
@pytest.mark.timeout(300)
def test_interpreted_latents() -> None:
    """Oracle: the tokens of the same engine on C; some of its chunks are absorbed, others expanded."""
    interpreted("kernel_cases_latent_engine", timeout_s=270)


@needs_triton
@pytest.mark.timeout(300)
@pytest.mark.parametrize("model", ["one_table", "windows"])
def test_interpreted_prompts_in_recordings(model: str) -> None:
    """Oracle: the tokens of the same engine on plain PyTorch; of each recording, its first
    launches."""
    interpreted("kernel_cases_prompt_graphs", model, timeout_s=270)
