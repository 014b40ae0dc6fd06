"""Measure what quantised weights cost in accuracy: logits, a text's perplexity, and the demo model's tasks.

    python scripts/bench_quantization.py --shape B --dtype float32 --tokens 64 --quantization int8,awq
    python scripts/bench_quantization.py --demo --samples 200 --quantization int8,awq,gptq --checkpoint FOLDER
    python scripts/bench_quantization.py --model FOLDER --text FILE --dtype bfloat16 --kv-cache-dtype fp8,int8

Kinds of quantisation stand side by side.  awq and gptq are checkpoints that are written here, with weights rounded to
the nearest code.  --checkpoint names quantised copies of the demo model, in any format that tp_engine reads.

Logits are compared with the unquantised model's at every position of one random prompt, on one rank: relative root mean
square error, mean KL divergence in nats, and how often the likeliest token is the same.  Weights are random, as in a
newly initialised model.  --text gives the perplexity of a text, of a model in a folder, also with the types of
--kv-cache-dtype.  --demo gives the share of exactly right replies to held-out messages.  The last line is one JSON
object.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.int4_checkpoint import PACKINGS, write_int4_checkpoint
from benchmarks.machine import processor_name
from benchmarks.perplexity import perplexity
from benchmarks.shapes import DEMO_MODEL, DUMMY_SHAPES, SHAPES, make_folder
from demo_tasks import QUICK, held_out_dialogs

from tp_engine.config import QUANTIZATIONS

KINDS = (*QUANTIZATIONS, *PACKINGS)
_GROUP = 64  # 128 does not divide the columns of the demo model (704) and of SmolLM2 (576)


def main(arguments: list[str] | None = None) -> int:
    """Measure and print."""
    args = parse_arguments(arguments)
    report: dict[str, Any] = {"benchmark": "quantization", "machine": processor_name()}
    if args.text:
        report |= compare_perplexities(args)
    else:
        report |= compare_answers(args) if args.demo else compare_logits(args)
    for key, value in report.items():
        if key != "kinds":
            print(f"{key:<24}{value}")
    print_table(report["kinds"])
    print(json.dumps(report))
    return 0


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """The command line; ``quantization`` is a list."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=[*sorted(SHAPES), *DUMMY_SHAPES], default="B")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--tokens", type=int, default=64, help="length of the prompt")
    parser.add_argument("--quantization", default=",".join(QUANTIZATIONS), help=f"of {', '.join(KINDS)}")
    parser.add_argument("--text", type=Path, help="a file: its perplexity instead of a shape's logits")
    parser.add_argument("--model", type=Path, default=DEMO_MODEL, help="for --text: a folder (default: the demo model)")
    parser.add_argument("--kv-cache-dtype", default="", help="for --text: types, side by side with those of weights")
    parser.add_argument("--demo", action="store_true", help="the demo model's accuracy instead of a shape's logits")
    parser.add_argument("--samples", type=int, default=50, help="held-out samples per task for --demo")
    parser.add_argument("--checkpoint", nargs="*", default=[], help="for --demo: quantised copies of the demo model")
    args = parser.parse_args(arguments)
    args.quantization = list(filter(None, args.quantization.split(",")))
    args.kv_cache_dtype = list(filter(None, args.kv_cache_dtype.split(",")))
    if unknown := set(args.quantization) - set(KINDS):
        parser.error(f"--quantization names {', '.join(sorted(unknown))}; choose among {', '.join(KINDS)}")
    if args.checkpoint and not args.demo:
        parser.error("--checkpoint goes with --demo")
    if args.shape in DUMMY_SHAPES and set(args.quantization) & set(PACKINGS):
        parser.error(f"--shape {args.shape} has no weights to write as {' or '.join(PACKINGS)}; choose A, B or C")
    return args


def print_table(kinds: dict[str, dict[str, float]]) -> None:
    """A row per figure, a column per kind of quantisation."""
    print(f"{'':<24}" + "".join(f"{Path(kind).name:>14}" for kind in kinds))
    for row in next(iter(kinds.values())):
        print(f"{row:<24}" + "".join(f"{figures[row]:>14g}" for figures in kinds.values()))


def compare_logits(args: argparse.Namespace) -> dict[str, Any]:
    """Compare each quantised model's logits with the unquantised model's."""
    with tempfile.TemporaryDirectory() as name:
        (source := Path(name) / "model").mkdir()
        make_folder(source, args.shape, args.dtype)
        exact = prompt_logits(source, None, args)
        kinds = {
            kind: logit_errors(exact, prompt_logits(*weights_of(kind, source, 128), args)) for kind in args.quantization
        }
    return {"shape": args.shape, "dtype": args.dtype, "tokens": args.tokens, "kinds": kinds}


def weights_of(kind: str, source: Path, group: int) -> tuple[Path, str | None]:
    """The folder and the option ``quantization`` that give the model of ``source`` this kind of weights."""
    if kind in PACKINGS:
        return write_int4_checkpoint(source, source.parent / kind, kind, group), None
    return source, kind


