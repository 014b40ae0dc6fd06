"""Starts the engine of a job, whose ranks torchrun or rank 0 starts.  Rank 0 gets an ``Engine``, the others serve it.

::

    start_engine (rank 0)                                  serve_rank / rank_process (ranks 1 to N-1)
      resolve the configuration                              the same
      create the job's board, start the watchdog             (torchrun: wait for the host's board, or create it)
      start the other ranks, unless torchrun did  ------->   attach to the board, start the watchdog
      connect the hosts, if there are several  <-------->    connect
      join the process groups                  <-------->    join
      worker.start: load, profile, agree       <-------->    worker.start
      create the ring, tell its address        --------->    attach
      Engine                                   == plans =>   run each plan until the stop plan
"""

import contextlib
import dataclasses
import json
import os
from collections.abc import Iterator

import msgspec

from tp_engine.config import EngineConfig
from tp_engine.distributed import groups as process_groups
from tp_engine.distributed.groups import RankGroups
from tp_engine.distributed.store import Store, host_store, job_store, launched_store
from tp_engine.engine.build import build_engine
from tp_engine.engine.engine import Engine
from tp_engine.engine.hosts import link_hosts, topology_of
from tp_engine.engine.job import Job
from tp_engine.engine.processes import ChildRanks, die_with_launcher
from tp_engine.engine.rank_process import RankSpec
from tp_engine.engine.rank_worker import join_ranks, run_worker
from tp_engine.engine.tokenizer import tokenizer_eos_ids
from tp_engine.errors import ConfigError
from tp_engine.grammar.compiler import check_defaults
from tp_engine.ipc.job_board import JobBoard
from tp_engine.ipc.pulse import Pulse
from tp_engine.job.device_map import parse_devices
from tp_engine.job.faults import fault_injector
from tp_engine.job.progress import RankPhase, RankProgress
from tp_engine.job.topology import RankInfo, Topology
from tp_engine.system import env
from tp_engine.system.log import get_logger
from tp_engine.worker.effective_config import EffectiveConfig, resolve
from tp_engine.worker.gpu_host import choose_device_type, devices_of_ranks

logger = get_logger(__name__)

_STOP_TIMEOUT_S = 10.0
_FAILED_STOP_S = 1.0
_LAST_WORDS_S = 4.0
_BOARD_KEY = "board of host {}"
_NEEDED_KEY = "engine is needed"
_LEAVING_KEY = "ranks end with their engine"
_CONNECT_S = 60.0
_DECISION_LIMIT_S = 24 * 3600.0

_have_left: list[bool] = []  # not empty once this rank 0 has had an engine, or needed none


def start_engine(config: EngineConfig, *, ends_process: bool = False, pulse: Pulse | None = None) -> Engine:
    """Rank 0's engine, with all ranks ready.  ``ConfigError`` is raised before any process or device is touched.
    ``ends_process``: this process belongs to the engine alone, so the watchdog may end it if the job has failed and the
    main thread does not return.  The watchdog keeps ``pulse`` beating, for a frontend."""
    launched, effective = env.launched_rank(), _with_tokenizer_eos(check_config(config))
    progress = RankProgress(fault_injector(0))
    _log_model(config, effective)
    adopts = launched is not None and launched.world_size > 1
    if launched is not None:
        die_with_launcher(grace_s=_LAST_WORDS_S)
    num_ranks = effective.config.tensor_parallel_size
    topology = topology_of(launched) if adopts and launched is not None else Topology.one_host(num_ranks)
    job = Job(
        _new_board(topology, 0), progress, effective.config, 0,
        ends_process=ends_process, same_parent=adopts, pulse=pulse,
    )  # fmt: skip
    with contextlib.ExitStack() as undo, _closed_on_error(job):  # what is undone could look like another rank's fault
        if adopts:
            assert launched is not None
            store = launched_store(timeout_s=config.startup_timeout_s)
            store.set(_BOARD_KEY.format(0), job.board.address)
            logger.debug("%s: torch is loaded, the other ranks may come", RankPhase.IMPORT.label)
            progress.reach(RankPhase.IMPORT)
            hosts = link_hosts(effective, launched, store, job)
            undo.callback(hosts.close)  # at the end of the start too: all hosts are connected then
            groups = join_ranks(effective, launched, store, job, hosts.check)
            return build_engine(effective, groups, job, links=hosts.plan_links, leave=lambda _failed: None)
        progress.reach(RankPhase.IMPORT)
        if effective.config.tensor_parallel_size == 1:
            return build_engine(effective, process_groups.alone(progress), job, leave=lambda _failed: None)
        return _spawn(effective, job, undo)


