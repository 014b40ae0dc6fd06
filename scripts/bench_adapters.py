"""What adapters cost: an engine without slots, one with slots and no adapter, and one whose requests have some.

    python scripts/bench_adapters.py --shape C --dtype float32 --rounds 5

The three engines run the same requests in turns, on one thread, and CPU time counts, so that other programs on the
machine disturb little.  ``--adapters`` different ones, on all linear layers, are shared by the requests of the third.
For each engine it prints the median of the rounds and its ratio to the first.  The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from benchmarks.machine import processor_name
from benchmarks.shapes import SHAPES, make_folder

from tp_engine import LLM, LoRARequest, SamplingParams

NAMES = ("no slots", "slots, no adapter", "adapters")


def write_adapter(folder: Path, config: dict[str, Any], rank: int, seed: int) -> Path:
    """A random adapter on all linear layers of the model that ``config`` describes, as PEFT would save it."""
    hidden, inner, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    width = config.get("head_dim") or hidden // heads
    sizes = {
        "self_attn.q_proj": (hidden, heads * width),
        "self_attn.k_proj": (hidden, config["num_key_value_heads"] * width),
        "self_attn.v_proj": (hidden, config["num_key_value_heads"] * width),
        "self_attn.o_proj": (heads * width, hidden),
        "mlp.gate_proj": (hidden, inner),
        "mlp.up_proj": (hidden, inner),
        "mlp.down_proj": (inner, hidden),
    }
    draw, tensors = torch.Generator().manual_seed(seed), {}
    for layer in range(config["num_hidden_layers"]):
        for name, (columns, rows) in sizes.items():
            module = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{module}.lora_A.weight"] = torch.randn(rank, columns, generator=draw) * 0.02
            tensors[f"{module}.lora_B.weight"] = torch.randn(rows, rank, generator=draw) * 0.02
    folder.mkdir()
    safetensors.torch.save_file(tensors, folder / "adapter_model.safetensors")
    fields = {"peft_type": "LORA", "r": rank, "lora_alpha": rank}
    (folder / "adapter_config.json").write_text(json.dumps(fields), encoding="utf-8")
    return folder


def measure(llm: LLM, prompts: list[list[int]], num_tokens: int, adapters: list[LoRARequest | None]) -> float:
    """CPU seconds for all ``prompts``."""
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    llm.reset_prefix_cache()
    begin_s = time.process_time()
    llm.generate(prompts, params, use_tqdm=False, lora_request=adapters)
    return time.process_time() - begin_s


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="C", help="a model of this shape, random weights")
    parser.add_argument("--dtype", default="float32", help="type of weights")
    parser.add_argument("--rounds", type=int, default=5, help="rounds per engine; the median counts")
    parser.add_argument("--requests", type=int, default=16, help="requests at once")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of each prompt, and of each answer")
    parser.add_argument("--adapters", type=int, default=4, help="different adapters")
    parser.add_argument("--rank", type=int, default=16, help="their rank")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = make_folder(folder / "model", args.shape, args.dtype)
        config = json.loads((model / "config.json").read_text(encoding="utf-8"))
        wanted = [
            LoRARequest(f"a{seed}", 1, str(write_adapter(folder / f"a{seed}", config, args.rank, seed)))
            for seed in range(args.adapters)
        ]
        draw = np.random.default_rng(0)
        shape = (args.requests, args.tokens)
        prompts: list[list[int]] = draw.integers(3, config["vocab_size"], shape).tolist()
        seconds = run(str(model), args, prompts, wanted)
    first = statistics.median(seconds[NAMES[0]])
    for engine, found in seconds.items():
        middle = statistics.median(found)
        print(f"{engine:20} {middle:8.3f} s of CPU time   {middle / first:.3f}   {min(found):.3f} to {max(found):.3f}")
    print(json.dumps({"benchmark": "adapters", "machine": processor_name(), **vars(args), "seconds": seconds}))
    return 0


def run(
    model: str, args: argparse.Namespace, prompts: list[list[int]], wanted: list[LoRARequest]
) -> dict[str, list[float]]:
    """CPU seconds of each round, by engine; a first round warms up."""
    options: dict[str, Any] = {"dtype": args.dtype, "load_format": "dummy", "max_model_len": 512, "max_num_seqs": 64}
    with_slots = {"enable_lora": True, "max_loras": args.adapters, "max_lora_rank": args.rank, **options}
    none: list[LoRARequest | None] = [None] * len(prompts)
    some: list[LoRARequest | None] = [wanted[number % len(wanted)] for number in range(len(prompts))]
    seconds: dict[str, list[float]] = {name: [] for name in NAMES}
    with LLM(model, **options) as plain, LLM(model, **with_slots) as slots:
        turns = ((NAMES[0], plain, none), (NAMES[1], slots, none), (NAMES[2], slots, some))
        for number in range(args.rounds + 1):
            for name, llm, adapters in turns[:: 1 if number % 2 else -1]:
                found = measure(llm, prompts, args.tokens, adapters)
                if number:
                    seconds[name].append(found)
    return seconds


if __name__ == "__main__":
    raise SystemExit(main())
