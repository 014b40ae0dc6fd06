"""The complete configuration: every ``auto`` resolved, everything checked that needs no device."""

import dataclasses
import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from tp_engine.attention.base import AttentionNeeds
from tp_engine.attention.registry import check_backend
from tp_engine.config import EngineConfig
from tp_engine.distributed import all_reduce
from tp_engine.errors import ConfigError
from tp_engine.features.registry import check_features
from tp_engine.images.rules import PROCESSOR_FILES, has_processor
from tp_engine.images.settings import image_settings
from tp_engine.job.device_map import DeviceMap, map_devices, parse_devices
from tp_engine.kernels.candidates import DEFAULTS, Choices
from tp_engine.layers.context import AdapterLimits
from tp_engine.layers.quantization import check_quantization
from tp_engine.model_config import (
    check_quantization_options,
    check_tensor_parallel,
    load_model_config,
    resolve_dtype,
    resolve_max_model_len,
    with_rounded_inputs,
)
from tp_engine.model_config.drafting import LocalHead, check_drafting, find_head, with_own_head
from tp_engine.model_config.kv_layout import KvCapacity, KvLayout, default_snapshots
from tp_engine.model_config.lora import check_expert_adapters, read_adapter_config
from tp_engine.model_config.pooling import TEXT, PoolingSpec, pooled, read_pooling
from tp_engine.model_config.spec import ModelSpec
from tp_engine.model_config.tp_invariant import check_tp_invariant
from tp_engine.worker.gpu_host import choose_device_type, devices_of_ranks
from tp_engine.worker.graphs.graph_plan import capture_sizes, prefill_sizes
from tp_engine.worker.memory.kv_cache import KvCacheShape
from tp_engine.worker.profiling import parse_steps
from tp_engine.worker.tuning.table import read_pinned

