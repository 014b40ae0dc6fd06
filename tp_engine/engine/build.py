"""Builds rank 0's engine from its parts: worker, plan channel, scheduler."""

import contextlib
from collections.abc import Callable, Collection, Sequence
from typing import Any, get_type_hints

from tp_engine.config import EngineConfig
from tp_engine.distributed.groups import RankGroups
from tp_engine.engine.engine import Engine
from tp_engine.engine.feature import EngineFeature
from tp_engine.engine.job import Job
from tp_engine.engine.messages import ModelInfo
from tp_engine.engine.rank_worker import start_here
from tp_engine.errors import ConfigError
from tp_engine.features.registry import open_parts
from tp_engine.images.settings import image_settings
from tp_engine.ipc.job_board import EchoCheck
from tp_engine.ipc.plan_channel import PlanPublisher
from tp_engine.ipc.relay import PlanLink
from tp_engine.ipc.ring_buffer import RingWriter
from tp_engine.job.progress import RankPhase
from tp_engine.sched.scheduler import Scheduler, SchedulerLimits
from tp_engine.system.log import get_logger
from tp_engine.worker.effective_config import EffectiveConfig
from tp_engine.worker.worker import Worker

logger = get_logger(__name__)


def build_engine(
    effective: EffectiveConfig,
    groups: RankGroups,
    job: Job,
    *,
    links: Callable[[], Sequence[PlanLink]] = tuple,
    leave: Callable[[bool], None],
) -> Engine:
    """Start this rank's worker, open the plan channel to the other ranks, and add the scheduler.  ``links`` gives the
    connections to other hosts.  ``leave`` waits for the ranks that this process started to end; its argument says
    whether the job has failed."""
    with contextlib.ExitStack() as undo:
        undo.callback(groups.close)
        undo.push(job.on_exit)  # reports before the groups close: a closed group looks like a death
        features: dict[str, EngineFeature] = {}
        for name, feature in open_parts(effective.config):
            features[name] = feature
            undo.callback(feature.close)
            feature.prepare(effective)
        rank = start_here(effective, groups, job, undo)
        worker = Worker(rank)
        for feature in features.values():
            feature.start(rank, job.board)
        publisher = _open_channel(effective, groups, job, links)
        if publisher is not None:
            undo.callback(publisher.close)
        job.progress.reach(RankPhase.READY)
        job.ready()
        undo.pop_all()
    echoes = EchoCheck(job.board, checks_inputs=effective.config.debug_compare_rank_inputs)
    if job.links is not None:
        job.links.mirrored = echoes.compare_far
    sizes = {name: found for name, feature in features.items() if (found := feature.limits()) is not None}
    limits = _limits(effective, rank.num_blocks, sizes)
    if limits.max_sequence_tokens < effective.max_model_len:
        logger.warning(
            "num_gpu_blocks_override %d: the KV cache holds %d tokens, so max_model_len is %d instead of %d",
            rank.num_blocks,
            limits.capacity_tokens,
            limits.max_sequence_tokens,  # the last token of an answer is never computed
            effective.max_model_len,
        )
    given = {name: feature.given for name, feature in features.items()}
    scheduler = Scheduler(limits, given)
    engine = Engine(
        worker=worker,
        scheduler=scheduler,
        publisher=publisher,
        model_info=model_info(rank.effective, rank.num_blocks, longest=limits.max_sequence_tokens),
        plan_timeout_s=effective.config.collective_timeout_s,
        num_ahead=int(effective.config.async_scheduling and (groups.info.world_size > 1 or worker.runs_by_itself)),
        job=job,
        echoes=echoes,
        leave=lambda: _leave(groups, job, leave),
        features=tuple(features.values()),
    )
    try:
        for feature in features.values():
            feature.started(engine.operator)
    except ConfigError:
        engine.close()
        raise
    return engine


def _leave(groups: RankGroups, job: Job, leave: Callable[[bool], None]) -> None:
    with contextlib.ExitStack() as stack:
        stack.callback(job.close)
        stack.callback(groups.close)
        stack.callback(leave, job.has_failed)
        job.leave()


def _limits(effective: EffectiveConfig, num_blocks: int, of_features: dict[str, Any]) -> SchedulerLimits:
    config = effective.config
    layout, vision = effective.kv_layout, effective.model.vision
    return SchedulerLimits(
        **_as_configured(SchedulerLimits, config),
        num_blocks=num_blocks,
        max_model_len=effective.max_model_len,
        windows=layout.windows,
        num_spare_rows=effective.num_spare_rows,
        has_states=layout.states is not None,
        num_snapshots=effective.num_snapshots,
        least_chunk_tokens=1 if vision is None or not vision.is_bidirectional else vision.most_rows,
        extensions=of_features,
    )


def model_info(effective: EffectiveConfig, num_blocks: int, *, longest: int | None = None) -> ModelInfo:
    """Return what a frontend must know about this engine; ``longest`` sequence, if the blocks are too few for
    others."""
    config, model = effective.config, effective.model
    return ModelInfo(
        **_as_configured(ModelInfo, config, but={"convert"}),
        tokenizer=config.tokenizer_source,
        max_model_len=effective.max_model_len if longest is None else longest,
        vocab_size=model.vocab_size,
        eos_token_ids=model.eos_token_ids,
        num_blocks=num_blocks,
        structured_outputs=config.structured_outputs_config,
        hidden_size=model.hidden_size,
        convert=effective.pooling.convert,
        dimensions=effective.pooling.dimensions,
        classifier=effective.pooling.classifier,
        images=image_settings(config, model.vision, effective.model_path),
        adapters={source.name: source.path for source in config.lora_modules},
        kernel_choices=effective.choices.digest,
    )


def _as_configured(kind: type, config: EngineConfig, but: Collection[str] = ()) -> dict[str, Any]:
    """The options that are fields of ``kind`` too, of the same name and type, but for those that mean more there."""
    options = get_type_hints(EngineConfig)
    fields = get_type_hints(kind)
    return {name: getattr(config, name) for name in fields.keys() - but if fields[name] == options.get(name)}


def _open_channel(
    effective: EffectiveConfig, groups: RankGroups, job: Job, links: Callable[[], Sequence[PlanLink]]
) -> PlanPublisher | None:
    """Rank 0's side of the plan channel; None for a world of one."""
    if groups.info.world_size == 1:
        return None
    num_readers = groups.info.local_world_size - 1
    publisher = PlanPublisher(RingWriter(num_readers, alive=job.alive) if num_readers else None, links())
    try:
        groups.host.all_gather_bytes(publisher.name.encode())
        publisher.wait_attached(timeout_s=effective.config.startup_timeout_s)
    except BaseException:
        publisher.close()
        raise
    return publisher