def _with_tokenizer_eos(effective: EffectiveConfig) -> EffectiveConfig:
    """Outputs end with the tokenizer's EOS too, as in vLLM: fine-tuned models often have another one in config.json."""
    config, model = effective.config, effective.model
    found = tokenizer_eos_ids(config.tokenizer_source, config.revision)
    eos = tuple(dict.fromkeys((*model.eos_token_ids, *(one for one in found if 0 <= one < model.vocab_size))))
    return dataclasses.replace(effective, model=dataclasses.replace(model, eos_token_ids=eos))


def _log_model(asked: EngineConfig, effective: EffectiveConfig) -> None:
    """Log, once for all ranks, what the operator should know about the model's files."""
    head, ranks = effective.draft_head, effective.config.tensor_parallel_size
    logger.info(
        "model: %s of %s at %s; %d rank%s, at most %s tokens",
        effective.model.architecture,
        effective.config.dtype,
        effective.model_path,
        ranks,
        "s" if ranks > 1 else "",
        f"{effective.max_model_len:,}",
    )
    for spec, prefix in ((effective.model, ""), *(() if head is None else ((head.spec.model, "draft head: "),))):
        for note in spec.notes:
            logger.info("%s%s", prefix, note)
        if spec.ignored_keys:
            keys = ", ".join(spec.ignored_keys)
            logger.debug("%sconfig.json: ignored keys, which do not change what the model computes: %s", prefix, keys)
        for warning in spec.warnings:
            logger.warning("%s%s", prefix, warning)
    own, dtype = effective.model.dtype, effective.config.dtype
    if asked.dtype == "auto" and dtype != own:
        logger.info("the checkpoint is of %s, which runs in %s on GPUs; set --dtype %s to keep it", own, dtype, own)
    if not effective.model.eos_token_ids and effective.pooling.convert == "none":
        logger.warning(
            "no token ends an output, because config.json, generation_config.json and the tokenizer name none: answers "
            "run to max_tokens, unless requests give stop or stop_token_ids"
        )
    if effective.config.hf_overrides is not None:
        logger.info("config.json is changed by hf_overrides: %s", json.dumps(effective.config.hf_overrides))


def serve_rank(config: EngineConfig) -> None:
    """Run rank 0's plans until the stop plan, as another rank of a torchrun job."""
    launched, effective = env.launched_rank(), check_config(config)
    assert launched is not None and launched.rank > 0
    die_with_launcher(grace_s=_LAST_WORDS_S)
    progress = RankProgress(fault_injector(launched.rank))
    store = launched_store(timeout_s=config.startup_timeout_s)
    job = _member(launched, progress, effective.config, store)
    with _closed_on_error(job):
        progress.reach(RankPhase.IMPORT)
        hosts = link_hosts(effective, launched, store, job)
        run_worker(effective, join_ranks(effective, launched, store, job, hosts.check), job, hosts)


@contextlib.contextmanager
def joined_ranks(config: EngineConfig) -> Iterator[RankGroups]:
    """Join a torchrun job without an engine: yield the rank's process groups, on one host, and leave the job.

    ``config`` names the device and the limits of time: ranks that make no progress for ``startup_timeout_s`` end the
    job, and ``RankError`` names the one that the others wait for.
    """
    launched = env.launched_rank()
    assert launched is not None
    topology = topology_of(launched)
    if topology.num_hosts > 1:
        raise ConfigError(f"the ranks are on {topology.num_hosts} hosts; start the job on one host at a time")
    config = dataclasses.replace(
        config, device=choose_device_type(config.device), tensor_parallel_size=launched.world_size
    )
    if config.device == "cuda":
        config = dataclasses.replace(config, device_ids=devices_of_ranks(config.device_ids, launched.world_size))
    devices = parse_devices(config.device_ids, launched.world_size)
    die_with_launcher(grace_s=_LAST_WORDS_S)
    progress = RankProgress(fault_injector(launched.rank))
    store = launched_store(timeout_s=config.startup_timeout_s)
    job = _member(launched, progress, config, store)
    with _closed_on_error(job):
        progress.reach(RankPhase.IMPORT)
        groups = process_groups.join(
            launched, store, progress, job.check, device_type=config.device, shares_devices=devices.is_shared,
            start_s=config.startup_timeout_s, collective_s=config.collective_timeout_s,
        )  # fmt: skip
        job.watchdog.abort, groups.report = groups.abort, job.report
        with contextlib.closing(groups), contextlib.ExitStack() as stack:
            stack.push(job.on_exit)
            progress.reach(RankPhase.PROFILE)
            yield groups
        job.leave()
        job.close()


