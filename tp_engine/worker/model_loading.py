"""This rank's part of the model with its weights: made at the start, and anew for each update of the weights."""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tp_engine.attention.base import Backends
from tp_engine.distributed.groups import RankGroups
from tp_engine.job.topology import RankInfo
from tp_engine.layers.context import LayerContext
from tp_engine.layers.quantization import choose_formats
from tp_engine.model_config.assistant import AssistantSpec
from tp_engine.model_config.checkpoint_files import weight_files
from tp_engine.models.assistant_head import AssistantHead
from tp_engine.models.causal_lm import CausalLM, build_model
from tp_engine.models.draft_head import DraftHead
from tp_engine.models.eagle3_head import Eagle3Head
from tp_engine.models.language_model import LanguageModel
from tp_engine.models.weight_sizes import weight_sizes
from tp_engine.system.log import get_logger
from tp_engine.system.units import format_gib
from tp_engine.weights.loader import LoadReport, load_weights
from tp_engine.weights.read_ahead import reading_ahead
from tp_engine.worker.device import Device
from tp_engine.worker.effective_config import EffectiveConfig
from tp_engine.worker.memory.host_memory import host_memory

logger = get_logger(__name__)


def load_model(
    effective: EffectiveConfig,
    groups: RankGroups,
    backends: Backends,
    device: Device,
    *,
    source: Path | Sequence[Path] | None = None,
    note_read: Callable[[], None] = lambda: None,
) -> LanguageModel:
    """Return the model with the weights of the checkpoint ``source``, by default the configured one; no collective.

    ``finish_loading`` comes next.  ``source`` and ``note_read`` are those of ``load_weights``, which says what it
    raises.
    """
    config = effective.config
    model = build_model(
        effective.model,
        communicator=groups.communicator,
        dtype=effective.dtype,
        device=device.torch_device,
        backends=backends,
        max_model_len=effective.max_model_len,
        quantization=config.quantization,
        enable_expert_parallel=config.enable_expert_parallel,
        tp_invariant=config.tp_invariant,
        adapters=effective.adapters,
        state_layers=() if effective.draft_head is None else effective.draft_head.spec.state_layers,
        choices=effective.choices,
    )
    load_format = config.load_format if source is None else "auto"
    files = effective.model_path if source is None else source
    read = () if load_format == "dummy" else weight_files(files) if isinstance(files, Path) else files
    with reading_ahead(read, groups.info, host_memory().free):
        report = load_weights(
            dict(model.named_parameters()),
            effective.model,
            files,
            info=groups.info,
            load_format=load_format,
            seed=config.seed,
            note_read=note_read,
        )
    _log_report(report, groups.info)
    return model


def load_head(
    effective: EffectiveConfig, groups: RankGroups, backends: Backends, device: Device, model: LanguageModel
) -> DraftHead | None:
    """Return the draft head of ``model``, its own or the configured one, if there is one; ``finish_loading`` comes
    next."""
    head, config = effective.draft_head, effective.config
    if head is None:
        return model.mtp
    assert isinstance(model, CausalLM), "a draft head beside another model has been refused"
    context = LayerContext(
        communicator=groups.communicator,
        dtype=effective.dtype,
        device=device.torch_device,
        format_of=choose_formats(None, head.spec.model),
    )
    options: dict[str, Any] = {"backends": backends, "max_model_len": effective.max_model_len, "context": context}
    draft_head: DraftHead
    if isinstance(head.spec, AssistantSpec):
        draft_head = AssistantHead(head.spec, model, **options).eval()
    else:
        draft_head = Eagle3Head(head.spec, model, group=effective.draft_group, **options).eval()
    parameters = dict(draft_head.named_parameters())
    how: dict[str, Any] = {"info": groups.info, "load_format": config.load_format, "seed": config.seed}
    _log_report(load_weights(parameters, head.spec.model, head.path, **how), groups.info)
    return draft_head


def _log_report(report: LoadReport, info: RankInfo) -> None:
    rate = report.bytes_read / max(report.seconds, 1e-9) / 1e9
    level = logging.INFO if info.local_rank == 0 else logging.DEBUG
    logger.log(level, "read %d tensors, %.3f GB at %.2f GB/s", report.num_tensors, report.bytes_read / 1e9, rate)
    if report.mtp_tensors:
        first, count = report.mtp_tensors[0], len(report.mtp_tensors)
        logger.log(level, "not read: %d tensors of multi-token prediction (%s, ...)", count, first)


def log_weights(effective: EffectiveConfig, model: LanguageModel, info: RankInfo) -> None:
    """Log what part of the weights of a ``model`` with experts a token needs, and which part of a checkpoint is
    unused."""
    if info.is_first and any(layer.experts is not None for layer in effective.model.layers):
        sizes = weight_sizes(model, effective.model, effective.config.quantization)
        total, active = format_gib(sizes.num_bytes), format_gib(sizes.active_bytes)
        logger.info("experts: of %s of weights a token needs %s", total, active)
    quantization = effective.model.quantization
    if quantization is not None and quantization.has_kv_scales and info.is_first:
        cache = effective.config.kv_cache_dtype
        logger.info("the checkpoint's scales of an fp8 KV cache do not apply to a cache of %s", cache)
