"""Measure what quantised weights cost in accuracy: a text's perplexity, and the demo model's tasks.

    python scripts/bench_quantization.py --demo --samples 200 --quantization int8,awq,gptq --checkpoint FOLDER
    python scripts/bench_quantization.py --model FOLDER --text FILE --dtype bfloat16 --kv-cache-dtype fp8,int8

Kinds of quantisation stand side by side, the unquantised model ("none") first.  awq and gptq are checkpoints that are
written here, with weights rounded to the nearest code.  --checkpoint names quantised copies of the demo model, in any
format that tp_engine reads.

--text gives the perplexity of a text, of a model in a folder, also with the types of --kv-cache-dtype.  --demo gives
the share of exactly right replies to held-out messages.  The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.int4_checkpoint import PACKINGS, write_int4_checkpoint
from benchmarks.machine import processor_name
from benchmarks.perplexity import perplexity
from benchmarks.shapes import DEMO_MODEL
from demo_tasks import QUICK, held_out_dialogs

from tp_engine.config import QUANTIZATIONS

KINDS = (*QUANTIZATIONS, *PACKINGS)
_GROUP = 64  # 128 does not divide the columns of the demo model (704) and of SmolLM2 (576)


def main(arguments: list[str] | None = None) -> int:
    """Measure and print."""
    args = parse_arguments(arguments)
    report: dict[str, Any] = {"benchmark": "quantization", "machine": processor_name()}
    report |= compare_answers(args) if args.demo else compare_perplexities(args)
    for key, value in report.items():
        if key != "kinds":
            print(f"{key:<24}{value}")
    print_table(report["kinds"])
    print(json.dumps(report))
    return 0


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """The command line; ``quantization`` is a list."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--quantization", default=",".join(QUANTIZATIONS), help=f"of {', '.join(KINDS)}")
    measured = parser.add_mutually_exclusive_group(required=True)
    measured.add_argument("--demo", action="store_true", help="the demo model's accuracy")
    measured.add_argument("--text", type=Path, help="a file: its perplexity")
    parser.add_argument("--model", type=Path, default=DEMO_MODEL, help="for --text: a folder (default: the demo model)")
    parser.add_argument("--kv-cache-dtype", default="", help="for --text: types, side by side with those of weights")
    parser.add_argument("--samples", type=int, default=50, help="held-out samples per task for --demo")
    parser.add_argument("--checkpoint", nargs="*", default=[], help="for --demo: quantised copies of the demo model")
    args = parser.parse_args(arguments)
    args.quantization = list(filter(None, args.quantization.split(",")))
    args.kv_cache_dtype = list(filter(None, args.kv_cache_dtype.split(",")))
    if unknown := set(args.quantization) - set(KINDS):
        parser.error(f"--quantization names {', '.join(sorted(unknown))}; choose among {', '.join(KINDS)}")
    if args.checkpoint and not args.demo:
        parser.error("--checkpoint goes with --demo")
    return args


def print_table(kinds: dict[str, dict[str, float]]) -> None:
    """A row per figure, a column per kind of quantisation."""
    print(f"{'':<24}" + "".join(f"{Path(kind).name:>14}" for kind in kinds))
    for row in next(iter(kinds.values())):
        print(f"{row:<24}" + "".join(f"{figures[row]:>14g}" for figures in kinds.values()))


def weights_of(kind: str, source: Path) -> tuple[Path, str | None]:
    """The folder and the option ``quantization`` that give the model of ``source`` this kind of weights."""
    if kind in PACKINGS:
        return write_int4_checkpoint(source, source.parent / kind, kind, _GROUP), None
    return source, kind


def compare_perplexities(args: argparse.Namespace) -> dict[str, Any]:
    """The perplexity of the text, first of all unquantised ("none"), and its ratio to that one."""
    text, found = args.text.read_text(encoding="utf-8"), {"none": 0.0}
    with tempfile.TemporaryDirectory() as name:
        (source := Path(name) / "model").symlink_to(args.model.absolute())
        for kind in ("none", *args.quantization):
            folder, quantization = weights_of(kind, source) if kind != "none" else (source, None)
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
            kinds[kind] = answer_scores(*weights_of(kind, source), args.samples)
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
