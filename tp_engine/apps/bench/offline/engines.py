"""The engines of the offline benchmark, each in its own process; only tp_engine's needs tp_engine.

This file runs as a script, with NAME.  Commands are JSON lines on standard input, answers are lines on standard output
that begin with ``ANSWER``::

    {"load": {"model": FOLDER, "dtype": "float32", "max_model_len": 1024, "options": {}}}  ->  {"comparable": true}
    {"run": {"prompts": [[1, 2]], "max_tokens": [3]}}  ->  {"total_s": .., "first_token_s": .. or null, "cpu_s": ..,
                                                            "token_ids": ..}

``comparable`` says whether the answers should equal those of tp_engine; ``cpu_s`` is the CPU time of this process in
``total_s``.  The answer to a command that fails is
{"error": "..."}.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

ANSWER = "ANSWER "


class LoadedEngine:
    """An engine with a model loaded; ``generate`` returns as many tokens for each prompt as it asks for."""

    comparable = True
    kernel_choices = ""

    def forget(self) -> None:
        """Clear the prefix cache, if the engine has one that can be cleared."""


class Vllm(LoadedEngine):
    """vLLM, greedy; its prefix cache is cleared between the run to the first token and the whole run.  Its dummy
    weights are not those of tp_engine, so answers are then not compared."""

    MODULE = "vllm"
    OTHER_DUMMY_WEIGHTS = True
    SETTINGS: ClassVar[dict[str, Any]] = {"skip_tokenizer_init": True, "disable_log_stats": True}
    WANTED: ClassVar[dict[str, Any]] = {"detokenize": False}

    def __init__(self, model: str, dtype: str, max_model_len: int, options: dict[str, Any]) -> None:
        self.comparable = not (self.OTHER_DUMMY_WEIGHTS and options.get("load_format") == "dummy")
        self._api = importlib.import_module(self.MODULE)
        self._llm = self._api.LLM(
            model=model, **({"dtype": dtype, "max_model_len": max_model_len} | self.SETTINGS | options)
        )

    def generate(self, prompts: list[list[int]], counts: list[int]) -> list[list[int]]:
        make, wanted = self._api.SamplingParams, {"temperature": 0, "ignore_eos": True} | self.WANTED
        params = [make(max_tokens=count, **wanted) for count in counts]
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        return [list(one.outputs[0].token_ids) for one in self._llm.generate(asked, params, use_tqdm=False)]

    def forget(self) -> None:
        self._llm.reset_prefix_cache()


class TpEngine(Vllm):
    """tp_engine; its classes have vLLM's names."""

    MODULE = "tp_engine"
    OTHER_DUMMY_WEIGHTS = False
    SETTINGS: ClassVar[dict[str, Any]] = {}
    WANTED: ClassVar[dict[str, Any]] = {}

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self.kernel_choices = self._llm.engine.model_info.kernel_choices


class Transformers(LoadedEngine):
    """transformers' ``generate`` on one left-padded batch, run to the longest answer.  On CUDA it uses a static cache,
    so that transformers compiles the decode step."""

    def __init__(self, model: str, dtype: str, max_model_len: int, options: dict[str, Any]) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self._torch = torch
        self._device, cache = ("cuda", {"cache_implementation": "static"}) if torch.cuda.is_available() else ("cpu", {})
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=dtype).to(self._device).eval()
        self._options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, **cache, **options}

    def generate(self, prompts: list[list[int]], counts: list[int]) -> list[list[int]]:
        longest, num_tokens = max(map(len, prompts)), max(counts)
        padding = [longest - len(prompt) for prompt in prompts]
        ids = [[0] * count + prompt for count, prompt in zip(padding, prompts, strict=True)]
        mask = [[0] * count + [1] * (longest - count) for count in padding]
        asked = {
            name: self._torch.tensor(rows, device=self._device)
            for name, rows in (("input_ids", ids), ("attention_mask", mask))
        }
        with self._torch.inference_mode():
            out = self._model.generate(**asked, min_new_tokens=num_tokens, max_new_tokens=num_tokens, **self._options)
        return [row[longest : longest + count] for row, count in zip(out.tolist(), counts, strict=True)]


class NanoVllm(LoadedEngine):
    """nano-vllm.  It has no greedy decoding, so it samples at temperature 0.6 and its answers are not compared.

    It needs a tokenizer to start.  It also turns answers into text, unlike the other engines here; that is switched
    off.  Its prefix cache is kept between the run to the first token and the whole run, but holds only blocks of 256
    tokens, so nothing of a shorter prompt.
    """

    comparable = False

    def __init__(self, model: str, dtype: str, max_model_len: int, options: dict[str, Any]) -> None:
        self._api = importlib.import_module("nanovllm")
        self._folder = tempfile.TemporaryDirectory()
        linked = Path(self._folder.name) / "model"
        link_with_tokenizer(Path(model), linked)
        if "gpu_memory_utilization" in options:
            options = options | {"gpu_memory_utilization": beside_others(options["gpu_memory_utilization"])}
        self._llm = self._api.LLM(str(linked), **({"max_model_len": max_model_len} | options))
        self._llm.tokenizer = SimpleNamespace(decode=lambda token_ids: "")

    def generate(self, prompts: list[list[int]], counts: list[int]) -> list[list[int]]:
        params = [self._api.SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=count) for count in counts]
        return [list(one["token_ids"]) for one in self._llm.generate(prompts, params, use_tqdm=False)]


