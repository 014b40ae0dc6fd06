"""The engines of the offline benchmark, their options, and the loop that runs a group of them."""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.int4_checkpoint import PACKINGS, write_int4_checkpoint
from benchmarks.offline.engines import Engine, Measurement, TpEngine, TransformersGenerate, save_dummy_checkpoint
from benchmarks.offline.peers import GPU_PEERS, PACKAGES, Found, PeerProcess, find_peer
from benchmarks.workloads import WORKLOADS
from tp_engine.attention.torch_backend import TorchBackend
from tp_engine.config import QUANTIZATIONS
from tp_engine.distributed.collectives import SingleRank
from tp_engine.model_config import read_model
from tp_engine.models.causal_lm import build_model
from tp_engine.weights.source import sources_of

Makers = dict[str, Callable[[Mapping[str, Any]], Engine]]
"""Functions that make the engines, from the options of engines that share a GPU."""
Runs = dict[str, dict[str, list[Measurement]]]
"""Workload -> engine -> rounds."""

_WARM_UP_SEED = 1_000_000
_SHARED_MEMORY = 0.85  # of a GPU; the rest is for what engines do not count, such as a CUDA context for each process


def engine_makers(args: argparse.Namespace, model: str, packed: Mapping[str, str]) -> Makers:
    """Functions that make tp_engine at every size and quantization, then the peer in this process.  ``packed`` has the
    folder of the same model by packing ("awq")."""
    makers: Makers = {}
    sizes, kinds = args.tensor_parallel_size.split(","), args.quantization.split(",")
    ways = itertools.product(args.tp_invariant.split(","), args.mtp.split(","))
    for size, kind, (way, drafts) in itertools.product(sizes, kinds, list(ways)):
        name = f"tp_engine TP {size}" + ("" if kind == "none" else f" {kind}") + " invariant" * (way == "on")
        name += "" if drafts == "0" else f" mtp {drafts}"
        options = engine_options(args, int(size)) | ({"quantization": kind} if kind in QUANTIZATIONS else {})
        options |= {"tp_invariant": True} if way == "on" else {}
        if drafts != "0":
            options["speculative_config"] = {"method": "mtp", "num_speculative_tokens": int(drafts)}
        makers[name] = partial(_make_ours, args, packed.get(kind, model), options, alone=len(sizes) == 1)
    if "transformers" in args.peer:
        compiled = " (static cache, compiled)" if torch.cuda.is_available() else ""
        makers["transformers generate" + compiled] = lambda _: TransformersGenerate(
            model, args.dtype, dummy=args.is_dummy
        )
    return makers


def _make_ours(
    args: argparse.Namespace, model: str, options: dict[str, Any], shared: Mapping[str, Any], *, alone: bool
) -> Engine:
    """tp_engine in this process; on CPUs in a separate process, as each number of ranks needs its own threads."""
    if alone or torch.cuda.is_available():
        return TpEngine(model, {**shared, **options})
    settings = {"dtype": options["dtype"], "max_model_len": options["max_model_len"], "options": options}
    return PeerProcess(
        "tp_engine", sys.executable, model, threads=args.threads, timeout_s=args.peer_timeout_s, **settings
    )


def packed_checkpoints(args: argparse.Namespace, model: str, parent: Path) -> dict[str, str]:
    """Write the model in each packing that a contender reads; returns the folders in ``parent`` by packing."""
    kinds = {*args.quantization.split(","), *(peer.partition(":")[2] for peer in args.peer)}
    wanted = [packing for packing in PACKINGS if packing in kinds]
    return {packing: str(write_int4_checkpoint(Path(model), parent / packing, packing)) for packing in wanted}


def peer_makers(args: argparse.Namespace, model: str, packed: Mapping[str, str]) -> tuple[Makers, dict[str, str]]:
    """Functions that make the peers in separate processes, and the reason for each peer that is left out."""
    makers: Makers = {}
    skipped: dict[str, str] = {}
    for peer in args.peer:
        name, _, kind = peer.partition(":")
        if name not in PACKAGES:
            continue
        found = find_peer(name, args.peer_python[name], args.peer_folders.get(name))
        if isinstance(found, str):
            skipped[peer] = found
            continue
        folder = packed.get(kind, model)
        further = {"quantization": kind} if kind and kind not in packed else {}
        for ranks, options in _peer_sizes(args, name).items():
            make = partial(_make_peer, args, name, found, folder, options, **further)
            makers[" ".join(filter(None, [name, found.version, ranks, kind]))] = make
    return makers, skipped


