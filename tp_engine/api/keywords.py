"""The keywords of ``LLM`` and ``AsyncLLM``, for editors and type checkers: the fields of
``EngineConfig``, ``SamplingDefaultOptions`` and ``TemplateOptions``.

``scripts/generate`` writes this file.  What each keyword means is in its field's ``option(...)`` and in
docs/flags_engine.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict


class EngineOptions(TypedDict, total=False):
    """The types that a caller may give; other spellings of vLLM and SGLang are taken too."""

    tokenizer: str | None
    revision: str | None
    hf_overrides: Mapping[str, Any] | str | None
    model_impl: str
    convert: str
    dtype: str
    quantization: str | None
    round_activations: bool
    load_format: str
    tensor_parallel_size: int
    device: str
    device_ids: Sequence[int] | str | None
    all_reduce_backend: str
    enable_expert_parallel: bool
    tp_invariant: bool
    attention_backend: str
    tune: str
    tuned: str | None
    enforce_eager: bool
    cudagraph_capture_sizes: Sequence[int] | str | None
    cudagraph_prefill_capture_sizes: Sequence[int] | str
    kv_cache_dtype: str
    block_size: int
    gpu_memory_utilization: float | None
    num_gpu_blocks_override: int | None
    kv_cache_memory_bytes: int | str | None
    enable_prefix_caching: bool
    num_state_snapshots: int | None
    kv_offloading_size: float
    kv_offloading_codec: str
    kv_disk_path: str | None
    kv_disk_size: float
    kv_events_config: Mapping[str, Any] | str | None
    feature_options: Mapping[str, Any] | str | None
    max_model_len: int | str | None
    max_num_seqs: int
    max_num_batched_tokens: int | str
    async_scheduling: bool
    speculative_config: Mapping[str, Any] | str | None
    enable_lora: bool
    max_loras: int
    max_lora_rank: int
    lora_experts: bool
    lora_modules: Sequence[Mapping[str, Any] | str] | str
    limit_mm_per_prompt: Mapping[str, Any] | str
    mm_processor_kwargs: Mapping[str, Any] | str | None
    max_image_pixels: int
    mm_transport_bytes: int | str
    allowed_media_domains: Sequence[str] | str
    allowed_local_media_path: str | None
    structured_outputs_config: Mapping[str, Any] | str
    max_logprobs: int
    logprobs_mode: str
    seed: int
    startup_timeout_s: float
    collective_timeout_s: float
    watchdog_warn_s: float
    watchdog_timeout_s: float
    host_timeout_s: float
    profile: str | None
    profile_steps: str
    debug_compare_rank_inputs: bool
    log_format: str
    flight_recorder_dir: str | None
    generation_config: str
    override_generation_config: Mapping[str, Any] | str | None
    chat_template: str | None
    chat_template_content_format: str
