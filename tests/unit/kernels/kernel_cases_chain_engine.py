"""Whole engines whose products of few rows are Triton's, with norms and sums, interpreted: their tokens, and how many
kernels a layer of a decode step takes.

Run in a process of its own with TRITON_INTERPRET=1.  Oracles: transformers' greedy tokens; the kernels by hand.
"""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from triton.runtime.interpreter import InterpretedFunction

from tests.tiny_models import make_checkpoint
from tests.unit.kernels.kernel_cases_codes_engine import CountedLaunches
from tests.unit.kernels.kernel_cases_engine import gpu_path
from tests.unit.kernels.kernel_harness import AGREEMENT, triton_ops_on_cpus
from tp_engine import LLM, LoRARequest, SamplingParams
from tp_engine.kernels.linear import few_rows_linear_triton
from tp_engine.models.causal_lm import CausalLM

PROMPTS = [[5, 9, 13, 7], list(range(20, 50))]
NUM_TOKENS = 3
# Norms before each block, and a factor of what is added; both blocks side by side; experts, which read values.
MODELS = ("granite", "cohere2", "qwen3-moe")
CHAIN = {"few_rows_linear_kernel": 4, "prepare_heads_kernel": 1, "paged_decode_kernel": 1}
ONE_ROW_CHAIN = {"one_row_linear_kernel": 4, "prepare_heads_kernel": 1, "paged_decode_kernel": 1}
LIBRARY = {"linear": 4, "norm_kernel": 2, "gate_kernel": 1, "prepare_heads_kernel": 1, "paged_decode_kernel": 1}
# (what multiplies, rows, whether attention prepares heads) -> kernels of a layer.
KERNELS: dict[tuple[str, int, bool], dict[str, int]] = {
    ("table", 1, False): ONE_ROW_CHAIN,
    ("table", 64, False): LIBRARY,
    ("triton", 1, False): ONE_ROW_CHAIN,
    ("triton", 64, False): CHAIN,
    ("table", 1, True): {"one_row_linear_kernel": 4, "paged_decode_kernel": 1},
    ("triton", 64, True): {"few_rows_linear_kernel": 4, "paged_decode_kernel": 1},
}
NUMBERS = (6, 9, 6, 6, 5, 5)


@contextmanager
def chained(by: str, *, prepares_heads: bool = False) -> Iterator[None]:
    """Inside, an engine on CPU tensors takes the GPU's path, with products of few rows by ``by``."""
    chosen = {"TP_ENGINE_FEW_ROWS": by, "TP_ENGINE_HEADS_IN_ATTENTION": str(int(prepares_heads))}
    with triton_ops_on_cpus(), gpu_path(), patch.dict(os.environ, chosen):
        yield


def generate(folder: Path, prompts: list[list[int]], num_tokens: int, **options: Any) -> list[list[int]]:
    """Greedy tokens; prompts are computed in chunks of 24 tokens beside decodes, unless ``options`` say otherwise."""
    options = {"max_num_batched_tokens": 24, "max_num_seqs": 2, **options}
    params = SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True)
    with LLM(
        str(folder), device="cpu", dtype="float32", max_model_len=64, num_gpu_blocks_override=80, **options
    ) as llm:
        return [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]