def logit_errors(exact: torch.Tensor, found: torch.Tensor) -> dict[str, float]:
    """How far the logits (tokens, vocabulary) are from the exact ones."""
    log_exact, log_found = exact.log_softmax(-1), found.log_softmax(-1)
    divergence = (log_exact.exp() * (log_exact - log_found)).sum(-1)
    return {
        "relative_rms_error": round(float((found - exact).norm() / exact.norm()), 5),
        "mean_kl_nats": float(f"{divergence.mean():.3g}"),
        "same_top_token": round(float((found.argmax(-1) == exact.argmax(-1)).double().mean()), 4),
    }


def prompt_logits(folder: Path, quantization: str | None, args: argparse.Namespace) -> torch.Tensor:
    """Float64 logits (tokens, vocabulary) of a random prompt, without a KV cache."""
    from tp_engine.attention.base import AttentionNeeds
    from tp_engine.attention.registry import select_backend
    from tp_engine.layers.attention import forward_context
    from tp_engine.model_config import load_model_config
    from tp_engine.models.causal_lm import build_model
    from tp_engine.ranks.collectives import SingleRank
    from tp_engine.weights.loader import load_weights

    config, path = load_model_config(str(folder))
    dtype, device, rank = getattr(torch, args.dtype), torch.device("cpu"), SingleRank()
    needs = AttentionNeeds(
        device_type="cpu",
        dtype=dtype,
        kv_cache_dtype=dtype,
        block_size=16,
        head_dims=tuple({attention.head_dim for attention in config.attentions}),
        capability=None,
    )
    model = build_model(
        config,
        communicator=rank,
        dtype=dtype,
        device=device,
        backends=[select_backend("torch", needs)] * len(config.kv_layout.groups),
        max_model_len=args.tokens,
        quantization=quantization,
    )
    load_format = "dummy" if args.shape in DUMMY_SHAPES else "auto"
    load_weights(dict(model.named_parameters()), config, path, info=rank.info, load_format=load_format)
    model.finish_loading()
    tokens = torch.randint(3, config.vocab_size, (args.tokens,), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode(), forward_context([one_prompt(args.tokens)] * len(config.kv_layout.groups)):
        return model.compute_local_logits(model(tokens, torch.arange(args.tokens))).double()


def one_prompt(num_tokens: int) -> Any:
    """The metadata of one new request whose K and V are not stored."""
    from tp_engine.attention.base import AttentionMetadata

    lens = np.array([num_tokens], dtype=np.int32)
    return AttentionMetadata(
        num_decodes=0,
        slot_mapping=torch.full((num_tokens,), -1, dtype=torch.int64),
        block_table=torch.zeros((1, 1), dtype=torch.int32),
        seq_lens=torch.from_numpy(lens),
        query_start=torch.tensor([0, num_tokens], dtype=torch.int32),
        host_query_lens=lens,
        host_seq_lens=lens,
    )


def compare_perplexities(args: argparse.Namespace) -> dict[str, Any]:
    """The perplexity of the text, first of all unquantised ("none"), and its ratio to that one."""
    text, found = args.text.read_text(encoding="utf-8"), {"none": 0.0}
    with tempfile.TemporaryDirectory() as name:
        (source := Path(name) / "model").symlink_to(args.model.absolute())
        for kind in ("none", *args.quantization):
            folder, quantization = weights_of(kind, source, _GROUP) if kind != "none" else (source, None)
            found[kind] = perplexity(str(folder), text, dtype=args.dtype, quantization=quantization)
        for kind in args.kv_cache_dtype:
            found[f"{kind} KV cache"] = perplexity(str(source), text, dtype=args.dtype, kv_cache_dtype=kind)
    kinds = {
        kind: {"perplexity": round(value, 3), "to none": round(value / found["none"], 4)}
        for kind, value in found.items()
    }
    return {"model": args.model.name, "dtype": args.dtype, "kinds": kinds}


def compare_answers(args: argparse.Namespace) -> dict[str, Any]:
    """The share of exactly right replies for each task of the demo model, first of all unquantised ("none")."""
    kinds = {"none": answer_scores(DEMO_MODEL, None, args.samples)}
    with tempfile.TemporaryDirectory() as name:
        (source := Path(name) / "model").symlink_to(DEMO_MODEL)
        for kind in args.quantization:
            kinds[kind] = answer_scores(*weights_of(kind, source, _GROUP), args.samples)
    kinds |= {folder: answer_scores(Path(folder), None, args.samples) for folder in args.checkpoint}
    return {"samples": args.samples, "kinds": kinds}


def answer_scores(folder: Path, quantization: str | None, samples: int) -> dict[str, float]:
    """Greedy replies to held-out dialogs, in the checkpoint's type."""
    from tp_engine import LLM, SamplingParams

    scores = {}
    options: dict[str, Any] = {"device": "cpu", "num_gpu_blocks_override": 2048, "max_num_seqs": 64}
    with LLM(str(folder), quantization=quantization, **options) as llm:
        for name in QUICK:
            dialogs, expected = zip(*held_out_dialogs(name, samples), strict=True)
            outputs = llm.chat(list(dialogs), SamplingParams(temperature=0, max_tokens=96), use_tqdm=False)
            right = [output.outputs[0].text == reply for output, reply in zip(outputs, expected, strict=True)]
            scores[name] = sum(right) / samples
    return scores


if __name__ == "__main__":
    sys.exit(main())
