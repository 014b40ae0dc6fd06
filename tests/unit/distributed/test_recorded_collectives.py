"""Which collectives recorded steps contain, and whether they may be recorded."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.families import FAMILIES
from tests.simulated_ranks import NotingCommunicator, run_ranks
from tests.unit.attention.test_padded_batch import Stub
from tests.unit.distributed.test_symmetric_memory import FakeBuffer
from tests.unit.kernels.kernel_harness import needs_triton
from tests.unit.models.test_models import BACKENDS, CPU, LENGTHS, bind_caches, prefill_metadata, prompts
from tp_engine.config import EngineConfig
from tp_engine.distributed.collectives import Communicator
from tp_engine.distributed.reduce_plan import ReducePlan
from tp_engine.distributed.symmetric_memory import SymmetricCommunicator
from tp_engine.job.progress import RankProgress
from tp_engine.layers.attention import forward_context
from tp_engine.model_config import load_model_config
from tp_engine.model_config.kv_layout import MAX_GROUPS
from tp_engine.models.causal_lm import build_model
from tp_engine.sampling.device_sampler import SHARE_BYTES
from tp_engine.system.units import KIB
from tp_engine.worker.graphs.graph_plan import graph_plan, sizes_of

Checkpoint = Callable[..., Path]


@pytest.mark.parametrize(("family", "tp_invariant"), [*((name, False) for name in FAMILIES), ("qwen3", True)])
def test_sizes_are_those_of_a_step(family: str, tp_invariant: bool, checkpoint: Checkpoint) -> None:
    """Oracle: the collectives of a forward pass of two ranks, in bfloat16, noted."""
    config, _ = load_model_config(str(checkpoint(family)))

    def body(communicator: Communicator) -> None:
        noting = NotingCommunicator(communicator)
        model = build_model(
            config,
            communicator=noting,
            dtype=torch.bfloat16,
            device=CPU,
            backends=BACKENDS,
            max_model_len=128,
            tp_invariant=tp_invariant,
        )
        for parameter in model.parameters():
            parameter.zero_()
        model.finish_loading()
        bind_caches(model.attention_layers, torch.bfloat16)
        tokens = torch.tensor([token for prompt in prompts(config) for token in prompt])
        positions = torch.cat([torch.arange(length) for length in LENGTHS])
        with torch.inference_mode(), forward_context([prefill_metadata(LENGTHS)] * MAX_GROUPS):
            model(tokens, positions)
        sizes = sizes_of(model, [len(tokens)], tp_invariant=tp_invariant)
        shares = {len(tokens) * size for size in SHARE_BYTES}
        assert set(noting.reduced) == sizes.all_reduces
        assert set(noting.gathered) | shares == sizes.all_gathers

    run_ranks(2, body)


def small_model(world: Communicator) -> Any:
    """32 hidden float32 elements, so 128 bytes of each row are all-reduced."""
    sizes: dict[str, Any] = {"hidden_size": 32, "dtype": torch.float32, "modules": list, "state_layers": []}
    return Stub(**sizes, why_not_capture=None, info=world.info)


@needs_triton
@pytest.mark.parametrize(
    ("gather_bytes", "reduce_bytes", "options", "reason"),
    [
        (64 * KIB, 64 * KIB, {}, None),
        (64 * KIB, 1 * KIB, {}, "all-reduces of 2,560 bytes; it takes multiples of 16 up to 1,024"),
        (64 * KIB, 1 * KIB, {"cudagraph_capture_sizes": "1,2,8"}, None),
        (8 * KIB, 64 * KIB, {}, "all-gathers of 10,400 bytes; it takes multiples of 8 up to 8,192"),
        (0, 64 * KIB, {}, "all-gathers of 10,400 bytes"),
        (64 * KIB, 8 * KIB, {"cudagraph_prefill_capture_sizes": "64"}, "prompts: .*all-reduces of 12,288 bytes"),
    ],
)
def test_ranks_on_one_gpu_record_what_fits(
    gather_bytes: int,
    reduce_bytes: int,
    options: dict[str, Any],
    reason: str | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Oracle: by hand, for 20 rows of 128 bytes, which sample with 65 keys of 8 bytes at most."""
    config = EngineConfig(model="unused", device="cuda", max_num_seqs=20, max_num_batched_tokens=128, **options)
    backend: Any = Stub(name="test", can_capture_decodes=True, can_capture_prompts=True)
    plan = ReducePlan(one_shot_bytes=reduce_bytes, gather_bytes=gather_bytes)

    def body(staged: Communicator) -> bool:
        communicator = SymmetricCommunicator(staged, FakeBuffer(staged), plan, RankProgress())
        found = graph_plan(config, backend, communicator, small_model(staged))
        assert found is None or found.prompts is None or reason is None
        return found is not None

    with caplog.at_level(logging.WARNING, logger="tp_engine"):
        found = run_ranks(2, body)
    assert found == [reason is None or reason.startswith("prompts")] * 2
    assert bool(caplog.messages) == (reason is not None)
    for text in caplog.messages:
        assert reason is not None and re.search(reason, text), text


def test_ranks_without_shared_memory_record_nothing() -> None:
    """Oracle: the remedies are in the reason."""

    def body(staged: Communicator) -> str | None:
        return staged.why_not_capture(sizes_of(small_model(staged), (1, 2), tp_invariant=False))

    for reason in run_ranks(2, body):
        assert reason is not None and "NCCL" in reason and "all_reduce_backend=symm_mem" in reason
