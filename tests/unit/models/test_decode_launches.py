"""The launches of a decode step on a GPU, counted on tensors without memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.tiny_models import make_config
from tests.unit.kernels.kernel_harness import needs_triton, triton_ops_on_cpus
from tp_engine.attention.base import AttentionMetadata
from tp_engine.attention.mla import MLABackend
from tp_engine.attention.triton_backend import TritonBackend
from tp_engine.attention.triton_mla import TritonMLABackend
from tp_engine.distributed.collectives import SingleRank
from tp_engine.kernels.attention.latent_maps_candidates import ABSORB, PROJECT
from tp_engine.kernels.ops import Kind, implementation
from tp_engine.layers.attention import forward_context
from tp_engine.layers.context import LayerContext
from tp_engine.layers.quantization import dense
from tp_engine.model_config import load_model_config
from tp_engine.model_config.spec import AttentionSpec
from tp_engine.models.causal_lm import build_model

META = torch.device("meta")
# What launches nothing.
_VIEWS = {"view", "_unsafe_view", "slice", "select", "t", "transpose", "split", "split_with_sizes", "unbind"}
_VIEWS |= {"empty", "new_empty"}


class Launches(TorchDispatchMode):
    """Counts the library's kernels, and Triton's, of which ``early`` are set up before the one before has ended."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()
        self.early: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.split("::")[1]
        if name not in _VIEWS:
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))

    def triton(self, kernel: Any, *_args: Any, **options: Any) -> None:
        """Stand in for a launch."""
        self.counts[kernel.fn.__name__] += 1
        if options.get("launch_pdl"):
            self.early.add(kernel.fn.__name__)


def launches_of(folder: Path, num_layers: int, num_rows: int, family: str = "llama", **options: Any) -> Launches:
    """Of a model's step of decodes, without the head."""
    from triton.runtime.jit import JITFunction

    make_config(family, num_layers=num_layers, **options).save_pretrained(folder)
    spec, _ = load_model_config(str(folder))
    attention = spec.layers[0].attention
    has_latents = isinstance(attention, AttentionSpec) and attention.latent is not None
    found, backend = Launches(), MLABackend(TritonMLABackend()) if has_latents else TritonBackend()

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=META)

    with ExitStack() as stack:
        stack.enter_context(triton_ops_on_cpus())
        stack.enter_context(patch.object(dense, "runs_triton", lambda _: True))
        stack.enter_context(patch.object(JITFunction, "run", lambda *args, **options: found.triton(*args, **options)))
        early = "tp_engine.kernels.dependent_launch_triton.can_launch_early"
        stack.enter_context(patch(early, lambda _: True))
        model = build_model(
            spec, communicator=SingleRank(), dtype=torch.bfloat16, device=META, backends=[backend],
            max_model_len=64,
        )  # fmt: skip
        model.finish_loading()
        for layer in model.attention_layers:
            layer.bind_kv_cache(empty(2 - has_latents, 8, 16, layer.shape.num_kv_heads, layer.shape.head_dim))
        int32 = torch.int32
        step = AttentionMetadata(
            num_decodes=num_rows, slot_mapping=empty(num_rows, dtype=torch.int64),
            block_table=empty(num_rows, 4, dtype=int32), seq_lens=empty(num_rows, dtype=int32),
            query_start=empty(num_rows + 1, dtype=int32), host_query_lens=np.ones(num_rows, np.int32),
            host_seq_lens=np.full(num_rows, 40, np.int32),
        )  # fmt: skip
        backend.prepare(step)
        stack.enter_context(forward_context([step]))
        stack.enter_context(found)
        model(*(empty(num_rows, dtype=torch.int64) for _ in range(2)))
    return found


@contextmanager
def maps_by(kind: Kind) -> Iterator[None]:
    """Latent attention's maps are of this kind."""
    found = {name: implementation(name, kind) for name in (ABSORB, PROJECT)}
    with patch.object(LayerContext, "chosen", lambda _context, name, _shape: found[name]):
        yield


@needs_triton
@pytest.mark.parametrize(("num_rows", "expected"), [(1, 8), (8, 9)])
def test_launches_of_a_dense_layer(num_rows: int, expected: int, tmp_path: Path) -> None:
    """Oracle: by hand: two norms, four products, heads with the store, attention, and from two rows on the activation;
    all of our own kernels are set up early."""
    sizes: dict[str, Any] = {"hidden_size": 1024, "intermediate_size": 2048}
    one, two = (launches_of(tmp_path, count, num_rows, **sizes) for count in (1, 2))
    layer = two.counts - one.counts
    assert layer.total() == expected, layer
    own = {name for name in layer if name.endswith("_kernel")}
    assert own == two.early & own and layer.total() - sum(layer[name] for name in own) == (0 if num_rows == 1 else 4)


@needs_triton
@pytest.mark.parametrize("kind", ["twin", "triton"])
def test_launches_of_latent_attention(kind: Kind, tmp_path: Path) -> None:
    """Oracle: by hand, of a layer of DeepSeek-V3 without experts: three norms, rows with their store, attention,
    activation, five products, and two with the maps of its heads.  Beside the library's the rope part of queries is
    copied; our kernels of maps leave nothing to copy."""
    with maps_by(kind):
        one, two = (launches_of(tmp_path, count, 8, "deepseek-v3", first_k_dense_replace=4) for count in (1, 2))
    layer = two.counts - one.counts
    own = {name: layer.pop(name) for name in [*layer] if name.endswith("_kernel")}
    maps = {"latent_map_kernel": 2} if kind == "triton" else {}
    library = {"mm": 5} if kind == "triton" else {"mm": 5, "bmm": 2, "copy_": 1}
    assert own == {"norm_kernel": 3, "prepare_latents_kernel": 1, "paged_latent_kernel": 1, "gate_kernel": 1} | maps
    assert layer == library
    assert own.keys() <= two.early
