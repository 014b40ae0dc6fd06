"""What a job does with the Python API: a function per program, from an ``LLM`` to what its tokens must equal.

The same function runs on the CPU for the oracle.  ``python -m tests.fake_cuda.programs NAME OPTIONS RESULT`` runs one,
with its options as JSON, and writes its result.
"""

from __future__ import annotations

import gc
import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeAlias

from tp_engine import LLM, LoRARequest, SamplingParams

Program: TypeAlias = Callable[[LLM, Path], Any]
Sampling: TypeAlias = Mapping[str, Any]

PROMPTS = [[5, 9, 13, 7], list(range(20, 40)), [7, 3]]
# Greedy, by noise with a rank, and by noise alone.
_COMMON: tuple[Sampling, ...] = (
    {"temperature": 0},
    {"temperature": 0.8, "top_k": 5, "seed": 4},
    {"temperature": 1.0, "seed": 3},
)
_OTHERS: tuple[Sampling, ...] = (
    {"temperature": 0.9, "top_p": 0.8, "seed": 4},
    {"temperature": 1.0, "top_p": 0.9, "min_p": 0.05, "seed": 5, "presence_penalty": 0.5},
    {"temperature": 0.9, "top_k": 40, "top_p": 0.9, "seed": 6, "logprobs": 2},
)


def generate(llm: LLM, folder: Path) -> list[list[int]]:
    """Token ids of three prompts, the longer ones in chunks beside decodes."""
    return tokens(llm, _COMMON)


def sample(llm: LLM, folder: Path) -> list[list[int]]:
    """The same, then with a nucleus, penalties and log-probabilities."""
    return [*tokens(llm, _COMMON), *tokens(llm, _OTHERS)]


def threaded(llm: LLM, folder: Path) -> list[list[int]]:
    """As ``generate``, in a thread that has not touched a GPU before."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(generate, llm, folder).result()


def adapters(llm: LLM, folder: Path) -> list[list[int]]:
    """A LoRA adapter beside the base model, loaded while the engine runs."""
    from tests.lora_adapters import ADAPTERS, make_adapter

    with tempfile.TemporaryDirectory() as made:
        path = make_adapter(Path(made), folder, **ADAPTERS["linears"])
        request = LoRARequest("linears", 1, str(path))
        params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
        outputs = llm.generate(PROMPTS, params, lora_request=[request, None, request], use_tqdm=False)
        found = [list(output.outputs[0].token_ids) for output in outputs]
        llm.unload_lora_adapter("linears")
    return found


def new_weights(llm: LLM, folder: Path) -> list[list[list[int]]]:
    """Tokens before and after new weights, which come from memory, then after a sleep without its cache."""
    import torch
    from safetensors.torch import load_file

    weights: dict[str, torch.Tensor] = load_file(folder / "model.safetensors")
    found = [tokens(llm, _COMMON[:1])]
    llm.update_weights({name: values.flip(0).contiguous() for name, values in weights.items()}.items())
    found.append(tokens(llm, _COMMON[:1]))
    llm.update_weights_from_disk(folder)
    llm.sleep(1)
    llm.wake_up()
    return [*found, tokens(llm, _COMMON[:1])]


def many(llm: LLM, folder: Path) -> list[list[int]]:
    """More prompts than the cache holds, twice: blocks move to a tier and come back."""
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    prompts = [[token] * 33 for token in range(10, 16)]
    found = []
    for _ in range(2):
        outputs = llm.generate(prompts, params, use_tqdm=False)
        found += [list(output.outputs[0].token_ids) for output in outputs]
    return found


def first(llm: LLM, folder: Path) -> list[int]:
    """What scripts of ``tests.fault_jobs`` print: the tokens of their first prompt."""
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    return list(llm.generate([[65, 66, 67]], params, use_tqdm=False)[0].outputs[0].token_ids)


def tokens(llm: LLM, sampling: Sequence[Sampling], max_tokens: int = 4) -> list[list[int]]:
    """Token ids of a prompt for each way of sampling."""
    params = [SamplingParams(max_tokens=max_tokens, ignore_eos=True, **own) for own in sampling]
    outputs = llm.generate(PROMPTS[: len(params)], params, use_tqdm=False)
    llm.engine.check_integrity()
    return [list(output.outputs[0].token_ids) for output in outputs]


PROGRAMS: dict[str, Program] = {
    program.__name__: program for program in (generate, sample, threaded, adapters, new_weights, many, first)
}  # fmt: skip


def run(name: str, options: Mapping[str, Any]) -> Any:
    """The result of a program on an engine with these options."""
    with LLM(**options) as llm:
        return PROGRAMS[name](llm, Path(options["model"]))


def main(name: str, options: str, result: str) -> None:
    """Run a program and write its result, when the engine has ended."""
    found = run(name, json.loads(options))
    gc.collect()
    Path(result).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
