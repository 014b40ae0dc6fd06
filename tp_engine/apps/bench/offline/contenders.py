"""The contenders of the offline benchmark: which engines run with which options, and the loop in which they run."""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from tp_engine.apps.bench.int4_checkpoint import PACKINGS, write_int4_checkpoint
from tp_engine.apps.bench.offline.process import GPU_PEERS, EngineProcess, Found, Measurement, find_peer
from tp_engine.apps.bench.workloads import WORKLOADS, BenchWorkload
from tp_engine.attention.torch_backend import TorchBackend
from tp_engine.config import QUANTIZATIONS
from tp_engine.distributed.collectives import SingleRank
from tp_engine.model_config import read_model
from tp_engine.models.causal_lm import build_model
from tp_engine.weights.dummy import DummyWeights
from tp_engine.weights.source import Source, sources_of, whole


class Contender(Protocol):
    """One engine with a model loaded."""

    def run(self, workload: BenchWorkload) -> Measurement:
        """Generate exactly the tokens that the workload asks for."""

    def close(self) -> None:
        """Free the model."""


Makers = Mapping[str, Callable[[Mapping[str, Any]], Contender]]
"""Functions that start the engines, from the options of engines that share a GPU."""
Runs = dict[str, dict[str, list[Measurement]]]
"""BenchWorkload -> engine -> rounds."""

_WARM_UP_SEED = 1_000_000
_SHARED_MEMORY = 0.85  # of a GPU; the rest is for what engines do not count, such as a CUDA context for each process


def contenders(args: argparse.Namespace, model: str, scratch: Path) -> tuple[Makers, dict[str, str]]:
    """Functions that start tp_engine at every size and quantization and each peer, and the reason for each peer that is
    left out.  The model in each packing that a contender reads ("awq") is written to ``scratch``."""
    kinds = {*args.quantization.split(","), *(peer.partition(":")[2] for peer in args.peer)}
    packed = {kind: str(write_int4_checkpoint(Path(model), scratch / kind, kind)) for kind in PACKINGS if kind in kinds}
    sizes = args.tensor_parallel_size.split(",")
    makers: dict[str, Callable[[Mapping[str, Any]], Contender]] = {}
    skipped: dict[str, str] = {}
    ways = (sizes, args.quantization.split(","), args.tp_invariant.split(","), args.mtp.split(","))
    for size, kind, invariant, drafts in itertools.product(*ways):
        options = engine_options(args, int(size)) | ({"quantization": kind} if kind in QUANTIZATIONS else {})
        parts = [f"tp_engine TP {size}", "" if kind == "none" else kind]
        if invariant == "on":
            parts, options = [*parts, "invariant"], options | {"tp_invariant": True}
        if drafts != "0":
            config = {"method": "mtp", "num_speculative_tokens": int(drafts)}
            parts, options = [*parts, f"mtp {drafts}"], options | {"speculative_config": config}
        makers[" ".join(filter(None, parts))] = partial(
            _start, args, "tp_engine", Found(), packed.get(kind, model), options
        )
    for peer in args.peer:
        name, _, kind = peer.partition(":")
        found = find_peer(name, args.peer_python[name], args.peer_folders.get(name))
        if isinstance(found, str):
            skipped[peer] = found
            continue
        given: dict[str, Any] = args.peer_options.get(name, {})
        for size in sizes if name == "vllm" and sizes != ["1"] else [""]:  # vLLM runs with the same numbers of ranks
            options = given | ({"tensor_parallel_size": int(size)} if size else {})
            label = " ".join(filter(None, [name, found.version, f"TP {size}" if size else "", kind]))
            further = {"quantization": kind} if kind and kind not in packed else {}
            makers[label] = partial(_start, args, name, found, packed.get(kind, model), options, **further)
    return makers, skipped


def _start(
    args: argparse.Namespace,
    name: str,
    found: Found,
    model: str,
    options: dict[str, Any],
    shared: Mapping[str, Any],
    **further: str,
) -> Contender:
    """Start an engine; a peer gets tp_engine's options where it has the same, and a checkpoint if it needs one."""
    ours, known = {**shared, **engine_options(args, 1)}, GPU_PEERS.get(name, ())
    if name == "tp_engine":
        known = tuple(ours)
    elif args.is_dummy and "load_format" not in known:
        add_checkpoint(Path(model), args.dtype)
    load = {"model": model, "dtype": args.dtype, "max_model_len": ours["max_model_len"], **further}
    load["options"] = {option: ours[option] for option in known if option in ours} | options
    return EngineProcess(name, found, threads=args.threads, timeout_s=args.peer_timeout_s, **load)


