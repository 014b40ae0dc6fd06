"""The table of jobs on fake nodes: what each one runs, on which node, and which part of the CUDA path it covers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# One layer of each kind is enough for the path; products are wide enough for Triton's tiles.
_DENSE: dict[str, Any] = {
    "architecture": "qwen3", "num_layers": 1, "vocab_size": 101, "hidden_size": 128, "intermediate_size": 128,
    "num_heads": 4, "num_kv_heads": 2,
}  # fmt: skip
# A machine may have ten times the work; what hangs ends at last.
_LIMITS = dict.fromkeys(("startup_timeout_s", "collective_timeout_s", "watchdog_timeout_s"), 800)
_SMALL: dict[str, Any] = {
    "dtype": "float32", "max_model_len": 64, "max_num_seqs": 2, "max_num_batched_tokens": 16,
    "num_gpu_blocks_override": 32, "tune": "off", **_LIMITS,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Job:
    """A program on a node, whose answers are those of the same program on one CPU rank.

    ``covers`` names parts of the CUDA path.  ``model``: parameters of ``tests.tiny_models.make_checkpoint``; ``node``:
    variables of ``tests.fake_cuda.node``; ``options``: of ``LLM``, beside those of all jobs; ``only_gpu``: those that
    the CPU does not have, in which ``FOLDER`` is one of the job's own; ``environment``: other variables;
    ``kept_bytes``: device memory that torch keeps for ever; ``has_head``: for multi-token prediction, whose drafts are
    always accepted (``tests.mtp_heads.make_mtp_cycle``); ``tolerance``: of log-probabilities; ``oracle_ranks``: on
    CPUs, where the number of ranks changes numbers.
    """

    name: str
    covers: str
    ranks: int = 1
    program: str = "generate"
    model: Mapping[str, Any] = field(default_factory=lambda: _DENSE)
    node: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    only_gpu: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    kept_bytes: int = 0
    has_head: bool = False
    tolerance: float = 1e-4
    oracle_ranks: int = 1

    def all_options(self) -> dict[str, Any]:
        """Options of ``LLM`` on the node, but for the model."""
        return {"device": "cuda", **_SMALL, **self.options, **self.only_gpu, "tensor_parallel_size": self.ranks}

    def oracle_options(self) -> dict[str, Any]:
        """Options of ``LLM`` for the same answers on CPUs."""
        cpu = {"device": "cpu", "attention_backend": "torch", "tensor_parallel_size": self.oracle_ranks}
        return {**_SMALL, **self.options, **cpu}


@dataclass(frozen=True, slots=True)
class Refusal:
    """A start that must fail before a rank has memory of a GPU, with ``message`` (a regular expression)."""

    name: str
    covers: str
    message: str
    ranks: int = 1
    model: Mapping[str, Any] = field(default_factory=lambda: _DENSE)
    node: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Fault:
    """A job that must end by itself within the watchdog's limits, and say ``message`` (a regular expression).

    ``fault``: of ``TP_ENGINE_FAULT``; ``node``: as above, with ``FAULTS``; ``options``: of the engine.
    """

    name: str
    covers: str
    message: str
    fault: str = ""
    node: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)


_LAZY = {"LAZY": "1"}
_EARLY = {"LAZY": "2"}  # what other streams than the default one do comes before what they do not wait for
_NCCL = {"all_reduce_backend": "nccl"}
_SYMMETRIC = {"all_reduce_backend": "symm_mem"}
_NO_SYMMETRIC = r"all_reduce_backend is 'symm_mem', but"
_NGRAM = '{"method": "ngram", "num_speculative_tokens": 1, "max_step_rows": 2}'
_MTP = '{"method": "mtp", "num_speculative_tokens": 2, "max_step_rows": 4}'
_HYBRID = {
    "architecture": "qwen3.5", "num_layers": 2, "vocab_size": 101, "intermediate_size": 64,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
_BLOCK_GIB = 2 * 16 * 2 * 32 * 4 / 2**30  # K and V of 16 tokens, in 2 heads of 32 float32, of one layer
_TORCHRUN = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
_FEW_BLOCKS = {"num_gpu_blocks_override": 8, "block_size": 16}
_LATENT = {"architecture": "deepseek-v3", "num_layers": 2, "vocab_size": 101}
_SPARSE = {**_LATENT, "architecture": "deepseek-v3.2", "index_topk": 16, "index_n_heads": 8}
_LONG = {"max_model_len": 256, "max_num_batched_tokens": 160}
_EXPERTS = {"architecture": "qwen3-moe", "num_layers": 2, "vocab_size": 101, "hidden_size": 128}

JOBS = (
    Job("1 rank", "`readback.py`, `recorder.py`, `transfer.py`, `sampler.py`: streams, decode graphs, every sampler",
        program="sample", node=_LAZY, options={"max_num_seqs": 3}, only_gpu={"device": "auto"}),
    Job("2 ranks, NCCL", "`groups.py`, `device_sampler.py`, `ranking.py`: NCCL and a nucleus over ranks, in graphs",
        ranks=2, program="sample", node=_LAZY, options={"max_num_seqs": 3}, only_gpu=_NCCL),
    Job("2 ranks, symmetric memory",
        "`symmetric_memory.py`, `fused_norm.py`, `tuner.py`: mapping, sums, trials of kernels", ranks=2,
        only_gpu={**_SYMMETRIC, "tune": "quick"}, node=_LAZY, kept_bytes=2 << 20),  # torch's arrays of addresses
    Job("2 ranks, prompts in graphs", "`padded_batch.py`, `graph_plan.py`: graphs of steps with prompts",
        ranks=2, node=_LAZY,
        options={"max_num_batched_tokens": 24}, only_gpu={**_NCCL, "cudagraph_prefill_capture_sizes": "24"}),
    Job("2 ranks on one GPU", "`groups.py`: gloo through the host", ranks=2, only_gpu={"device_ids": "0,0"},
        node={"GPUS": "1xH100", **_LAZY}),
    Job("2 ranks on one GPU, bfloat16", "`gather_triton.py`: sums and gathers of 16-bit floats, in graphs",
        ranks=2, options={"dtype": "bfloat16"}, only_gpu={"device_ids": "0,0", **_SYMMETRIC}, tolerance=0.1,
        node={"GPUS": "1xH100", **_LAZY}, kept_bytes=2 << 20),
    Job("1 rank, a budget", "`meter.py`, `ledger.py`, `trial_steps.py`: the ledger decides, and that much is free",
        options={"num_gpu_blocks_override": None}, only_gpu={"gpu_memory_utilization": 0.0025},
        environment={"TP_ENGINE_LOG_LEVEL": "DEBUG"},
        # A fourhundredth of 45 GiB, and what torch's blocks are larger than their tensors.
        node={"GPUS": "1xL40", "FREE_GIB": "0.1208", **_LAZY}),
    Job("1 rank, long contexts", "`paged_decode_triton.py`: decodes that are split, and joined", program="long",
        options=_LONG, node=_LAZY),
    Job("8 ranks", "`groups.py`, `layers/attention.py`: KV heads on four ranks each",
        ranks=8, only_gpu={**_NCCL, "enforce_eager": True}, model={**_DENSE, "num_heads": 8}),
    Job("2 ranks, experts", "`kernels/experts/`: whole experts per rank", ranks=2, model=_EXPERTS, node=_LAZY,
        only_gpu={**_NCCL, "enable_expert_parallel": True}),
    Job("2 ranks, latent attention", "`triton_mla.py`, `mla.py`", ranks=2, only_gpu=_NCCL, node=_LAZY,
        model=_LATENT),
    Job("1 rank, long chunks of latents", "`expanded.py`, `expanded_triton.py`: keys and values made of latents",
        program="long", model=_LATENT, options=_LONG, node=_LAZY),
    Job("1 rank, chosen keys", "`index_keys_triton.py`, `selection.py`: an indexer's choice, in decodes and prompts",
        program="long", model=_SPARSE, options=_LONG, node=_LAZY),
    Job("1 rank, state spaces", "`mamba2_triton.py`: states of Mamba2, prompts and decodes", node=_LAZY,
        model={"architecture": "nemotron-h", "num_layers": 2, "vocab_size": 101, "hybrid_override_pattern": "M*"}),
    Job("1 rank, short convolutions", "`short_conv_triton.py`: kept inputs", node=_LAZY,
        model={"architecture": "lfm2", "num_layers": 2, "vocab_size": 101, "layer_types": ["conv", "full_attention"]}),
    Job("2 ranks, recurrent states", "`gated_delta_net_triton.py`, `worker/memory/`: states and their snapshots",
        ranks=2, program="sample", only_gpu=_NCCL, node=_LAZY,
        model={**_HYBRID, "linear_num_key_heads": 2, "linear_num_value_heads": 6}),
    Job("1 rank, fp8, another thread", "`quantised_products.py`, `layer_kv.py`, `device.py`: 8-bit weights and cache",
        program="threaded", options={"quantization": "fp8", "kv_cache_dtype": "int8"}, only_gpu={"device_ids": "1"}),
    Job("2 ranks, int4", "`quantised.py`, `packings.py`: packed weights",
        ranks=2, options={"quantization": "int4"}, only_gpu=_NCCL, node=_LAZY, oracle_ranks=2),  # factors per rank
    Job("1 rank, bfloat16 on A100", "`dependent_launch_triton.py`: a GPU without early launches",
        options={"dtype": "bfloat16"}, tolerance=0.1,
        node={"GPUS": "1xA100", **_LAZY}),
    Job("2 ranks, adapters", "`lora.py`, `upload.py`: slots and their uploads", ranks=2, program="adapters", node=_LAZY,
        options={"enable_lora": True, "max_loras": 1, "max_lora_rank": 8}, only_gpu=_NCCL),
    Job("2 ranks, speculation", "`spare_rows.py`, `trial_steps.py`: verified drafts",
        ranks=2, options={"speculative_config": _NGRAM}, only_gpu=_NCCL,
        node=_LAZY),
    Job("2 ranks, a draft head", "`head_drafter.py`: drafts of a head of the model, in graphs",
        ranks=2, options={"speculative_config": _MTP, "max_num_seqs": 4}, only_gpu=_NCCL, node=_LAZY, has_head=True,
        model={**_HYBRID, "tie": False}),
    Job("2 ranks, new weights", "`weight_update.py`, `staged_tensors.py`: sleep, a new cache",
        ranks=2, program="new_weights", only_gpu=_NCCL, node=_LAZY),
    Job("2 ranks, tiers on the host and on disk", "`host_tier.py`, `disk_tier.py`: page-locked blocks, a stream",
        ranks=2, program="many", node=_LAZY,
        only_gpu={**_NCCL, **_FEW_BLOCKS, "kv_offloading_size": 4.5 * _BLOCK_GIB, "kv_disk_path": "FOLDER/disk",
                  "kv_disk_size": 32.5 * _BLOCK_GIB}),
    Job("1 rank, a host tier with a codec", "`block_moves.py`, `pca.py`: blobs, and blocks that are refused",
        program="thrice", model={**_DENSE, "num_heads": 8, "num_kv_heads": 4}, node=_EARLY,
        options={**_FEW_BLOCKS, "kv_offloading_size": 0.001, "kv_offloading_codec": "pca:16", "enforce_eager": True}),
    Job("2 of 8 B200, bfloat16, eager", "`device.py`, `step_runner.py`: CUDA_VISIBLE_DEVICES, launches without graphs",
        ranks=2, options={"dtype": "bfloat16"}, only_gpu={**_NCCL, "enforce_eager": True}, tolerance=0.1,
        node={"GPUS": "8xB200", **_EARLY}, environment={"CUDA_VISIBLE_DEVICES": "5,2"}),
    Job("GPUs that are not visible", "`gpu_host.py`: the CPU instead", only_gpu={"device": "auto"},
        environment={"CUDA_VISIBLE_DEVICES": "9", "TP_ENGINE_NATIVE": "0"}),
    Job("no GPU", "`gpu_host.py`: a host without any", node={"GPUS": "0xH100"}, environment={"TP_ENGINE_NATIVE": "0"},
        only_gpu={"device": "auto", "profile": "FOLDER/traces"}),
)  # fmt: skip

REFUSALS = (
    Refusal("a driver that does not start", "`gpu_host.py`: GPUs that are only counted", r"counts 8 GPUs.* use none",
            node={"FAULTS": "start@0:1"}),
    Refusal("an old driver", "`gpu_host.py`: the driver's version", r"too old for it: it takes CUDA up to 12\.2",
            node={"DRIVER": "12020"}),
    Refusal("fewer GPUs than ranks", "`effective_config.py`: a GPU for each rank", r"\b4\b.*\b2\b", ranks=4,
            node={"GPUS": "2xH100"}),
    Refusal("a GPU that is not visible", "the same with CUDA_VISIBLE_DEVICES", r"\b2\b.*\b1\b", ranks=2,
            environment={"CUDA_VISIBLE_DEVICES": "1"}),
    Refusal("no visible GPU under torchrun", "`gpu_host.py`: no CPU instead", r"CUDA_VISIBLE_DEVICES is '9'; name GPUs",
            ranks=2, environment={"CUDA_VISIBLE_DEVICES": "9", **_TORCHRUN}, options={"device": "auto"}),
    Refusal("mixed kinds", "`device.py`: equal GPUs", r"rank 0 runs on NVIDIA H100.*rank 1 on NVIDIA A100", ranks=2,
            node={"GPUS": "1xH100,1xA100"}),
    Refusal("slices of one GPU", "`device.py`: places on the bus", r"slices of a GPU \(MIG\) count as that GPU",
            ranks=2, node={"GPUS": "2xMIG"}),
    Refusal("no bfloat16", "`effective_config.py`: what a GPU computes", r"bfloat16", node={"GPUS": "1xT4"},
            options={"dtype": "bfloat16"}),
    Refusal("symmetric memory without peers", "`reduce_plan.py`: peer access", _NO_SYMMETRIC, ranks=2,
            node={"P2P": "0"}, options=_SYMMETRIC),
    Refusal("symmetric memory without atomics", "`symmetric_memory.py`: the driver's answer for each pair",
            _NO_SYMMETRIC, ranks=2, node={"ATOMICS": "0"}, options=_SYMMETRIC),
    Refusal("symmetric memory against NCCL's switch", "`system/env.py`: NCCL_P2P_DISABLE", _NO_SYMMETRIC, ranks=2,
            environment={"NCCL_P2P_DISABLE": "1"}, options=_SYMMETRIC),
    Refusal("NCCL on one GPU", "`all_reduce.py`: ranks that share a GPU", r"NCCL refuses ranks that share a GPU",
            ranks=2, options={**_NCCL, "device_ids": "0,0"}),
    Refusal("sums through memory of the host", "`all_reduce.py`: rows for CPUs", r"'shm', which is for CPUs", ranks=2,
            options={"all_reduce_backend": "shm"}),
    Refusal("an fp8 cache on A100", "`triton_backend.py`: what a GPU converts", r"before compute capability 8\.9",
            node={"GPUS": "1xA100"}, options={"kv_cache_dtype": "fp8", "attention_backend": "triton"}),
    Refusal("heads that are too wide", "`triton_backend.py`: what a program can hold", r"head_dim is 528; it takes at",
            model={**_DENSE, "head_dim": 528}, options={"attention_backend": "triton"}),
    Refusal("latents that are too wide", "`triton_mla.py`: the same of a cached row", r"a cached row has 6\d\d ",
            model={**_LATENT, "kv_lora_rank": 600}, options={"attention_backend": "triton"}),
    Refusal("a missing package", "`flash_attn.py`", r"the flash-attn package is not installed",
            options={"attention_backend": "flash_attn"}),
)  # fmt: skip

# Of jobs that torchrun or a script launches.
LAUNCHED_OPTIONS: dict[str, Any] = {**_SMALL, **_NCCL, "device": "cuda", "attention_backend": "triton"}

FAULTS = (
    Fault("kill -9", "a rank that is gone", r"rank 1", fault="1:step_begin@3:kill"),
    Fault("a rank that raises", "an error of one rank", r"rank 1", fault="1:step_begin@3:raise"),
    Fault(
        "a collective that hangs",
        "NCCL aborted by the watchdog",
        r"rank",
        node={"FAULTS": "hang@1:60"},
        options={"watchdog_warn_s": 10, "watchdog_timeout_s": 20, "collective_timeout_s": 25},
    ),
    Fault(
        "a first collective that hangs",
        "`first_collective.py`: a deadline, and the remedy",
        r"the first all-reduce between GPUs has not ended within 20 s.*NCCL_P2P_DISABLE=1",
        node={"FAULTS": "hang@0:1 hang@1:1"},
    ),
    Fault(
        "a GPU that is lost",
        "`incident.py`: errors of CUDA, and which GPU it was",
        r"on GPU 1 \(NVIDIA H100 80GB HBM3, .*dmesg \| grep -i xid",
        node={"FAULTS": "lost@1:1500"},
    ),
    Fault("memory that runs out", "an allocation that fails", r"out of memory", node={"FAULTS": "alloc@1:2"}),
)