def _make_peer(
    args: argparse.Namespace,
    name: str,
    found: Found,
    model: str,
    options: dict[str, Any],
    shared: Mapping[str, Any],
    **further: str,
) -> Engine:
    """A peer in a process of its own, with our options where it has the same, and with a checkpoint if it needs one."""
    ours, known = {**shared, **engine_options(args, 1)}, GPU_PEERS.get(name, ())
    if args.is_dummy and "load_format" not in known:
        add_checkpoint(Path(model), args.dtype)
    load = {"dtype": args.dtype, "max_model_len": ours["max_model_len"]} | further
    load["options"] = {option: ours[option] for option in known if option in ours} | options
    process = {"threads": args.threads, "timeout_s": args.peer_timeout_s, "folder": found.folder}
    return PeerProcess(name, found.python, model, **process, **load)


def _peer_sizes(args: argparse.Namespace, name: str) -> dict[str, dict[str, Any]]:
    """A peer's options by a part of its name: vLLM runs with the same numbers of ranks as tp_engine."""
    options = args.peer_options.get(name, {})
    sizes = args.tensor_parallel_size.split(",")
    if name != "vllm" or sizes == ["1"]:
        return {"": options}
    return {f"TP {size}": options | {"tensor_parallel_size": int(size)} for size in sizes}


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
    """Write dummy weights beside the config.json, unless there are weights already."""
    if not list(model.glob("*.safetensors")):
        shapes = stored_shapes(json.loads((model / "config.json").read_text(encoding="utf-8")))
        save_dummy_checkpoint(model, shapes, getattr(torch, dtype))


def stored_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The name and shape of every tensor in a checkpoint with this config.json."""
    spec = read_model(config)
    model = build_model(
        spec,
        communicator=SingleRank(),
        dtype=torch.float32,
        device=torch.device("meta"),
        backends=[TorchBackend()] * len(spec.kv_layout.groups),
        max_model_len=1,
    )
    return {source.name: source.shape for parameter in model.parameters() for source in sources_of(parameter)}


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
        _run_group(group, shared, runs, failures, vocab_size, rounds)
    return runs, failures


def _run_group(makers: Makers, shared: Mapping[str, Any], runs: Runs, failures: dict[str, str], *work: int) -> None:
    """Load these engines together, take turns, and close them."""
    engines: dict[str, Engine] = {}
    try:
        for name, make in makers.items():
            _attempt(name, failures, lambda name=name, make=make: engines.update({name: make(shared)}))  # type: ignore[misc]
        for workload, per_engine in runs.items():
            _take_turns(workload, engines, per_engine, failures, *work)
    finally:
        for name, engine in engines.items():
            _attempt(name, failures, engine.close)


def _take_turns(
    workload: str,
    engines: Mapping[str, Engine],
    rounds_of: dict[str, list[Measurement]],
    failures: dict[str, str],
    vocab_size: int,
    rounds: int,
) -> None:
    """Run a warm-up round, then the rounds that count, each with fresh prompts.  Each time is told on standard error at
    once, so that a run that is cut short leaves its figures.  On a machine that other programs share, the CPU time of
    an engine in this process says more than the time that passed."""
    make = WORKLOADS[workload]
    for seed in (_WARM_UP_SEED, *range(rounds)):
        for name, engine in engines.items():
            if name in failures:
                continue
            used_s = time.process_time()
            measured = _attempt(name, failures, lambda engine=engine, seed=seed: engine.run(make(vocab_size, seed)))  # type: ignore[misc]
            used_s = time.process_time() - used_s
            if measured is None:
                rounds_of.pop(name, None)
                continue
            first = f", first token {measured.first_token_s:.3f} s" if measured.first_token_s is not None else ""
            told = f"{measured.total_s:.3f} s{first}; {used_s:.3f} s of CPU time in this process"
            print(f"{workload}, seed {seed}, {name}: {told}", file=sys.stderr, flush=True)
            if seed != _WARM_UP_SEED:
                rounds_of.setdefault(name, []).append(measured)


def _attempt(name: str, failures: dict[str, str], act: Callable[[], Any]) -> Any:
    """What ``act`` returns; on an error, note it and return None, so that the other engines still run."""
    try:
        return act()
    except Exception as error:
        failures.setdefault(name, f"{type(error).__name__}: {error}")
        return None