_DEFAULT_UTILIZATION = {"cuda": 0.9, "cpu": 0.3}
_TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_KV_CACHE_DTYPES = _TORCH_DTYPES | {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
_MIN_BFLOAT16_CAPABILITY = (8, 0)
_MIN_FP8_CAPABILITY = (8, 9)


@dataclass(frozen=True, kw_only=True)
class EffectiveConfig:
    """``config`` without any ``auto``, the parsed ``model`` and the local folder it came from, its ``draft_head``.

    ``choices`` of kernels are those of the ranks' devices, once these are open.
    """

    config: EngineConfig
    model: ModelSpec
    model_path: Path
    pooling: PoolingSpec = TEXT
    num_hosts: int = 1
    draft_head: LocalHead | None = None
    choices: Choices = DEFAULTS

    @property
    def max_model_len(self) -> int:
        """Longest prompt plus output in tokens."""
        assert self.config.max_model_len is not None
        return self.config.max_model_len

    @property
    def device_map(self) -> DeviceMap:
        """Which GPU each rank of this host uses, if ``device`` is cuda."""
        return parse_devices(self.config.device_ids, self.config.tensor_parallel_size // self.num_hosts)

    @property
    def num_snapshots(self) -> int:
        """Recurrent states that are kept for the prefix cache."""
        assert self.config.num_state_snapshots is not None
        return self.config.num_state_snapshots

    @property
    def most_drafting_rows(self) -> int:
        """Most decodes of a step with draft tokens; 0 without speculation."""
        return 0 if self.config.speculative_config is None else 1 + self.num_spare_rows

    @property
    def adapters(self) -> AdapterLimits | None:
        """The slots for adapters, if there are any."""
        config = self.config
        if not config.enable_lora:
            return None
        return AdapterLimits(max_loras=config.max_loras, max_rank=config.max_lora_rank, of_experts=config.lora_experts)

    @property
    def image_rows(self) -> int:
        """Rows of the encoder cache: those of a full step, or of the largest image."""
        assert self.model.vision is not None
        return max(self.config.max_num_batched_tokens, self.model.vision.most_rows)

    @property
    def draft_group(self) -> int:
        """The group of layers that the draft head's layer is in, the one after the model's."""
        return self.kv_layout.place_of(self.model.num_layers)[0]

    @cached_property
    def kv_layout(self) -> KvLayout:
        """The groups of layers on one rank."""
        return self.model.kv_layout_on(self.config.tensor_parallel_size)

    @cached_property
    def kv_shape(self) -> KvCacheShape:
        """A rank's KV cache, but for the number of its blocks."""
        return KvCacheShape(layout=self.kv_layout, block_size=self.config.block_size, dtype=self.kv_cache_dtype)

    @cached_property
    def kv_capacity(self) -> KvCapacity:
        """What a number of blocks holds of requests."""
        return KvCapacity(
            layout=self.kv_layout,
            block_size=self.config.block_size,
            max_model_len=self.max_model_len,
            chunk_tokens=self.config.max_num_batched_tokens,
        )

    @property
    def num_spare_rows(self) -> int:
        """Rows after those of the batch, which stand for these at later positions."""
        return self.config.num_spare_rows

    @property
    def gpu_memory_utilization(self) -> float:
        """Share of the device memory that this engine may use."""
        assert self.config.gpu_memory_utilization is not None
        return self.config.gpu_memory_utilization

    @property
    def dtype(self) -> torch.dtype:
        """Type of weights and activations."""
        return _TORCH_DTYPES[self.config.dtype]

    @property
    def largest_sum_bytes(self) -> int:
        """Bytes of the largest all-reduce: the hidden states of a full step, or all layers' embeddings of it."""
        own = self.model.layer_embedding
        width = max(self.model.hidden_size, 0 if own is None else self.model.num_layers * own.size)
        return self.config.max_num_batched_tokens * width * self.dtype.itemsize

    @property
    def kv_cache_dtype(self) -> torch.dtype:
        """Type of the KV cache; a quantised one has scales beside it."""
        return _KV_CACHE_DTYPES[self.config.kv_cache_dtype]

    @property
    def attention_needs(self) -> AttentionNeeds:
        """What the attention backend must be able to do."""
        return _attention_needs(self.config, self.model, self.device_map)


def resolve(config: EngineConfig, *, num_hosts: int = 1) -> EffectiveConfig:
    """Resolve and check; raises ``ConfigError`` and touches no device.  The ranks are spread over ``num_hosts``."""
    model, path = load_model_config(
        config.model, config.revision, hf_overrides=config.hf_overrides, model_impl=config.model_impl
    )
    pooling = read_pooling(config.model, path, config.convert, model.classifier)
    model = pooled(model, pooling)
    check_tensor_parallel(model, config.tensor_parallel_size)
    local_world_size = config.tensor_parallel_size // num_hosts
    device, config = _resolve_device(config, local_world_size)
    check_quantization(config.quantization, device)
    check_quantization_options(model, config.quantization, config.kv_cache_dtype)
    if config.round_activations:
        model = with_rounded_inputs(model)
    capability = _capability(device, parse_devices(config.device_ids, local_world_size))
    has_bfloat16 = capability is None or capability >= _MIN_BFLOAT16_CAPABILITY
    dtype = resolve_dtype(model, config.dtype, is_gpu=device == "cuda", has_bfloat16=has_bfloat16)
    effective = dataclasses.replace(
        config,
        model=str(path),
        tokenizer=config.tokenizer,
        convert=pooling.convert,
        model_impl=model.described_by,
        device=device,
        dtype=dtype,
        quantization=None if model.quantization is not None else config.quantization,
        tune=_resolve_tune(config, device, num_hosts),
        block_size=max(config.block_size, model.kv_layout.largest_rate),
        kv_cache_dtype=dtype if config.kv_cache_dtype == "auto" else config.kv_cache_dtype,
        gpu_memory_utilization=config.gpu_memory_utilization or _DEFAULT_UTILIZATION[device],
        max_model_len=resolve_max_model_len(model, config.max_model_len),
        num_state_snapshots=_resolve_snapshots(config, model),
    )
    model = _with_note_of_blocks(config, model).within(effective.max_model_len or 0)
    _check_adapters(effective, pooling)
    check_expert_adapters(model, effective)
    model = _with_images(effective, model, path, num_hosts)
    model = with_own_head(model, config.speculative_config, name=config.model, folder=path)
    head = find_head(model, config.speculative_config, name=config.model, folder=path)
    if head is not None:
        check_tensor_parallel(head.spec.model, config.tensor_parallel_size)
        model = dataclasses.replace(model, beside=head.spec.kv_kind)
    capture_sizes(config.cudagraph_capture_sizes, config.max_step_decodes)  # raises for wrong sizes
    prefill_sizes(config.cudagraph_prefill_capture_sizes, config.max_num_batched_tokens)
    parse_steps(config.profile_steps)  # raises for wrong steps
    needs = _attention_needs(effective, model, parse_devices(config.device_ids, local_world_size))
    _check_dtypes(dtype, config.kv_cache_dtype, needs.capability)
    check_features(effective, model, needs.capability, num_hosts)
    all_reduce.check(effective, num_hosts)
    effective = dataclasses.replace(effective, attention_backend=check_backend(config.attention_backend, needs))
    if effective.tp_invariant:
        check_tp_invariant(effective, model)
    return EffectiveConfig(
        config=effective, model=model, model_path=path, pooling=pooling, num_hosts=num_hosts, draft_head=head
    )


def _with_note_of_blocks(config: EngineConfig, model: ModelSpec) -> ModelSpec:
    """The model with a note for the operator if its blocks are larger than asked for."""
    rate = model.kv_layout.largest_rate
    if config.block_size >= rate:
        return model
    note = f"block_size is {rate} instead of {config.block_size}: a cached entry of this model stands for {rate} tokens"
    return dataclasses.replace(model, notes=(*model.notes, note))


def _with_images(config: EngineConfig, model: ModelSpec, path: Path, num_hosts: int) -> ModelSpec:
    """The model with its rules for images; without its vision part, if it is to read text alone."""
    vision = model.vision
    if vision is None:
        return model
    if config.convert != "none":
        return dataclasses.replace(model, vision=None)
    without = dataclasses.replace(model, vision=None)
    if not has_processor(path):
        note = f"images are refused: the checkpoint has no {PROCESSOR_FILES[1]}, which says how they are resized"
        return dataclasses.replace(without, notes=(*model.notes, note))
    settings = image_settings(config, vision, path)
    if settings is None:
        return without
    rules = settings.rules()
    if num_hosts > 1:
        note = f"images are refused: the ranks are on {num_hosts} hosts, and pixels reach those of one"
        return dataclasses.replace(without, notes=(*model.notes, note))
    room, most = config.max_num_batched_tokens - config.max_num_seqs, rules.num_tokens(*rules.largest)
    if vision.is_bidirectional and room < most:
        raise ConfigError(
            f"max_num_batched_tokens is {config.max_num_batched_tokens} and max_num_seqs {config.max_num_seqs}; an "
            f"image of this {model.architecture} takes up to {most} tokens, which must be computed in one step, beside "
            "a token of each sequence: set --max-num-batched-tokens to at least "
            f"{config.max_num_seqs + most}, or serve text alone with --limit-mm-per-prompt '{{\"image\": 0}}'"
        )
    assert config.max_model_len is not None, "it has been resolved"
    largest, longest = rules.largest, config.max_model_len
    if rules.num_tokens(*largest) > longest and not vision.is_bidirectional:  # none so large fits into a prompt
        rows = math.isqrt(longest)
        largest = rows * vision.cell, longest // rows * vision.cell
    vision = dataclasses.replace(vision, mean=rules.mean, std=rules.std, largest=largest)
    return dataclasses.replace(model, vision=vision)


def _check_adapters(config: EngineConfig, pooling: PoolingSpec) -> None:
    for source in config.lora_modules:
        read_adapter_config(Path(source.path).expanduser())
    if config.enable_lora and pooling.convert != "none":
        raise ConfigError(
            f"enable_lora is set, and the model is for {pooling.convert}; adapters are served for text only: leave "
            "enable_lora out"
        )
    check_drafting(config.speculative_config, has_adapters=config.enable_lora)


def _resolve_snapshots(config: EngineConfig, model: ModelSpec) -> int:
    """How many recurrent states are kept for the prefix cache, 0 for a model without.

    Raises ``ConfigError`` for a host tier of a model that has some, and for snapshots of one that has none.
    """
    wanted = config.num_state_snapshots
    if model.kv_layout.states is None:
        if wanted:
            raise ConfigError(
                f"num_state_snapshots is {wanted}, but no layer of this {model.architecture} has a recurrent state: "
                "leave it out"
            )
        return 0
    if config.kv_offloading_size:
        raise ConfigError(
            f"kv_offloading_size is {config.kv_offloading_size:g} GiB, but layers of this {model.architecture} have "
            "recurrent states, which the host tier does not keep: set kv_offloading_size to 0"
        )
    if not config.enable_prefix_caching:
        return 0
    return default_snapshots(config.max_num_seqs) if wanted is None else wanted


def _attention_needs(config: EngineConfig, model: ModelSpec, devices: DeviceMap) -> AttentionNeeds:
    attentions = model.attentions
    kinds = [attention.kv_kind for attention in attentions] + ([] if model.beside is None else [model.beside])
    return AttentionNeeds(
        device_type=config.device,
        dtype=_TORCH_DTYPES[config.dtype],
        kv_cache_dtype=_KV_CACHE_DTYPES[config.kv_cache_dtype],
        block_size=config.block_size,
        head_dims=tuple(sorted({kind.head_dim for kind in kinds})),
        has_sinks=any(attention.has_sinks for attention in attentions),
        has_latents=any(attention.latent is not None for attention in attentions),
        index_topk=model.index_topk,
        is_invariant=config.tp_invariant,
        capability=_capability(config.device, devices),
    )


def _capability(device: str, devices: DeviceMap) -> tuple[int, int] | None:
    """The lowest compute capability of the ranks' GPUs; None without one."""
    has_gpu = device == "cuda" and torch.cuda.is_available()
    return min(map(torch.cuda.get_device_capability, set(devices.indices))) if has_gpu else None


def _check_dtypes(dtype: str, kv_cache_dtype: str, capability: tuple[int, int] | None) -> None:
    """Raise ``ConfigError`` for types that a GPU of this compute capability lacks."""
    if capability is None:
        return
    own = f"{capability[0]}.{capability[1]}"
    if dtype == "bfloat16" and capability < _MIN_BFLOAT16_CAPABILITY:
        raise ConfigError(
            f"dtype is bfloat16, which GPUs before compute capability 8.0 do not have, and this one is of {own}; set "
            "dtype=float16"
        )
    if kv_cache_dtype == "fp8" and capability < _MIN_FP8_CAPABILITY:
        raise ConfigError(
            f"kv_cache_dtype is fp8, which GPUs before compute capability 8.9 do not have, and this one is of {own}; "
            "set kv_cache_dtype=int8"
        )


def _resolve_tune(config: EngineConfig, device: str, num_hosts: int) -> str:
    """Whether kernels are tried at the start.  On CPUs only where somebody asks: their fixed choices were the fastest
    in nearly all measured cases.  Reads the pinned file where this host must have it."""
    if config.tuned is not None and num_hosts == 1:
        read_pinned(config.tuned)
    if config.tune != "auto":
        return config.tune
    return "off" if device == "cpu" or config.tp_invariant or config.tuned is not None else "quick"


def _resolve_device(config: EngineConfig, local_world_size: int) -> tuple[str, EngineConfig]:
    """The kind of device, and ``config`` with the GPUs of ranks whose launcher shows each of them one."""
    device = choose_device_type(config.device)
    if device == "cuda":
        config = dataclasses.replace(config, device_ids=devices_of_ranks(config.device_ids, local_world_size))
        map_devices(config.device_ids, local_world_size, torch.cuda.device_count())
    elif config.device_ids is not None:
        raise ConfigError(
            f"device_ids is {config.device_ids!r}, which names GPUs, but the ranks run on the CPU; leave it out, or "
            "use --device cuda where there are GPUs"
        )
    return device, config
