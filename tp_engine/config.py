"""The engine's configuration: a frozen record with all defaults, checked before any device is touched.

Its fields are the options of the Python API (``LLM(block_size=32)``), the command line (``--block-size 32``) and TOML
files (``block_size = 32``).  ``tp_engine.options`` makes the latter two from the fields and their help texts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tp_engine.errors import ConfigError
from tp_engine.features.kv_events.options import KVEventsConfig
from tp_engine.features.lora.options import AdapterSource, parse_modules
from tp_engine.features.registry import take_feature_options
from tp_engine.features.speculation.options import SpeculativeConfig
from tp_engine.features.tiers.options import check_codec
from tp_engine.job.device_map import check_devices
from tp_engine.options.fields import checked, json_object, option
from tp_engine.options.hf_overrides import parse_overrides
from tp_engine.options.prompt_images import PromptImages
from tp_engine.requests.structured_outputs import StructuredOutputsDefaults
from tp_engine.system.log import LOG_FORMATS
from tp_engine.system.units import GIB

DEVICES = ("auto", "cpu", "cuda")
DTYPES = ("auto", "float32", "bfloat16", "float16")
MODEL_IMPLS = ("auto", "native", "transformers")
CONVERSIONS = ("auto", "none", "embed", "classify", "pooling")
LOAD_FORMATS = ("auto", "safetensors", "dummy")
KV_CACHE_DTYPES = (*DTYPES, "fp8", "int8")
QUANTIZATIONS = ("int8", "fp8", "int4")
CHECKPOINT_QUANTIZATIONS = ("awq", "gptq", "compressed-tensors", "modelopt", "mxfp4")
"""Methods of quantised checkpoints, which are served without the option; a name is checked against config.json."""
LOGPROBS_MODES = ("raw_logprobs", "processed_logprobs")
MEASURED_LOGPROBS = 20
"""What the memory profile has room for where there is no limit; the default limit."""
ATTENTION_BACKENDS = ("auto", "torch", "native", "triton", "flash_attn")
TUNES = ("auto", "off", "quick", "full")
ALL_REDUCES = ("auto", "nccl", "symm_mem", "gloo", "shm")
_DEFAULT_NUM_SEQS, _DEFAULT_BATCHED_TOKENS = 256, 2048
DEMO_MODEL = Path(__file__).resolve().parent / "models" / "demo_model"


def _processor_sizes(given: Mapping[str, Any] | str) -> dict[str, Any]:
    return json_object("mm_processor_kwargs", given)


def _num_seqs(values: Mapping[str, Any]) -> int:
    most = values["max_num_batched_tokens"]
    return _DEFAULT_NUM_SEQS if most is None else min(_DEFAULT_NUM_SEQS, int(most))


def _batched_tokens(values: Mapping[str, Any]) -> int:
    return max(_DEFAULT_BATCHED_TOKENS, int(values["max_num_seqs"]))


@checked()
@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """All settings of the engine.  ``resolve`` replaces ``auto`` once, on rank 0."""

    model: str = option(
        str(DEMO_MODEL),
        "model folder or hub name (default: the demo model of this project)",
        flags=("--model-path",),
        positional=True,
        is_of_host=True,
        section="Model",
    )
    tokenizer: str | None = option(
        None, "tokenizer folder or hub name (default: the model's)", flags=("--tokenizer-path",), is_of_host=True
    )
    revision: str | None = option(None, "hub revision of the model")
    hf_overrides: Mapping[str, Any] | None = option(
        None,
        "JSON object that changes keys of the model's config.json before it is read, such as "
        """'{"rope_parameters": {"rope_type": "yarn", "factor": 4.0, ...}}'; null removes a key (default: none)""",
        json=parse_overrides,
        flags=("--json-model-override-args",),
    )
    model_impl: str = option(
        "auto",
        "what describes the model: native, a family of this engine, or transformers, whose class is asked what it "
        "computes; auto takes a family if there is one; native layers run both",
        choices=MODEL_IMPLS,
    )
    convert: str = option(
        "auto",
        "what the model is for: none (text), embed, classify (scores), pooling (one of these two); auto looks "
        "at its files and its name",
        choices=CONVERSIONS,
    )
    dtype: str = option(
        "auto",
        "type of weights and activations; auto takes the checkpoint's, and on GPUs 16 bits for float32",
        choices=DTYPES,
    )
    quantization: str | None = option(
        None,
        "quantise the decoder's linear weights while loading: int8 (on CPUs, with activations), fp8, or int4 (the "
        "output head int8); or how the checkpoint is quantised, which it says itself (default: none)",
        choices=(*QUANTIZATIONS, *CHECKPOINT_QUANTIZATIONS),
        flags=("-q",),
    )
    round_activations: bool = option(
        False,
        "round the inputs of layers and experts to NVFP4, MXFP4 or MXFP8 where the checkpoint says that its makers "
        "did: faster on GPUs with units for such blocks, the same everywhere, and less exact",
    )
    load_format: str = option("auto", "safetensors, or dummy for random weights", choices=LOAD_FORMATS)
    tensor_parallel_size: int = option(
        1,
        "number of ranks that share the model",
        positive=True,
        flags=("-tp", "--tp", "--tp-size"),
        section="Ranks and devices",
    )
    device: str = option("auto", "where to run; auto takes CUDA if there is a GPU", choices=DEVICES)
    device_ids: str | None = option(
        None,
        "GPU of each rank, such as 0,1; 0,0 lets two ranks share one, for tests; own if each rank sees one GPU of its "
        "own (default: one GPU per rank)",
        is_of_host=True,
        numbers=True,
    )
    all_reduce_backend: str = option(
        "auto",
        "how ranks add up their parts; GPUs: nccl, or symm_mem (memory that they share) for all but large tensors; "
        "CPUs: gloo, or shm (shared memory); auto takes symm_mem if GPUs of one host can, shm on CPUs",
        choices=ALL_REDUCES,
    )
    enable_expert_parallel: bool = option(
        False, "give each rank some experts, whole, instead of a part of each", flags=("-ep",)
    )
    tp_invariant: bool = option(
        False,
        "the same tokens and log-probabilities, bit for bit, on 1, 2, 4 and 8 ranks: sums over a layer's columns are a "
        "fixed tree",
    )
    attention_backend: str = option(
        "auto",
        "attention implementation; auto takes triton on GPUs, native on CPUs, and another one if these cannot be used",
        choices=ATTENTION_BACKENDS,
        section="Kernels",
    )
    tune: str = option(
        "auto",
        "whether kernels are proven and timed on this device at a first start: quick (20 s at most), full, or off (the "
        "code's own choice); auto: quick on GPUs, off on CPUs",
        choices=TUNES,
    )
    tuned: str | None = option(
        None,
        "file of choices that tp-engine tune --to wrote on such a device; they are taken as they are",
        is_of_host=True,
    )
    enforce_eager: bool = option(
        False, "launch every kernel of every step: no CUDA graphs, no tapes on CPUs", flags=("--disable-cuda-graph",)
    )
    cudagraph_capture_sizes: str | None = option(
        None,
        "batch sizes whose decode steps are CUDA graphs, such as 1,2,4,8 (default: up to max_num_seqs or 512)",
        numbers=True,
    )
    cudagraph_prefill_capture_sizes: str = option(
        "none",
        "numbers of prompt tokens whose steps are CUDA graphs too, such as 32,64,128; auto: 32 to 1024; none: prompts "
        "are launched kernel by kernel",
        numbers=True,
    )
    kv_cache_dtype: str = option(
        "auto",
        "type of the KV cache; auto takes dtype; fp8 and int8 are quantised",
        choices=KV_CACHE_DTYPES,
        section="KV cache",
    )
    block_size: int = option(16, "tokens per KV block", flags=("--page-size",))
    gpu_memory_utilization: float | None = option(
        None,
        "share of the device memory that this engine may use (default: 0.9 on CUDA, 0.3 on CPU)",
        positive=True,
        most=1,
        flags=("--mem-fraction-static",),
    )
    num_gpu_blocks_override: int | None = option(
        None, "number of KV blocks, instead of what profiling finds", positive=True
    )
    kv_cache_memory_bytes: int | None = option(
        None, "bytes of KV cache per rank, instead of what profiling finds", size=True, positive=True
    )
    enable_prefix_caching: bool = option(
        True, "share the KV blocks of equal prefixes", negative_flags=("--disable-radix-cache",)
    )
    num_state_snapshots: int | None = option(
        None,
        "recurrent states kept for the prefix cache, of models that have some (default: half of max_num_seqs, at least "
        "8)",
        least=0,
    )
    kv_offloading_size: float = option(
        0.0,
        "GiB of host memory, over all ranks, for prefixes that the cache has no room for (default: 0, none)",
        least=0,
    )
    kv_offloading_codec: str = option(
        "none",
        "form of KV blocks on the host: none (exact); lossy: int8, fp8 (half of bfloat16), pca:RANK (still less)",
    )
    kv_disk_path: str | None = option(
        None,
        "directory, of this engine alone, for KV blocks that outlive host memory and restarts (default: none)",
        is_of_host=True,
    )
    kv_disk_size: float = option(0.0, "GiB of kv_disk_path, over all ranks, reserved at the start", least=0)
    kv_events_config: KVEventsConfig | None = option(
        None,
        "JSON object: tell routers what the prefix cache holds, over ZMQ, with vLLM's keys (enable_kv_cache_events, "
        "endpoint, replay_endpoint, topic) and those of docs/kv_events.md (default: none)",
        json=KVEventsConfig.of,
        is_of_host=True,
    )
    feature_options: dict[str, Any] | None = option(
        None,
        "JSON object: options of features of other distributions, by feature, such as "
        """'{"drum": {"volume": 7}}' (default: none)""",
        json=take_feature_options,
    )
    max_model_len: int | None = option(
        None,
        "longest prompt plus output in tokens, such as 32k (default: the model's)",
        count=True,
        positive=True,
        flags=("--context-length",),
        section="Scheduling",
    )
    max_num_seqs: int = option(
        None,
        f"most sequences in one step (default: {_DEFAULT_NUM_SEQS}, or max_num_batched_tokens if that is less)",
        positive=True,
        flags=("--max-running-requests",),
        derived=_num_seqs,
    )
    max_num_batched_tokens: int = option(
        None,
        f"most tokens in one step, at least max_num_seqs (default: {_DEFAULT_BATCHED_TOKENS})",
        count=True,
        positive=True,
        derived=_batched_tokens,
        flags=("--chunked-prefill-size",),
    )
    async_scheduling: bool = option(
        True,
        "send the plan of the next step to the other ranks while a step runs",
        negative_flags=("--disable-overlap-schedule",),
    )
    speculative_config: SpeculativeConfig | None = option(
        None,
        "JSON object: draft tokens and verify several in one step, which changes none of them: method (ngram, "
        "suffix, eagle3, mtp), num_speculative_tokens, and the keys of docs/speculation.md (default: none)",
        json=SpeculativeConfig.of,
        flags=("-sc",),
    )
    enable_lora: bool = option(
        False, "serve LoRA adapters beside the model; the model of a request names its adapter", section="Adapters"
    )
    max_loras: int = option(4, "adapters with a slot on the devices; requests of others wait for one", positive=True)
    max_lora_rank: int = option(16, "largest rank of an adapter, for which the slots have room", positive=True)
    lora_experts: bool = option(False, "slots have room for matrices of routed experts too; on CPUs")
    lora_modules: tuple[AdapterSource, ...] = option(
        (),
        "adapters to load at the start: NAME=FOLDER, or a JSON object with name and path",
        several=parse_modules,
        is_of_host=True,
    )
    limit_mm_per_prompt: PromptImages = option(
        PromptImages(),
        """JSON object with the most images of a prompt, such as '{"image": 4}'; 0 serves the text part alone """
        "(default: 32)",
        json=PromptImages.of,
        flags=("--limit-mm-data-per-request",),
        section="Images",
    )
    mm_processor_kwargs: Mapping[str, Any] | None = option(
        None,
        "JSON object with settings of the model's image processor: size; min_pixels, max_pixels (Qwen), "
        "max_soft_tokens (Gemma 4), max_patches (Kimi)",
        json=_processor_sizes,
    )
    max_image_pixels: int = option(178_956_970, "most pixels of an image's file", positive=True)
    mm_transport_bytes: int = option(
        GIB, "most memory for the pixels of all requests; one more waits, then gets 503", size=True, positive=True
    )
    allowed_media_domains: tuple[str, ...] = option(
        (), "hosts from which requests may have images fetched, such as images.example.com (default: none)"
    )
    allowed_local_media_path: str | None = option(
        None, "folder below which requests may name images as file:///PATH (default: none)", is_of_host=True
    )
    structured_outputs_config: StructuredOutputsDefaults = option(
        StructuredOutputsDefaults(),
        "JSON object: defaults of structured output for requests without such fields: disable_any_whitespace, "
        "whitespace_pattern, disable_additional_properties (true unless it is set to false)",
        json=StructuredOutputsDefaults.of,
        section="Answers",
    )
    max_logprobs: int = option(
        MEASURED_LOGPROBS, "most alternatives per token that a request may ask for; -1: no limit", least=-1
    )
    logprobs_mode: str = option(
        "raw_logprobs", "log-probabilities of generated tokens, before or after penalties, temperature and filters",
        choices=LOGPROBS_MODES,
    )  # fmt: skip
    seed: int = option(0, "seed of requests without one, and of dummy weights", flags=("--random-seed",))
    startup_timeout_s: float = option(
        600.0, "longest time that ranks wait for each other while starting", positive=True, section="Time limits"
    )
    collective_timeout_s: float = option(120.0, "longest time that one collective may take", positive=True)
    watchdog_warn_s: float = option(
        30.0, "after so long without progress the stacks of all ranks are logged", positive=True
    )
    watchdog_timeout_s: float = option(
        120.0, "after so long without progress the job ends and names the cause", positive=True
    )
    host_timeout_s: float = option(
        4.0, "with several hosts: a host that acknowledges nothing for so long is lost, and the job ends", positive=True
    )
    profile: str | None = option(
        None,
        "folder for a torch.profiler trace of some steps of every rank (default: none)",
        is_of_host=True,
        section="Diagnosis",
    )
    profile_steps: str = option("10:20", "steps that profile records, FIRST:END, END not included; or none")
    debug_compare_rank_inputs: bool = option(
        False, "compare a digest of every step's inputs among the ranks, to find a divergence"
    )
    log_format: str = option(
        "text", "lines for people, or one JSON object per line", choices=LOG_FORMATS, is_of_host=True
    )
    flight_recorder_dir: str | None = option(
        None,
        "folder of the flight record of a job that ends abnormally; '' for none (default: the temporary folder)",
        is_of_host=True,
    )

    def __post_init__(self) -> None:
        if self.device_ids is not None:
            check_devices(self.device_ids)
        self._check_adapters()
        self._check_ranges()
        self._check_tuning()

    @property
    def num_spare_rows(self) -> int:
        """Rows after those of the sequences, in which a step computes draft tokens."""
        drafting = self.speculative_config
        return 0 if drafting is None else drafting.num_draft_rows(self.max_num_seqs, self.max_num_batched_tokens)

    @property
    def max_step_decodes(self) -> int:
        """Most decodes of a step: one of each sequence, or of fewer sequences with draft tokens."""
        return max(self.max_num_seqs, 1 + self.num_spare_rows)

    def _check_adapters(self) -> None:
        if self.lora_modules and not self.enable_lora:
            named = " ".join(f"{source.name}={source.path}" for source in self.lora_modules)
            raise ConfigError(
                f"lora_modules is {named!r}, and enable_lora is off: set enable_lora, or leave lora_modules out"
            )
        if self.lora_experts and not self.enable_lora:
            raise ConfigError("lora_experts is set, and enable_lora is off: set enable_lora, or leave lora_experts out")

    def _check_tuning(self) -> None:
        if self.tuned is not None and self.tune in ("quick", "full"):
            raise ConfigError(
                f"tuned is {self.tuned!r}, whose choices are taken as they are, and tune is {self.tune}; leave one out"
            )
        name = "tuned" if self.tuned is not None else "tune"
        if self.tp_invariant and (self.tuned is not None or self.tune in ("quick", "full")):
            raise ConfigError(
                f"tp_invariant is set, and {name} is {getattr(self, name)}; with tp_invariant the code's own choice of "
                f"kernels gives the same bits everywhere: leave {name} out"
            )

    def _check_ranges(self) -> None:
        if self.block_size < 1 or self.block_size & (self.block_size - 1):
            raise ConfigError(f"block_size is {self.block_size}; it must be a power of two, such as 16")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}; a step must hold one token of each of the "
                f"{self.max_num_seqs} sequences: raise it, or lower max_num_seqs"
            )
        if self.watchdog_warn_s > self.watchdog_timeout_s:
            raise ConfigError(
                f"watchdog_warn_s is {self.watchdog_warn_s} and watchdog_timeout_s is {self.watchdog_timeout_s}; the "
                "soft limit must not be above the hard one"
            )
        if self.kv_offloading_size and not self.enable_prefix_caching:
            raise ConfigError(
                f"kv_offloading_size is {self.kv_offloading_size:g} GiB, but only cached prefixes move to the host, "
                f"and enable_prefix_caching is off: switch it on, or set kv_offloading_size to 0"
            )
        self._check_disk()
        check_codec(
            self.kv_offloading_codec,
            size_gib=self.kv_offloading_size,
            kv_cache_dtype=self.kv_cache_dtype,
            disk_path=self.kv_disk_path,
        )
        if self.num_gpu_blocks_override is not None and self.kv_cache_memory_bytes is not None:
            raise ConfigError("num_gpu_blocks_override and kv_cache_memory_bytes are both set; give one of them")

    def _check_disk(self) -> None:
        """The options of the disk tier belong together."""
        size, path = self.kv_disk_size, self.kv_disk_path
        if (path is None) != (size == 0):
            raise ConfigError(
                f"kv_disk_path is {path!r} and kv_disk_size is {size:g} GiB; a disk tier needs both: set kv_disk_path "
                "to a directory and kv_disk_size above 0, or neither"
            )
        if path is not None and not self.kv_offloading_size:
            raise ConfigError(
                f"kv_disk_path is {path!r}, but kv_offloading_size is 0, and blocks go to disk by way of host memory: "
                "set kv_offloading_size, such as 4, or leave kv_disk_path out"
            )

    @property
    def tokenizer_source(self) -> str:
        """Folder or hub name of the tokenizer: ``tokenizer``, or else the model."""
        return self.tokenizer or self.model

    @property
    def extensions(self) -> dict[str, Any]:
        """Options of features of other distributions, by feature."""
        return self.feature_options or {}

    @property
    def scores_processed(self) -> bool:
        """Whether log-probabilities come from processed logits."""
        return self.logprobs_mode == "processed_logprobs"
