"""Every launch of the benchmark of kernels works, for a tiny layer."""

from __future__ import annotations

from benchmarks.kernels.attention import attention_cases, latent_cases, prefill_cases, sparse_cases
from benchmarks.kernels.cases import Shape, decode_input_cases, token_cases
from benchmarks.kernels.quantised import quantised_cases
from benchmarks.kernels.sampling import sampling_cases
from benchmarks.kernels.tiles import Experts, expert_tiles, quantised_tiles


def test_every_launch_works() -> None:
    """Oracle: every kernel accepts what the benchmark gives it."""
    shape = Shape(name="tiny", hidden=32, inner=24, num_heads=4, num_kv_heads=2, head_dim=32, device="cpu")
    small = (*token_cases(shape, 3), *decode_input_cases(shape, 2, 40), *prefill_cases(shape, 20))
    many = (*quantised_cases(shape, 1), *quantised_cases(shape, 5), *quantised_cases(shape, 70))
    many = (*many, *latent_cases(shape, 1, 20), *sparse_cases(shape, 1, 20, top_k=16))
    for case in (*small, *many, *attention_cases(shape, 2, 40), *sampling_cases(shape, 2, 50)):
        launch = case.make()
        launch()
        launch()
        assert case.num_bytes > 0
    experts = Experts(num_experts=4, top_k=2, hidden=64, inner=64)
    for tiled in (*quantised_tiles(shape, "mxfp4", 3), *expert_tiles("tiny", experts, "none", 3, "cpu")):
        tiled.launch(tiled.make(), tiled.current)()
        assert tiled.num_bytes > 0 and tiled.candidates