def expected_tokens(folder: Path) -> list[list[int]]:
    """transformers' greedy tokens."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    settings: dict[str, Any] = {"max_new_tokens": NUM_TOKENS, "do_sample": False, "eos_token_id": None}
    return [model.generate(torch.tensor([prompt]), **settings)[0, len(prompt) :].tolist() for prompt in PROMPTS]


def check_tokens(architecture: str) -> None:
    """Products take from 1 to 24 rows."""
    with tempfile.TemporaryDirectory() as name:
        folder = make_checkpoint(Path(name) / "model", architecture, intermediate_size=128)
        expected = expected_tokens(folder)
        kernel = few_rows_linear_triton.few_rows_linear_kernel
        launches = CountedLaunches(kernel)
        with chained("triton"), patch.object(few_rows_linear_triton, "few_rows_linear_kernel", launches):
            found = generate(folder, PROMPTS, NUM_TOKENS)
    assert found == expected, (architecture, found, expected)
    assert launches.count > 0, architecture


def check_heads() -> None:
    """Attention prepares the heads of steps of decodes alone, two requests at a time, and only of these."""
    run, prepares = InterpretedFunction.run, Counter[bool]()

    def noted_run(self: Any, *args: Any, **kwargs: Any) -> Any:
        if "PREPARES" in kwargs:
            prepares[kwargs["PREPARES"]] += 1
        return run(self, *args, **kwargs)

    with tempfile.TemporaryDirectory() as name:
        folder = make_checkpoint(Path(name) / "model", "qwen3")
        expected = expected_tokens(folder)
        with chained("table", prepares_heads=True), patch.object(InterpretedFunction, "run", noted_run):
            found = generate(folder, PROMPTS, NUM_TOKENS)
    assert found == expected, (found, expected)
    assert prepares[True] and prepares[False], prepares


def check_adapters() -> None:
    """Steps in which a row has an adapter normalise rows before the products; later steps are chains again.

    Oracle: the same engine on C.
    """
    from tests.lora_adapters import ADAPTERS, make_adapter

    def generate_with(folder: Path, adapter: Path) -> list[list[int]]:
        options: dict[str, Any] = {"num_gpu_blocks_override": 64, "max_num_seqs": 2, "max_model_len": 64}
        options["max_num_batched_tokens"] = 24
        params = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)
        with LLM(str(folder), device="cpu", dtype="float32", enable_lora=True, **options) as llm:
            llm.load_adapter("own", str(adapter))
            found = []
            for requests in ([LoRARequest("own"), None], [None]):
                prompts = [prompt[:6] for prompt in PROMPTS[: len(requests)]]
                outputs = llm.generate(prompts, params, use_tqdm=False, lora_request=requests)
                found += [output.outputs[0].token_ids for output in outputs]
        return found

    with tempfile.TemporaryDirectory() as name:
        folder = make_checkpoint(Path(name) / "model", "qwen3", intermediate_size=128)
        adapter = make_adapter(Path(name) / "adapter", folder, seed=1, **ADAPTERS["linears"])
        expected = generate_with(folder, adapter)
        with chained("triton"):
            found = generate_with(folder, adapter)
    assert found == expected and found[0] != found[2], (found, expected)


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


def kernels_of_a_layer(by: str, num_rows: int, prepares_heads: bool, **options: Any) -> dict[str, int]:
    """What a decode step of ``num_rows`` rows launches for three layers and not for two, with the ``options`` of
    ``LLM``."""
    steps: list[Counter[str]] = []
    for num_layers in (2, 3):
        with tempfile.TemporaryDirectory() as name:
            folder = make_checkpoint(
                Path(name) / "model", "qwen3", num_layers=num_layers, hidden_size=128, intermediate_size=128
            )
            with chained(by, prepares_heads=prepares_heads), counted(num_rows) as launches:
                sizes = {"max_num_seqs": num_rows, "max_num_batched_tokens": 2 * num_rows + 1}
                generate(folder, [[5, 6]] * num_rows, 2, **sizes, **options)
        steps.append(launches)
    return dict(steps[1] - steps[0])


def main(part: str) -> None:
    if part == "tokens":
        for architecture in MODELS:
            check_tokens(architecture)
    elif part == "adapters":
        check_adapters()
    elif part == "heads":
        check_heads()
    else:
        found = {key: kernels_of_a_layer(*key) for key in KERNELS}
        assert found == KERNELS, found
        assert tuple(sum(kernels.values()) for kernels in found.values()) == NUMBERS
        with_slots = kernels_of_a_layer("table", 1, False, enable_lora=True)  # no row has an adapter
        assert with_slots == ONE_ROW_CHAIN, with_slots
    print(AGREEMENT)
