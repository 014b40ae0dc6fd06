"""Models against transformers, in float32, on one rank and on several simulated ones."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from tests.families import FAMILIES
from tests.simulated_ranks import run_ranks
from tests.tiers import slow_but
from tp_engine.attention.base import AttentionBackend, AttentionMetadata, AttentionShape
from tp_engine.attention.mla import MLABackend
from tp_engine.attention.torch_backend import TorchBackend
from tp_engine.distributed.collectives import Communicator, SingleRank
from tp_engine.kernels.kv_cache.layer_kv import KeyValue, LayerKv
from tp_engine.layers.attention import Attention, forward_context
from tp_engine.layers.quantization import dense
from tp_engine.model_config import check_tensor_parallel, load_model_config
from tp_engine.model_config.kv_layout import MAX_GROUPS
from tp_engine.model_config.spec import ModelSpec
from tp_engine.models.causal_lm import build_model
from tp_engine.models.language_model import LanguageModel
from tp_engine.models.shared_row_attention import CompressedRows
from tp_engine.weights.loader import load_weights

CPU = torch.device("cpu")
LLAMA3 = {
    "rope_theta": 10000.0,
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LENGTHS = (1, 37, 20)
BLOCK_SIZE, BLOCKS_PER_PROMPT = 16, 3
CASES: dict[str, dict[str, Any]] = {
    "llama": {"architecture": "llama"},
    "llama-tied": {"architecture": "llama", "tie": True},
    "llama-biases": {"architecture": "llama", "attention_bias": True, "mlp_bias": True},
    "llama3-rope": {"architecture": "llama", "rope_parameters": LLAMA3},
    "linear-rope": {
        "architecture": "llama",
        "rope_parameters": {"rope_theta": 500.0, "rope_type": "linear", "factor": 4.0},
    },
    "llama-mha": {"architecture": "llama", "num_kv_heads": 8, "head_dim": 24},
    "qwen2": {"architecture": "qwen2"},
    "qwen2-tied": {"architecture": "qwen2", "tie": True},
    "qwen2-windows": {
        "architecture": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 7,
        "max_window_layers": 1,
    },
    "qwen3": {"architecture": "qwen3", "head_dim": 24},
    "qwen3-biases": {"architecture": "qwen3", "attention_bias": True, "tie": True},
    "mistral": {"architecture": "mistral", "sliding_window": None},
    "mistral-window": {"architecture": "mistral", "sliding_window": 9, "head_dim": 12},
    "gemma4-values": {"architecture": "gemma4", "num_global_key_value_heads": 2, "attention_k_eq_v": False},
    "gemma4-wide": {"architecture": "gemma4", "num_global_key_value_heads": 2, "global_head_dim": 512},
    **{f"table-{name}": {"architecture": name} for name in FAMILIES},
}


class PlainBackend:
    """Attention in plain PyTorch, which prepares each layer's step anew."""

    name = "plain"

    def prepare(self, metadata: AttentionMetadata) -> None:
        """Nothing is kept from layer to layer."""

    def forward(
        self, query: torch.Tensor, new: KeyValue | None, kv: LayerKv, metadata: AttentionMetadata, shape: AttentionShape
    ) -> torch.Tensor:
        backend: AttentionBackend = TorchBackend()
        if shape.latent is not None:
            backend = MLABackend(backend, None if shape.chooser is None else shape.chooser.top_k)
        backend.prepare(metadata)
        return backend.forward(query, new, kv, metadata, shape)


BACKENDS = [cast(AttentionBackend, PlainBackend())] * MAX_GROUPS


def bind_caches(layers: Sequence[Attention], dtype: torch.dtype = torch.float32) -> None:
    """Give each layer a cache of its own, for prompts of ``LENGTHS``."""
    for layer in layers:
        sizes, chooser = (len(LENGTHS) * BLOCKS_PER_PROMPT, BLOCK_SIZE), cast(Any, layer.shape.chooser)
        parts = 2 if layer.shape.value_dim is None else 1
        heads = layer.shape.num_kv_heads, layer.shape.head_dim
        layer.bind_kv_cache(torch.zeros(parts, *sizes, *heads, dtype=dtype))
        if isinstance(layer, CompressedRows) and layer.index is not None:
            layer.bind_index_keys(torch.zeros(1, *sizes, 1, layer.index.dim, dtype=dtype))
        if chooser is not None:
            chooser.index_kv = LayerKv(torch.zeros(1, *sizes, 1, len(chooser.norm), dtype=dtype))


