"""What a job does with the Python API: a function per program, from an ``LLM`` to what its answers must equal.

Token ids are equal or wrong.  Log-probabilities (``scores``) see what no choice of a token depends on.  The same
function runs on the CPU for the oracle.  ``python -m tests.fake_cuda.programs NAME OPTIONS RESULT`` runs one,
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

from tp_engine import LLM, LoRARequest, RequestOutput, SamplingParams

Program: TypeAlias = Callable[[LLM, Path], Any]
Sampling: TypeAlias = Mapping[str, Any]

PROMPTS = [[5, 9, 13, 7], [7, 3], list(range(20, 40)), [11, 60, 4]]
_LONG = [token % 97 for token in range(0, 1050, 7)]  # more tiles of keys than one, so a decode is split and joined
# Greedy, by noise with a rank, by noise alone, and greedy.  They end at different steps, and others take their places:
# of three rows the first ends when the third begins to decode, so two are other two than before.
_COMMON: tuple[Sampling, ...] = (
    {"temperature": 0, "max_tokens": 2},
    {"temperature": 0.8, "top_k": 5, "seed": 4, "max_tokens": 5},
    {"temperature": 1.0, "seed": 3, "max_tokens": 3},
    {"temperature": 0, "max_tokens": 4},
)
_OTHERS: tuple[Sampling, ...] = (
    {"temperature": 0.9, "top_p": 0.8, "seed": 4},
    {"temperature": 1.0, "top_p": 0.9, "min_p": 0.05, "seed": 5, "presence_penalty": 0.5},
    {"temperature": 0.9, "top_k": 40, "top_p": 0.9, "seed": 6, "logprobs": 2},
)


def generate(llm: LLM, folder: Path) -> list[Any]:
    """Token ids of prompts, the longer ones in chunks beside decodes; then log-probabilities."""
    return [*tokens(llm, _COMMON), scores(llm)]


def sample(llm: LLM, folder: Path) -> list[Any]:
    """The same, and with a nucleus, penalties and log-probabilities."""
    return [*tokens(llm, _COMMON), *tokens(llm, _OTHERS), scores(llm)]


def long(llm: LLM, folder: Path) -> list[Any]:
    """Log-probabilities after a context of many keys, alone and beside a short one."""
    return [scores(llm, [_LONG]), scores(llm, [PROMPTS[0], _LONG])]


def threaded(llm: LLM, folder: Path) -> list[Any]:
    """As ``generate``, in a thread that has not touched a GPU before."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(generate, llm, folder).result()


def adapters(llm: LLM, folder: Path) -> list[Any]:
    """A LoRA adapter beside the base model, loaded while the engine runs."""
    from tests.lora_adapters import ADAPTERS, make_adapter

    with tempfile.TemporaryDirectory() as made:
        path = make_adapter(Path(made), folder, **ADAPTERS["linears"])
        request = LoRARequest("linears", 1, str(path))
        params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, logprobs=1)
        outputs = llm.generate(PROMPTS[:3], params, lora_request=[request, None, request], use_tqdm=False)
        found = [part for output in outputs for part in answer(output)]
        llm.unload_lora_adapter("linears")
    return found


def new_weights(llm: LLM, folder: Path) -> list[Any]:
    """Answers before and after new weights, which come from memory, then after a sleep without its cache."""
    import torch
    from safetensors.torch import load_file

    weights: dict[str, torch.Tensor] = load_file(folder / "model.safetensors")
    found = [scores(llm)]
    llm.update_weights({name: values.flip(0).contiguous() for name, values in weights.items()}.items())
    found.append(scores(llm))
    llm.update_weights_from_disk(folder)
    llm.sleep(1)
    llm.wake_up()
    return [*found, scores(llm)]


def thrice(llm: LLM, folder: Path) -> list[Any]:
    """As ``many``, for a codec that learns from the blocks of the first time, and keeps those of the second."""
    return many(llm, folder, 3)


def many(llm: LLM, folder: Path, times: int = 2) -> list[Any]:
    """More prompts than the cache holds, several times: blocks move to a tier and come back."""
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, logprobs=1)
    prompts = [[token] * 33 for token in range(10, 16)]
    outputs = [output for _ in range(times) for output in llm.generate(prompts, params, use_tqdm=False)]
    return [part for output in outputs for part in answer(output)]


def first(llm: LLM, folder: Path) -> list[int]:
    """What scripts of ``tests.fault_jobs`` print: the tokens of their first prompt."""
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    return list(llm.generate([[65, 66, 67]], params, use_tqdm=False)[0].outputs[0].token_ids)


def tokens(llm: LLM, sampling: Sequence[Sampling]) -> list[list[int]]:
    """Token ids of a prompt for each way of sampling; steps of these rows alone are recorded."""
    params = [SamplingParams(**{"max_tokens": 4, "ignore_eos": True, **own}) for own in sampling]
    outputs = llm.generate(PROMPTS[: len(params)], params, use_tqdm=False)
    llm.engine.check_integrity()
    return [list(output.outputs[0].token_ids) for output in outputs]


def scores(llm: LLM, prompts: Sequence[list[int]] = PROMPTS[::2]) -> list[Any]:
    """Log-probabilities of the prompts' tokens, and of those that follow."""
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, logprobs=1, prompt_logprobs=0)
    return [part for output in llm.generate(list(prompts), params, use_tqdm=False) for part in answer(output)]


def answer(output: RequestOutput) -> tuple[list[int], list[float]]:
    """The token ids of a request, and the log-probabilities of its tokens: those of the prompt, if asked for, first."""
    (found,), scored = output.outputs, output.prompt_logprobs or ()
    given = [*(output.prompt_token_ids if scored else ()), *found.token_ids]
    candidates = [*scored, *(found.logprobs or ())]
    return list(found.token_ids), [one[token].logprob for token, one in zip(given, candidates, strict=True) if one]


def differences(found: Any, wanted: Any, tolerance: float, place: str = "") -> list[str]:
    """Where two results of a program differ: numbers that are not whole, by more than ``tolerance``."""
    if isinstance(wanted, list) and isinstance(found, list) and len(wanted) == len(found):
        parts = zip(found, wanted, strict=True)
        return [text for i, (a, b) in enumerate(parts) for text in differences(a, b, tolerance, f"{place}[{i}]")]
    is_near = isinstance(wanted, float) and isinstance(found, float) and abs(found - wanted) <= tolerance
    return [] if is_near or found == wanted else [f"answer{place}: {found}, and a CPU gives {wanted}"]


PROGRAMS: dict[str, Program] = {
    one.__name__: one for one in (generate, sample, long, threaded, adapters, new_weights, many, thrice, first)
}


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