def engine_options(args: argparse.Namespace, size: int) -> dict[str, Any]:
    """``LLM``'s options for ``size`` ranks."""
    options: dict[str, Any] = {"dtype": args.dtype, "tensor_parallel_size": size}
    if torch.cuda.is_available():
        options |= {"max_model_len": 2048, "max_num_seqs": 256, "max_num_batched_tokens": 16384}
        options["enable_prefix_caching"] = True
    elif args.is_dummy:
        options |= {"max_model_len": 2048}
    else:
        options |= {"max_model_len": 1024, "num_gpu_blocks_override": 1024}
    if args.is_dummy:
        options["load_format"] = "dummy"
    if args.device_ids:
        options["device_ids"] = ",".join(args.device_ids.split(",")[:size])
    options |= args.engine_options
    return options


def add_checkpoint(model: Path, dtype: str) -> None:
    """Write the weights of ``load_format="dummy"`` beside the config.json, unless there are weights already."""
    from safetensors.torch import save_file

    if list(model.glob("*.safetensors")):
        return
    spec = read_model(json.loads((model / "config.json").read_text(encoding="utf-8")))
    built = build_model(
        spec,
        communicator=SingleRank(),
        dtype=torch.float32,
        device=torch.device("meta"),
        backends=[TorchBackend()] * len(spec.kv_layout.groups),
        max_model_len=1,
    )
    shapes = {source.name: source.shape for parameter in built.parameters() for source in sources_of(parameter)}
    sources = [
        Source(name=name, shape=shape, taken=whole(shape), target=whole(shape), init=1.0 if "norm." in name else None)
        for name, shape in shapes.items()
    ]
    weights = DummyWeights(sources, 0, dtype=getattr(torch, dtype), device=torch.device("cpu"))
    save_file({source.name: weights.read(source.name, source) for source in sources}, model / "model.safetensors")


def memory_share(args: argparse.Namespace, num_engines: int) -> float | None:
    """The share of a GPU's memory of each engine that is loaded together with the others; None if they do not share."""
    if not args.together or not torch.cuda.is_available():
        return None
    return round(_SHARED_MEMORY / num_engines, 3)


def run_all(
    makers: Makers, names: list[str], vocab_size: int, rounds: int, share: float | None = None
) -> tuple[Runs, dict[str, str]]:
    """Run every workload on every engine: alternating on CPUs and on a shared GPU, else one engine after the other.
    Returns the rounds, and the error of each engine that failed."""
    runs: Runs = {name: {} for name in names}
    failures: dict[str, str] = {}
    alternate = share is not None or not torch.cuda.is_available()
    shared = {} if share is None else {"gpu_memory_utilization": share}
    for group in [makers] if alternate else [{name: make} for name, make in makers.items()]:
        engines: dict[str, Contender] = {}
        try:
            for name, make in group.items():
                with _noted(name, failures):
                    engines[name] = make(shared)
            for workload, measured in runs.items():
                _take_turns(workload, engines, measured, failures, vocab_size, rounds)
        finally:
            for name, engine in engines.items():
                with _noted(name, failures):
                    engine.close()
    return runs, failures


def _take_turns(
    workload: str,
    engines: Mapping[str, Contender],
    rounds_of: dict[str, list[Measurement]],
    failures: dict[str, str],
    vocab_size: int,
    rounds: int,
) -> None:
    """Run a warm-up round, then the rounds that count, each with fresh prompts.  Each time is printed on standard error
    at once, so that an interrupted run leaves its figures.  On a machine shared with other programs, the CPU time of an
    engine's process says more than the elapsed time."""
    for seed in (_WARM_UP_SEED, *range(rounds)):
        for name in [name for name in engines if name not in failures]:
            with _noted(name, failures):
                found = engines[name].run(WORKLOADS[workload](vocab_size, seed))
                first = "" if found.first_token_s is None else f", first token {found.first_token_s:.3f} s"
                told = f"{found.total_s:.3f} s{first}; {found.cpu_s:.3f} s of CPU time in its process"
                print(f"{workload}, seed {seed}, {name}: {told}", file=sys.stderr, flush=True)
                if seed != _WARM_UP_SEED:
                    rounds_of.setdefault(name, []).append(found)
            if name in failures:
                rounds_of.pop(name, None)


@contextmanager
def _noted(name: str, failures: dict[str, str]) -> Iterator[None]:
    """Note an error of the block, so that the other engines still run."""
    try:
        yield
    except Exception as error:
        failures.setdefault(name, f"{type(error).__name__}: {error}")