def _member(launched: env.LaunchedRank, progress: RankProgress, config: EngineConfig, store: Store) -> Job:
    """The membership of a rank of a torchrun job, on the board of its host, which the host's first rank makes."""
    topology, rank = topology_of(launched), launched.rank
    key = _BOARD_KEY.format(topology.host_of(rank))
    is_leader = topology.is_leader(rank)
    board = _new_board(topology, rank) if is_leader else JobBoard.open(store.get(key).decode())
    job = Job(board, progress, config, rank, ends_process=rank != 0, same_parent=True)
    if is_leader:
        store.set(key, board.address)
    return job


def _new_board(topology: Topology, rank: int) -> JobBoard:
    """The board of a host whose first rank is ``rank``."""
    host, num_local = topology.host_of(rank), topology.local_world_size
    return JobBoard.create(topology.world_size, local_world_size=num_local, host=host)


def check_config(config: EngineConfig) -> EffectiveConfig:
    """Return what ``config`` means for this job; ``ConfigError`` if it cannot work.  Touches no device."""
    launched, num_hosts = env.launched_rank(), 1
    if launched is not None and launched.world_size > 1:
        config = _sized_by_launcher(config, launched)
        num_hosts = topology_of(launched).num_hosts
    check_defaults(config.structured_outputs_config)
    return resolve(config, num_hosts=num_hosts)


def leave_after_engine() -> None:
    """On another rank: tell rank 0 that this process ends with its next engine."""
    job_store(timeout_s=_CONNECT_S).set(_LEAVING_KEY, "yes")


def check_ranks_stay() -> None:
    """On rank 0: ``ConfigError`` if other ranks of this torchrun job ended with an engine, so that none waits for them.
    Their scripts may also go on, and serve one engine after the other."""
    if _have_left and job_store(timeout_s=_CONNECT_S).check([_LEAVING_KEY]):
        raise ConfigError(
            "the other ranks of this torchrun job end with the first engine of its script; use one LLM or run_batch in "
            "it, or start the script without torchrun: with tensor_parallel_size=N each engine starts its own ranks"
        )


def let_ranks_go() -> None:
    """On rank 0: note that the other ranks of this torchrun job, if any, need not be there after the present engine."""
    launched = env.launched_rank()
    if launched is not None and launched.world_size > 1:
        _have_left.append(True)


def tell_ranks(is_needed: bool) -> None:
    """Rank 0 of a torchrun job tells the other ranks whether to start an engine or to end; once per ``ask_rank0``.
    Does nothing in a job of one rank."""
    launched = env.launched_rank()
    if launched is not None and launched.world_size > 1:
        launched_store(timeout_s=_CONNECT_S).set(_NEEDED_KEY, "yes" if is_needed else "no")
    if not is_needed:
        let_ranks_go()


def ask_rank0() -> bool:
    """Another rank of a torchrun job waits for ``tell_ranks``; torchrun ends the job if rank 0 fails before that."""
    return bytes(launched_store(timeout_s=_DECISION_LIMIT_S).get(_NEEDED_KEY)) == b"yes"


def _sized_by_launcher(config: EngineConfig, launched: env.LaunchedRank) -> EngineConfig:
    """``config`` with torchrun's world size as ``tensor_parallel_size``; ``ConfigError`` if it has another value."""
    if config.tensor_parallel_size not in (1, launched.world_size):
        raise ConfigError(
            f"tensor_parallel_size is {config.tensor_parallel_size} but torchrun started {launched.world_size} ranks; "
            f"leave it out, or use --nproc-per-node {config.tensor_parallel_size}"
        )
    return dataclasses.replace(config, tensor_parallel_size=launched.world_size)


def _spawn(effective: EffectiveConfig, job: Job, undo: contextlib.ExitStack) -> Engine:
    """Start ranks 1 to N-1 as children of this process and build the engine; on an error ``undo`` kills them."""
    config, world_size = effective.config, effective.config.tensor_parallel_size
    store = host_store(timeout_s=config.startup_timeout_s)
    specs = [
        RankSpec(
            config=config,
            rank=rank,
            store_host="127.0.0.1",
            store_port=store.port,
            parent_pid=os.getpid(),
            board=job.board.address,
        )
        for rank in range(1, world_size)
    ]
    children = ChildRanks("tp_engine.engine.rank_process", [msgspec.json.encode(spec) for spec in specs])
    undo.callback(children.kill)
    job.adopt(children)
    groups = join_ranks(effective, RankInfo(world_size=world_size, local_world_size=world_size), store, job, job.check)
    engine = build_engine(
        effective, groups, job,
        leave=lambda failed: children.wait(timeout_s=_FAILED_STOP_S if failed else _STOP_TIMEOUT_S),
    )  # fmt: skip
    undo.pop_all()
    return engine


@contextlib.contextmanager
def _closed_on_error(job: Job) -> Iterator[None]:
    """If starting fails, name the rank that caused it, and stop the watchdog."""
    with contextlib.ExitStack() as undo:
        undo.callback(job.close)
        with job.blaming():
            yield
        undo.pop_all()