def beside_others(share: float) -> float:
    """nano-vllm's ``gpu_memory_utilization`` for this share: it must include the GPU memory of other programs."""
    import torch

    if not torch.cuda.is_available():
        return share
    free, total = torch.cuda.mem_get_info()
    return share + (total - free) / total


class Ctranslate2(LoadedEngine):
    """CTranslate2, greedy, from a conversion made here; the interpreter needs transformers too.  One batch runs to its
    longest answer, because ``generate_batch`` has one length for all."""

    def __init__(self, model: str, dtype: str, max_model_len: int, options: dict[str, Any]) -> None:
        import ctranslate2

        self._folder = tempfile.TemporaryDirectory()
        source, converted = Path(self._folder.name) / "source", str(Path(self._folder.name) / "model")
        link_with_tokenizer(Path(model), source)
        quantization = {"float32": "float32", "bfloat16": "bfloat16"}[dtype]
        ctranslate2.converters.TransformersConverter(str(source)).convert(converted, quantization=quantization)
        vocabulary = Path(converted) / "vocabulary.json"
        self._tokens: list[str] = json.loads(vocabulary.read_text(encoding="utf-8"))
        self._generator = ctranslate2.Generator(converted, device="cpu", compute_type=quantization, **options)

    def generate(self, prompts: list[list[int]], counts: list[int]) -> list[list[int]]:
        longest = max(counts)
        results = self._generator.generate_batch(
            [[self._tokens[token] for token in prompt] for prompt in prompts],
            min_length=longest,
            max_length=longest,
            sampling_topk=1,
            include_prompt_in_result=False,
        )
        return [one.sequences_ids[0][:count] for one, count in zip(results, counts, strict=True)]


class LlamaCpp(LoadedEngine):
    """llama.cpp through llama-cpp-python, greedy, from a GGUF file written here; ``quantization`` is its file type.
    Requests run one after the other, because its ``Llama`` has one sequence.  ``Llama`` keeps the K and V of a prefix
    that two successive prompts share."""

    def __init__(
        self, model: str, dtype: str, max_model_len: int, options: dict[str, Any], quantization: str | None = None
    ) -> None:
        from llama_cpp import Llama

        sys.path.append(str(Path(__file__).parent))
        files = importlib.import_module("gguf_checkpoint")
        self._folder = tempfile.TemporaryDirectory()
        target = Path(self._folder.name) / "model.gguf"
        files.write_gguf(Path(model), target, dtype)
        if quantization is not None:
            target = files.quantise_gguf(target, quantization)
        threads = int(os.environ["OMP_NUM_THREADS"])
        settings = {"n_ctx": max_model_len, "n_threads": threads, "n_threads_batch": threads, "verbose": False}
        self._llm = Llama(str(target), **(settings | options))

    def generate(self, prompts: list[list[int]], counts: list[int]) -> list[list[int]]:
        return [
            list(islice(self._llm.generate(prompt, top_k=1, temp=0.0), count))
            for prompt, count in zip(prompts, counts, strict=True)
        ]

    def forget(self) -> None:
        self._llm.reset()


def link_with_tokenizer(model: Path, folder: Path) -> None:
    """Fill ``folder`` with the checkpoint's files; without a tokenizer it gets one with words ``<0>``, ``<1>``, ..."""
    folder.mkdir()
    for path in model.iterdir():
        (folder / path.name).symlink_to(path.resolve())
    if (folder / "tokenizer.json").exists():
        return
    size = json.loads((model / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    words = {"type": "WordLevel", "vocab": {f"<{token}>": token for token in range(size)}, "unk_token": "<0>"}
    parts = ("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder")
    tokenizer: dict[str, Any] = {"version": "1.0", "added_tokens": [], **dict.fromkeys(parts), "model": words}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<0>", "bos_token": "<1>", "eos_token": "<2>"}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


ENGINES = {
    "tp_engine": TpEngine,
    "transformers": Transformers,
    "vllm": Vllm,
    "nano-vllm": NanoVllm,
    "ctranslate2": Ctranslate2,
    "llama.cpp": LlamaCpp,
}


def run(engine: Any, prompts: list[list[int]], max_tokens: list[int]) -> dict[str, Any]:
    """Run a workload and time it; a single request also gets the time to the first token."""
    first = None
    if len(prompts) == 1:
        started = time.perf_counter()
        engine.generate(prompts, [1])
        first = time.perf_counter() - started
        engine.forget()
    started, used_s = time.perf_counter(), time.process_time()
    tokens = engine.generate(prompts, max_tokens)
    total_s, cpu_s = time.perf_counter() - started, time.process_time() - used_s
    found = {"total_s": total_s, "first_token_s": first, "cpu_s": cpu_s, "token_ids": tokens}
    return found | {"kernel_choices": engine.kernel_choices}


def main(name: str) -> None:
    """Answer commands until the input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the engine's output goes to the log, line by line, so that a crash loses none of it
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    engine: Any = None
    for line in sys.stdin:
        command = json.loads(line)
        try:
            if "load" in command:
                engine = ENGINES[name](**command["load"])
                answer: dict[str, Any] = {"comparable": engine.comparable}
            else:
                answer = run(engine, **command["run"])
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(ANSWER + json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main(sys.argv[1])
