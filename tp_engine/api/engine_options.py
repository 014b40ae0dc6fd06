"""The keywords of ``LLM``, ``AsyncLLM`` and ``run_batch``, for editors and type checkers.

They are the fields of the configuration dataclasses, in the types that a caller may give them; a test holds that none
is missing and none is stale.  What each means is in its field's ``option(...)`` and in docs/flags_engine.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any, NamedTuple, TypedDict

from tp_engine.api.openai.chat.options import ChatOptions, TemplateOptions
from tp_engine.api.sampling_defaults import SamplingDefaultOptions
from tp_engine.config import EngineConfig
from tp_engine.errors import ConfigError
from tp_engine.options import fields_of
from tp_engine.options.intake import take_options


class EngineOptions(TypedDict, total=False):
    """The fields of ``EngineConfig`` but the model, of ``SamplingDefaultOptions`` and of ``TemplateOptions``."""

    tokenizer: str | None
    revision: str | None
    hf_overrides: Mapping[str, Any] | str | None
    convert: str
    dtype: str
    quantization: str | None
    load_format: str
    tensor_parallel_size: int
    device: str
    device_ids: Sequence[int] | str | None
    all_reduce_backend: str
    enable_expert_parallel: bool
    tp_invariant: bool
    attention_backend: str
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
    max_model_len: int | str | None
    max_num_seqs: int
    max_num_batched_tokens: int | str
    async_scheduling: bool
    speculative_config: Mapping[str, Any] | str | None
    enable_lora: bool
    max_loras: int
    max_lora_rank: int
    lora_experts: bool
    lora_modules: Sequence[str] | str
    limit_mm_per_prompt: Mapping[str, Any] | str | None
    mm_processor_kwargs: Mapping[str, Any] | str | None
    max_image_pixels: int
    mm_transport_bytes: int | str
    allowed_media_domains: Sequence[str] | str
    allowed_local_media_path: str | None
    structured_outputs_config: Mapping[str, Any] | str | None
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


class BatchOptions(EngineOptions, total=False):
    """The keywords of ``EngineOptions``, and the fields of ``BatchConfig`` except the two files."""

    enable_auto_tool_choice: bool
    tool_call_parser: str
    reasoning_key: str | None
    reasoning_parser: str
    error_file: str | None
    output_order: str
    shard: str
    resume: bool
    validate_only: bool
    strict: bool
    served_model_name: Sequence[str] | str
    max_in_flight: int | None
    max_body_bytes: int | str
    summary_file: str | None
    errors_exit_code: int | None
    progress_bar: bool


class ChatTemplateOptions(TypedDict, total=False):
    """How a conversation becomes a prompt, with the names of transformers' ``apply_chat_template``.

    Other keywords, and ``chat_template_kwargs``, are variables of the template.
    """

    chat_template: str | None
    add_generation_prompt: bool
    continue_final_message: bool
    tools: Sequence[Mapping[str, Any]] | None
    documents: Sequence[Mapping[str, Any]] | None
    chat_template_kwargs: Mapping[str, Any] | None
    enable_thinking: bool
    add_special_tokens: bool
    mm_processor_kwargs: Mapping[str, Any] | None


class Configs(NamedTuple):
    """What the keywords make."""

    engine: EngineConfig
    sampling: SamplingDefaultOptions
    chats: ChatOptions


def read_options(where: str, model: str | PathLike[str], options: Mapping[str, Any]) -> Configs:
    """Return the configurations that keywords of ``where`` make, also in the words of vLLM and SGLang.

    Raises ``ConfigError``.
    """
    if model is None:
        raise ConfigError(f"{where}: model is None; give a folder or a hub name, or nothing for the demo model")
    kinds = (EngineConfig, SamplingDefaultOptions, TemplateOptions)
    taken = take_options({"model": model, **options}, kinds, where=where)
    chats = ChatOptions(**fields_of(TemplateOptions, taken))
    chats.check_chat_options()
    sampling = SamplingDefaultOptions(**fields_of(SamplingDefaultOptions, taken))
    return Configs(EngineConfig(**fields_of(EngineConfig, taken)), sampling, chats)
