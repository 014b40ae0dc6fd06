"""One rank of a large model as a separate model: everything in its step but the all-reduces, on one GPU.

A slice is a folder with a config.json whose heads, inner sizes and vocabulary are one rank's share, as is the experts'
inner size under tensor parallelism.  Its kernels, launches and bytes are those of a rank of the whole.

    python scripts/gpu/slices.py NAME --steps ROWSxTOKENS      measures a slice's decode steps (bench offline --steps)
    python scripts/gpu/slices.py --compile                     runs all at once with --few, and measures nothing
    python scripts/gpu/slices.py NAME --few                    a few layers, which launch the kernels that all do
    python scripts/gpu/slices.py NAME --tune                   proves and times its kernels' candidates (tp-engine tune)
    python scripts/gpu/slices.py NAME --rehearse               the same with a tiny model of the same kind

A first start compiles, in one process one kernel after the other, and tries candidates of kernels: ``--compile`` does
both while others use the GPU, so that a slice's own time is for its steps.  It then has the kernels of a user's start:
a candidate that is timed beside others needs more of a gain to be taken (``worker/tuning/rule.py``).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
_SHARED = (
    "num_attention_heads", "num_key_value_heads", "linear_num_key_heads", "linear_num_value_heads",
    "intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size", "vocab_size",
)  # fmt: skip
# The most of each size in a rehearsal: every kind of layer and kernel is still there.
_TINY = {
    "hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "intermediate_size": 256, "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128, "num_experts": 16, "num_local_experts": 16, "n_routed_experts": 16,
    "q_lora_rank": 128, "vocab_size": 512,
}  # fmt: skip
# Nor does a rehearsal profile a step of 16,384 tokens, or try kernels.
_FEW = {
    "max_num_batched_tokens": 32, "max_num_seqs": 2, "max_model_len": 128, "num_gpu_blocks_override": 16, "tune": "off",
}  # fmt: skip
COMMON = {
    "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 40960, "torch_dtype": "bfloat16",
    "tie_word_embeddings": False, "attention_bias": False, "hidden_act": "silu",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Whole:
    """A published model: ``sizes`` of its config.json that matter for a step, and the ranks that share it.

    ``num_layers`` are those of the slice, all if None: fewer where all do not fit beside the cache of one GPU.
    """

    world_size: int
    sizes: Mapping[str, Any]
    num_layers: int | None = None

    def slice(self) -> dict[str, Any]:
        """The config.json of one rank's share."""
        config = {**COMMON, **self.sizes}
        for name in _SHARED:
            if name in config:
                config[name] = max(1, -(-int(config[name]) // self.world_size))
        if self.num_layers is not None:
            config["num_hidden_layers"] = self.num_layers
        return config

    def rehearsal(self) -> dict[str, Any]:
        """The config.json of a tiny model of the same kind."""
        config = self.slice()
        config |= {name: min(config[name], most) for name, most in _TINY.items() if name in config}
        return config | self.first_layers()

    def all_layers(self) -> dict[str, Any]:
        """Return what is different in the config.json of a model with all layers of the slice."""
        return {key: self.slice()[key] for key in ("num_hidden_layers", "layer_types") if key in self.slice()}

    def first_layers(self) -> dict[str, Any]:
        """What differs in the config.json of a model with just enough layers for one of each kind."""
        kinds = self.sizes.get("layer_types")
        if kinds is None:
            return {"num_hidden_layers": self.sizes.get("first_k_dense_replace", 0) + 1}
        count = max(kinds.index(kind) for kind in set(kinds)) + 1
        return {"num_hidden_layers": count, "layer_types": kinds[:count]}


WHOLES = {
    "llama-70b-tp8": Whole(8, {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 8192, "num_hidden_layers": 80,
        "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 28672,
        "vocab_size": 128256, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
    }),
    "deepseek-v3-tp8": Whole(8, {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "hidden_size": 7168,
        "num_attention_heads": 128, "num_key_value_heads": 128, "q_lora_rank": 1536, "kv_lora_rank": 512,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "intermediate_size": 18432,
        "moe_intermediate_size": 2048, "n_routed_experts": 256, "num_experts_per_tok": 8, "n_shared_experts": 1,
        "n_group": 8, "topk_group": 4, "topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True,
        "routed_scaling_factor": 2.5, "first_k_dense_replace": 3, "moe_layer_freq": 1, "vocab_size": 129280,
        "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "num_hidden_layers": 61,
        "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
                                "weight_block_size": [128, 128]},
    }, num_layers=16),
    "gpt-oss-120b-tp4": Whole(4, {
        "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "hidden_size": 2880, "num_hidden_layers": 36,
        "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 2944,
        "num_local_experts": 128, "num_experts_per_tok": 4, "experts_per_token": 4, "sliding_window": 128,
        "swiglu_limit": 7.0, "attention_bias": True, "rms_norm_eps": 1e-5, "vocab_size": 201088,
        "layer_types": ["sliding_attention", "full_attention"] * 18,
        "rope_parameters": {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "beta_fast": 32.0,
                            "beta_slow": 1.0, "original_max_position_embeddings": 4096, "truncate": False},
        "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": [
            "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]},
    }),  # its inner size of 2880 is padded to 2944, which 4 ranks share in multiples of 32
    "qwen3.5-35b-a3b-tp2": Whole(2, {
        "architectures": ["Qwen3_5MoeForCausalLM"], "model_type": "qwen3_5_moe_text", "hidden_size": 2048,
        "num_hidden_layers": 40, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256,
        "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "num_experts": 256,
        "num_experts_per_tok": 8, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
        "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
        "full_attention_interval": 4, "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 10,
        "partial_rotary_factor": 0.25, "rms_norm_eps": 1e-6, "vocab_size": 248320,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    }),
    "qwen3-235b-tp8": Whole(8, {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 4096,
        "num_hidden_layers": 94, "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 128,
        "intermediate_size": 12288, "moe_intermediate_size": 1536, "num_experts": 128, "num_experts_per_tok": 8,
        "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [], "vocab_size": 151936,
        "rms_norm_eps": 1e-6, "rope_theta": 1e6,
    }),
}  # fmt: skip


# One row, except for the model with a goal for many rows.
STEPS = dict.fromkeys(WHOLES, "1x128") | {"qwen3-235b-tp8": "64x512"}
# Engines that compile share the GPU with each other and with tests.
_SMALL_SHARE = {"gpu_memory_utilization": 0.1, "num_gpu_blocks_override": 4096}


def command_of(name: str, steps: str, config: Mapping[str, Any], num_steps: int, **options: Any) -> list[str]:
    """The command that benchmarks a slice's steps; writes the slice's folder."""
    folder = folder_of(name, config)
    options = {"load_format": "dummy", "cudagraph_capture_sizes": steps.partition("x")[0], **options}
    command = [sys.executable, "-m", "tp_engine", "bench", "offline", "--model", str(folder), "--no-peer"]
    command += ["--dtype", "bfloat16", "--steps", steps, "--num-steps", str(num_steps)]
    return [*command, "--engine-options", json.dumps(options)]


def folder_of(name: str, config: Mapping[str, Any]) -> Path:
    """A new folder with a slice's config.json."""
    folder = Path(tempfile.mkdtemp(prefix="slice-")) / name
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    return folder


def steps_of(name: str, steps: str, config: Mapping[str, Any], *, is_rehearsal: bool, **options: Any) -> list[str]:
    """The same as a slice is measured, or for a tiny model with one row and few steps."""
    if is_rehearsal:
        return command_of(name, "1x16", config, 4, **(options | _FEW))
    return command_of(name, steps, config, 24, **options)


def use_blocks_of(config: Mapping[str, Any]) -> None:
    """Let blocks of this process's KV caches be as large as those of the model ``config``: how far they lie apart is
    compiled into kernels, and is a matter of the number of layers."""
    from tp_engine.model_config import read_model
    from tp_engine.model_config.kv_layout import KvLayout

    layout, block_bytes = read_model(config).kv_layout, KvLayout.block_bytes

    def of_all_layers(_few: KvLayout, block_size: int, itemsize: int, *, has_scales: bool = False) -> int:
        return block_bytes(layout, block_size, itemsize, has_scales=has_scales)

    KvLayout.block_bytes = of_all_layers  # type: ignore[method-assign, assignment]


def compile_all(commands: Mapping[str, Sequence[str]]) -> int:
    """Run all commands at once; say how many ended well, and when.  Returns the exit code."""
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        logs = {name: Path(folder, name) for name in commands}
        running = {}
        for name, command in commands.items():
            with logs[name].open("w") as log:
                running[name] = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        failed = [name for name, process in running.items() if process.wait()]
        for name in failed:
            print(f"{name}:\n{logs[name].read_text(errors='replace')[-2000:]}")
    ended = f"{len(commands) - len(failed)} of {len(commands)} slices ran after {time.monotonic() - began_s:.0f} s"
    print(json.dumps({"benchmark": "compile", "verdict": "; failed: ".join([ended, *failed])}))
    return bool(failed)


def main() -> int:
    """Become the benchmark of a slice's steps, or compile the kernels of all slices."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=WHOLES, nargs="?")
    parser.add_argument("--steps", metavar="ROWSxTOKENS", help="default: 1x128, or 64x512 of qwen3-235b-tp8")
    parser.add_argument("--compile", action="store_true", help="run a few layers of all slices at once")
    parser.add_argument("--few", action="store_true", help="run a few layers, beside others")
    parser.add_argument("--tune", action="store_true", help="prove and time candidates of its kernels")
    parser.add_argument("--rehearse", action="store_true", help="a tiny model, a row, and few steps")
    args = parser.parse_args()
    if args.compile == (args.name is not None):
        parser.error("name a slice, or give --compile for all")
    if args.compile:
        rest = ["--few", "--rehearse"] if args.rehearse else ["--few"]
        names = list(WHOLES)[: 1 if args.rehearse else None]
        return compile_all({name: [sys.executable, __file__, name, *rest] for name in names})
    name, steps, whole = args.name, args.steps or STEPS[args.name], WHOLES[args.name]
    config = whole.rehearsal() if args.rehearse else whole.slice()
    if args.few:
        from tp_engine.cli.main import main as run

        use_blocks_of(config | whole.all_layers())
        few = config | whole.first_layers()
        return run(steps_of(name, steps, few, is_rehearsal=args.rehearse, **_SMALL_SHARE)[3:])
    if args.tune:
        command = [sys.executable, "-m", "tp_engine", "tune", str(folder_of(name, config)), "--dtype", "bfloat16"]
        command += ["--load-format", "dummy", "--quick", "--again", "--report"]
    else:
        command = steps_of(name, steps, config, is_rehearsal=args.rehearse)
    return os.execv(sys.executable, command)


if __name__ == "__main__":
    sys.exit(main())