def prefill_metadata(lengths: tuple[int, ...]) -> AttentionMetadata:
    """New requests of the given lengths, all of their tokens in one step."""
    starts = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
    lens = np.asarray(lengths, dtype=np.int32)
    table = torch.arange(len(lengths) * BLOCKS_PER_PROMPT, dtype=torch.int32).view(len(lengths), -1)
    firsts = table[:, 0].tolist()
    return AttentionMetadata(
        num_decodes=0,
        slot_mapping=torch.cat(
            [first * BLOCK_SIZE + torch.arange(length) for first, length in zip(firsts, lengths, strict=True)]
        ),
        block_table=table,
        seq_lens=torch.from_numpy(lens),
        query_start=torch.from_numpy(starts),
        host_query_lens=lens,
        host_seq_lens=lens,
    )


def prompts(config: ModelSpec) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(config.vocab_size, (length,), generator=generator).tolist() for length in LENGTHS]


def load(config: ModelSpec, folder: Path, communicator: Communicator, **options: Any) -> LanguageModel:
    dtype = options.pop("dtype", torch.float32)
    model = build_model(
        config, communicator=communicator, dtype=dtype, device=CPU, backends=BACKENDS, max_model_len=128
    )
    load_weights(dict(model.named_parameters()), config, folder, info=communicator.info, **options)
    bind_caches(model.attention_layers, dtype)
    return model


def logits_of(model: LanguageModel, tokens: list[list[int]]) -> torch.Tensor | None:
    """Logits of all positions of all prompts in one step, (N, vocab)."""
    flat = torch.tensor([token for prompt in tokens for token in prompt])
    positions = torch.cat([torch.arange(len(prompt)) for prompt in tokens])
    lengths = tuple(len(prompt) for prompt in tokens)
    with torch.inference_mode(), forward_context([prefill_metadata(lengths)] * MAX_GROUPS):
        return model.compute_logits(model(flat, positions))


