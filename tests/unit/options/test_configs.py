"""Every file in configs/ is a complete run that loads, and whose tensor-parallel size the model's heads allow."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tp_engine.config import DEMO_MODEL, EngineConfig
from tp_engine.options import Options, parse_options
from tp_engine.server.config import ServerConfig
from tp_engine.system.units import ceil_div

CONFIGS = Path(__file__).resolve().parents[3] / "configs"
FILES = sorted(CONFIGS.glob("*.toml"))

# (query heads, KV heads, layers, head_dim, max_position_embeddings, parameters in 1e9) of the published checkpoints.
GOLDEN: dict[str, tuple[int, int, Any, Any, int, float]] = {
    str(DEMO_MODEL): (8, 4, None, None, 1024, 0.004),
    "Qwen/Qwen3-0.6B": (16, 8, 28, 128, 40960, 0.75),
    "Qwen/Qwen3-32B": (64, 8, 64, 128, 40960, 32.8),
    "meta-llama/Llama-3.1-70B-Instruct": (64, 8, 80, 128, 131072, 70.6),
    "meta-llama/Llama-3.1-8B-Instruct": (32, 8, 32, 128, 131072, 8.03),
    "Qwen/Qwen2.5-7B-Instruct": (28, 4, 28, 128, 32768, 7.62),
    "mistralai/Mistral-7B-Instruct-v0.3": (32, 8, 32, 128, 32768, 7.25),
}
H100_BYTES = 80e9


def load(path: Path) -> tuple[EngineConfig, ServerConfig, Options]:
    tables = {"engine": EngineConfig, "server": ServerConfig}
    options = parse_options("serve", "", tables, ["--config", str(path)])
    return options.build("engine", EngineConfig), options.build("server", ServerConfig), options


def test_the_promised_runs_exist() -> None:
    """Oracle: the list in the documentation."""
    names = {path.name for path in FILES}
    assert {"demo_tp2_cpu.toml", "qwen3-0.6b_tp1_h100.toml"} <= names
    assert {"qwen3-32b_tp8_h100.toml", "llama-3.1-70b_tp8_h100.toml"} <= names


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_file_is_a_legal_run(path: Path) -> None:
    """Oracle: the published head counts, and the size that the file's own name states."""
    config, server, options = load(path)
    num_heads, num_kv_heads, _, _, max_position, _ = GOLDEN[config.model]
    size = config.tensor_parallel_size
    named = re.search(r"_tp(\d+)_", path.name)
    assert named and int(named[1]) == size
    assert num_heads % size == 0
    assert num_kv_heads % size == 0 or size % num_kv_heads == 0
    assert config.max_model_len is not None and config.max_model_len <= max_position
    assert server.served_model_name
    assert {"tensor_parallel_size", "device", "dtype", "max_model_len", "max_num_seqs"} <= options.given[
        "engine"
    ].keys()
    assert f"--nproc-per-node {size} launch/serve.py --config configs/{path.name}" in path.read_text()


@pytest.mark.parametrize("path", [path for path in FILES if "h100" in path.name], ids=lambda path: path.stem)
def test_weights_and_one_longest_request_fit(path: Path) -> None:
    """Oracle: arithmetic; 2 bytes per value, 10 % of the granted memory left for activations."""
    config, _, _ = load(path)
    _, num_kv_heads, num_layers, head_dim, _, billions = GOLDEN[config.model]
    assert config.max_model_len is not None and config.gpu_memory_utilization is not None
    local_kv_heads = ceil_div(num_kv_heads, config.tensor_parallel_size)
    token_bytes = 2 * num_layers * local_kv_heads * head_dim * 2
    weight_bytes = billions * 1e9 * 2 / config.tensor_parallel_size
    granted = H100_BYTES * config.gpu_memory_utilization * 0.9
    assert weight_bytes + token_bytes * config.max_model_len < granted
