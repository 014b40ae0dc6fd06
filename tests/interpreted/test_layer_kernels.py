"""How many kernels a layer of a decode step takes on the data path of GPUs, interpreted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from triton.runtime.interpreter import InterpretedFunction

from tests.interpreted.engines import gpu_path
from tests.unit.kernels.kernel_harness import triton_ops_on_cpus
from tp_engine import LLM, SamplingParams
from tp_engine.models.causal_lm import CausalLM

ONE_ROW = {"one_row_linear_kernel": 4, "norm_kernel": 2, "qk_norm_rope_store_kernel": 1, "paged_decode_kernel": 1}
MANY_ROWS = {"linear": 4, "norm_kernel": 2, "gate_kernel": 1, "qk_norm_rope_store_kernel": 1, "paged_decode_kernel": 1}


@contextmanager
def counted(num_rows: int) -> Iterator[Counter[str]]:
    """Counts Triton's launches and the library's products in the model, in its last step of ``num_rows`` rows.

    The kernels within the model do not run, which would take minutes: all its outputs are zeros.
    """
    launches: Counter[str] = Counter()
    run, linear, forward = InterpretedFunction.run, torch.nn.functional.linear, CausalLM.forward
    is_inside = False

    def noted_run(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_inside:
            return run(self, *args, **kwargs)
        launches[self.fn.__name__] += 1
        return None

    def noted_linear(*args: Any) -> torch.Tensor:
        launches["linear"] += is_inside
        return linear(*args)

    def noted_forward(self: CausalLM, input_ids: torch.Tensor, *args: Any) -> torch.Tensor:
        nonlocal is_inside
        is_inside = True
        if len(input_ids) == num_rows:
            launches.clear()
        hidden = torch.zeros_like(forward(self, input_ids, *args))
        is_inside = False
        return hidden

    with (
        patch.object(InterpretedFunction, "run", noted_run),
        patch.object(torch.nn.functional, "linear", noted_linear),
        patch.object(CausalLM, "forward", noted_forward),
    ):
        yield launches


def kernels_of_a_layer(checkpoint: Callable[..., Path], num_rows: int, **options: Any) -> dict[str, int]:
    """What a decode step of ``num_rows`` rows launches for three layers and not for two, with the ``options`` of
    ``LLM``."""
    steps: list[Counter[str]] = []
    options |= {"max_num_seqs": num_rows, "max_num_batched_tokens": 2 * num_rows + 1, "max_model_len": 64}
    params = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)
    for num_layers in (2, 3):
        folder = checkpoint("qwen3", num_layers=num_layers, hidden_size=128, intermediate_size=128)
        with (
            triton_ops_on_cpus(),
            gpu_path(),
            counted(num_rows) as launches,
            LLM(str(folder), device="cpu", dtype="float32", num_gpu_blocks_override=80, **options) as llm,
        ):
            llm.generate([[5, 6]] * num_rows, params, use_tqdm=False)
        steps.append(launches)
    return dict(steps[1] - steps[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_rows", "options", "expected"),
    [(1, {}, ONE_ROW), (64, {}, MANY_ROWS), (1, {"enable_lora": True}, ONE_ROW)],
    ids=["one row", "many rows", "no row has an adapter"],
)
def test_kernels_of_a_layer(
    num_rows: int, options: dict[str, Any], expected: dict[str, int], checkpoint: Callable[..., Path]
) -> None:
    """Oracle: by hand: 8 kernels for one row, 9 for many."""
    assert kernels_of_a_layer(checkpoint, num_rows, **options) == expected