def oracle_logits(folder: Path, tokens: list[list[int]], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """transformers' logits, one prompt at a time, (N, vocab)."""
    import transformers

    (name,) = json.loads((folder / "config.json").read_text())["architectures"]
    model = getattr(transformers, name).from_pretrained(folder, dtype=dtype).eval()
    with torch.inference_mode():
        return torch.cat([model(input_ids=torch.tensor([prompt])).logits[0] for prompt in tokens])


def parallel_logits(config: ModelSpec, folder: Path, world_size: int, **options: Any) -> torch.Tensor:
    def body(communicator: Communicator) -> torch.Tensor | None:
        model = load(config, folder, communicator, **options)
        model.finish_loading()
        return logits_of(model, prompts(config))

    found = run_ranks(world_size, body)
    assert all(logits is None for logits in found[1:])
    assert found[0] is not None
    return found[0]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("is_plain", slow_but([False], [True, False]), ids=["plain", "packed"])
def test_one_rank_equals_transformers(
    case: str, is_plain: bool, checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: transformers in float32, full logits of prompts longer than the windows; weights plain, or packed."""
    if is_plain:
        monkeypatch.setattr(dense, "native_library", lambda: None)
        monkeypatch.setattr(dense, "_packed", lambda weight: None)
    config, folder = load_model_config(str(checkpoint(**CASES[case])))
    model = load(config, folder, SingleRank())
    model.finish_loading()
    logits = logits_of(model, prompts(config))
    torch.testing.assert_close(logits, oracle_logits(folder, prompts(config)), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("world_size", slow_but([2], [2, 8]))
@pytest.mark.parametrize("case", CASES)
def test_ranks_equal_transformers(case: str, world_size: int, checkpoint: Callable[..., Path]) -> None:
    """Oracle: transformers in float32; 8 ranks hold each of the 4 KV heads twice, and the vocabulary is padded."""
    config, folder = load_model_config(str(checkpoint(**CASES[case])))
    logits = parallel_logits(config, folder, world_size)
    torch.testing.assert_close(logits, oracle_logits(folder, prompts(config)), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("heads", "kv_heads", "world_size"), [(6, 3, 3), (6, 1, 3), (6, 2, 6), (8, 1, 8), (8, 2, 4)])
def test_odd_head_counts(heads: int, kv_heads: int, world_size: int, checkpoint: Callable[..., Path]) -> None:
    """Oracle: transformers; world sizes that are not powers of two, and one KV head on up to 8 ranks."""
    sizes = {"num_heads": heads, "num_kv_heads": kv_heads, "head_dim": 8, "hidden_size": 48, "vocab_size": 101}
    config, folder = load_model_config(str(checkpoint("qwen3", **sizes)))
    check_tensor_parallel(config, world_size)
    logits = parallel_logits(config, folder, world_size)
    torch.testing.assert_close(logits, oracle_logits(folder, prompts(config)), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_bfloat16_is_as_close_as_transformers(architecture: str, checkpoint: Callable[..., Path]) -> None:
    """Oracle: float32 logits; our error in bfloat16 is at most twice that of transformers in bfloat16."""
    config, folder = load_model_config(str(checkpoint(architecture, hidden_size=128, dtype="bfloat16")))
    tokens = prompts(config)
    exact = oracle_logits(folder, tokens)
    theirs = (oracle_logits(folder, tokens, torch.bfloat16).float() - exact).abs().mean()
    model = load(config, folder, SingleRank(), dtype=torch.bfloat16)
    model.finish_loading()
    found = logits_of(model, tokens)
    assert found is not None and found.dtype == torch.bfloat16
    assert (found.float() - exact).abs().mean() <= 2 * theirs


@pytest.mark.parametrize("world_size", [1, 2])
def test_only_wanted_tokens_come_out(world_size: int, checkpoint: Callable[..., Path]) -> None:
    """Oracle: the logits of all tokens; those of the prompts' last tokens, or of any others, are equal to theirs."""
    config, folder = load_model_config(str(checkpoint(**CASES["qwen3"])))
    wanted = torch.tensor([*np.cumsum(LENGTHS) - 1, 1, 0])

    def body(communicator: Communicator) -> tuple[torch.Tensor, torch.Tensor]:
        model = load(config, folder, communicator)
        model.finish_loading()
        tokens = torch.tensor([token for prompt in prompts(config) for token in prompt])
        positions = torch.cat([torch.arange(length) for length in LENGTHS])
        with torch.inference_mode(), forward_context([prefill_metadata(LENGTHS)] * MAX_GROUPS):
            return model(tokens, positions, wanted), model(tokens, positions)

    for alone, among_all in run_ranks(world_size, body):
        assert alone.shape == (len(wanted), config.hidden_size)
        torch.testing.assert_close(alone, among_all[wanted], rtol=1e-5, atol=1e-5)


def test_dummy_weights_are_one_model_for_all_world_sizes(checkpoint: Callable[..., Path]) -> None:
    """Oracle: one rank's logits with the same seed; another seed gives another model."""
    config, folder = load_model_config(str(checkpoint("qwen3")))
    alone = parallel_logits(config, folder, 1, load_format="dummy", seed=3)
    other = parallel_logits(config, folder, 1, load_format="dummy", seed=4)
    assert not torch.allclose(alone, other, atol=1e-3)
    for world_size in (2, 8):
        shared = parallel_logits(config, folder, world_size, load_format="dummy", seed=3)
        torch.testing.assert_close(shared, alone, atol=1e-4, rtol=1e-4)


def test_attention_layers_are_listed_in_order(checkpoint: Callable[..., Path]) -> None:
    """Oracle: the configuration's windows, layer by layer; each rank's share of the heads."""
    config, _ = load_model_config(str(checkpoint(**CASES["qwen2-windows"])))
    model = build_model(
        config, communicator=SingleRank(), dtype=torch.float32, device=CPU, backends=BACKENDS, max_model_len=16
    )
    windows = [layer.shape.sliding_window for layer in model.attention_layers]
    assert windows == [attention.window for attention in config.attentions]
    expected = AttentionShape(num_heads=8, num_kv_heads=4, head_dim=8, scale=8**-0.5, sliding_window=None)
    assert model.attention_layers[0].shape == expected
