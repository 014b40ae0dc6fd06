"""The warm-up launches everything that Triton must compile for later steps: an engine on the GPU's data path.

Triton compiles a launch for its *specialisation*: the kernel, its constants, the types of its arguments, whether
pointers are aligned to 16 bytes, and of integers whether they are 1 or multiples of 16.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from triton.runtime.interpreter import InterpretedFunction

from tests.interpreted.engines import gpu_path
from tests.lora_adapters import ADAPTERS, make_adapter, needs_peft
from tests.unit.kernels.kernel_harness import triton_ops_on_cpus
from tp_engine import LLM, LoRARequest, SamplingParams
from tp_engine.layers.quantization import quantised_products

Specialisation = tuple[Any, ...]
OPTIONS = {"max_model_len": 64, "num_gpu_blocks_override": 40, "max_num_batched_tokens": 16, "max_num_seqs": 5}
PROMPTS = [[5, 9, 13, 7], list(range(20, 40)), [7] * 3, [3], [4, 5]]
MIXTURES: tuple[tuple[dict[str, Any], ...], ...] = (
    ({"temperature": 0},) * 5,
    ({"temperature": 1.0, "seed": 3}, {"temperature": 0.8, "top_k": 5, "seed": 4}, {"temperature": 0}),
    ({"temperature": 1.0, "min_p": 0.2}, {"temperature": 1.0, "presence_penalty": 1.0}),
    ({"temperature": 1.0, "top_p": 0.5, "logprobs": 2}, {"temperature": 1.0, "top_p": 0.9}, {"temperature": 0}),
    ({"temperature": 1.0, "top_k": 9, "repetition_penalty": 1.2}, {"temperature": 0.5, "logit_bias": {7: 3.0}}),
)


@contextmanager
def recorded(specialisations: set[Specialisation]) -> Iterator[None]:
    """Every launch adds its specialisation."""
    run = InterpretedFunction.run

    def run_and_note(self: InterpretedFunction, *args: Any, **kwargs: Any) -> Any:
        specialisations.add(specialisation(self, args, kwargs))
        return run(self, *args, **kwargs)

    with patch.object(InterpretedFunction, "run", run_and_note):
        yield


def specialisation(kernel: InterpretedFunction, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Specialisation:
    """The launch as Triton's compiler sees it."""
    parameters = inspect.signature(kernel.fn).parameters
    options = {
        name: value for name, value in kwargs.items() if name not in parameters and name not in ("grid", "warmup")
    }
    own = {name: value for name, value in kwargs.items() if name in parameters}
    bound = inspect.signature(kernel.fn).bind(*args, **own).arguments
    kept = kernel.kwargs.get("do_not_specialize") or ()
    seen = tuple((name, kind_of(value, parameters[name], name in kept)) for name, value in bound.items())
    return (kernel.fn.__name__, *seen, *sorted(options.items()))


def kind_of(value: Any, parameter: inspect.Parameter, is_general: bool) -> Any:
    """What the compiler knows of an argument."""
    if "constexpr" in str(parameter.annotation) or value is None:
        return value
    if isinstance(value, torch.Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    if isinstance(value, int) and not is_general:
        return "1" if value == 1 else "a multiple of 16" if value % 16 == 0 else "an integer"
    return type(value).__name__


def serve(llm: LLM, mixture: tuple[dict[str, Any], ...], adapter: LoRARequest | None) -> None:
    """One request for each set of parameters, with the ``adapter``; they end after different numbers of steps."""
    params = [SamplingParams(max_tokens=2 + i // 2, ignore_eos=True, **one) for i, one in enumerate(mixture)]
    outputs = llm.generate(PROMPTS[: len(params)], params, use_tqdm=False, lora_request=adapter)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [one.max_tokens for one in params]


def check(make_llm: Callable[[], LLM], *adapters: LoRARequest) -> None:
    """Serving launches only what the start has launched, without an adapter and with those given."""
    started: set[Specialisation] = set()
    served: set[Specialisation] = set()
    by_kernel = patch("tp_engine.sampling.filters.draws_by_kernel", lambda device_type: True)
    with gpu_path(warms_up=True, products=False), by_kernel, triton_ops_on_cpus():
        with recorded(started):
            llm = make_llm()
        with llm, recorded(served):
            for mixture, adapter in product(MIXTURES, (None, *adapters)):
                serve(llm, mixture, adapter)
    assert len(served) >= 12, f"only {len(served)} launches were seen"
    for one in sorted(served - started, key=str):
        like = next((other for other in started if other[0] == one[0]), ())
        raise AssertionError(f"{one[0]} was not warmed up: {[pair for pair in one if pair not in like]}")


SIZES: dict[str, Any] = {"num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "hidden_size": 32, "head_dim": 16}
ENGINE: dict[str, Any] = {"device": "cpu", "dtype": "float32", "attention_backend": "torch", **OPTIONS}


@pytest.mark.slow
def test_warm_up(checkpoint: Callable[..., Path]) -> None:
    """Oracle: the specialisations of the warm-up; serving adds none, so it compiles nothing."""
    folder = checkpoint("qwen3", vocab_size=101, **SIZES)
    check(lambda: LLM(str(folder), **ENGINE))


@needs_peft
@pytest.mark.slow
def test_warm_up_with_adapters(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """Oracle: as above, for products with quantised weights, which are others in steps with adapters; the largest step
    has other tiles."""
    folder = checkpoint("qwen3", vocab_size=101, **SIZES)
    adapter = LoRARequest("own", 1, str(make_adapter(tmp_path / "adapter", folder, **ADAPTERS["linears"])))
    options = ENGINE | {"max_num_batched_tokens": 40}
    with (
        patch.object(quantised_products, "runs_triton", lambda device_type: True),
        patch.object(quantised_products, "native_library", lambda: None),
    ):
        check(lambda: LLM(str(folder), quantization="int4", enable_lora=True, **options), adapter)
