"""Recorded steps with prompts: which sizes exist, which step runs in which, and when none is recorded."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import torch

from tp_engine.attention.base import AttentionNeeds
from tp_engine.attention.registry import select_backend
from tp_engine.config import EngineConfig
from tp_engine.errors import ConfigError
from tp_engine.features.speculation.options import SpeculativeConfig
from tp_engine.kernels.ops import has_triton
from tp_engine.kernels.steps.decode_inputs import RowTables
from tp_engine.plan import StepPlan
from tp_engine.worker.batch.padded_batch import MAX_CHUNKS, PaddedBatch, StepSizes
from tp_engine.worker.graphs.graph_plan import graph_plan, prefill_sizes

SIZES = StepSizes(decodes=(0, 8, 32, 256), tokens=(32, 128, 1024))


def make_plan(num_decodes: int, *chunks: int) -> StepPlan:
    """A step of so many decodes, and of chunks of so many tokens."""
    rows = np.arange(num_decodes + len(chunks), dtype=np.int32)
    return StepPlan(
        step_id=1,
        decode_rows=rows[:num_decodes],
        prefill_rows=rows[num_decodes:],
        prefill_tokens=np.array(chunks, dtype=np.int32),
        prefill_samples=np.ones(len(chunks), dtype=np.bool_),
    )


@pytest.mark.parametrize(
    ("asked", "budget", "sizes"),
    [
        ("none", 8192, ()),
        ("auto", 8192, (32, 64, 128, 256, 512, 1024)),
        ("auto", 300, (32, 64, 128, 256, 300)),
        ("auto", 20, (20,)),
        ("auto", 16, ()),
        ("128, 17,128", 128, (17, 128)),
    ],
)
def test_sizes_of_prompts(asked: str, budget: int, sizes: tuple[int, ...]) -> None:
    """Oracle: by hand, from the docstring."""
    assert prefill_sizes(asked, budget) == sizes


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (
            "all",
            "cudagraph_prefill_capture_sizes is 'all'; it must be none, auto, or numbers of prompt tokens .* 32,64,128",
        ),
        ("16,64", r"contains 16; sizes go from 17 to max_num_batched_tokens, which is 256"),
        ("64,300", r"contains 300; sizes go from 17 to max_num_batched_tokens, which is 256: leave it out"),
    ],
)
def test_wrong_sizes_are_refused(asked: str, message: str) -> None:
    """Oracle: the error has the value, the rule and the remedy."""
    with pytest.raises(ConfigError, match=message):
        prefill_sizes(asked, 256)


@pytest.mark.parametrize(
    ("plan", "size"),
    [
        (make_plan(0, 1), (0, 32)),  # up to 128 tokens padding is free
        (make_plan(5, 3), (8, 32)),
        (make_plan(9, 32), (32, 32)),
        (make_plan(0, 64, 64), (0, 128)),
        (make_plan(0, 100, 500), (0, 1024)),
        (make_plan(33, 140), None),  # 256 + 1,024 tokens for 173
        (make_plan(0, 200), None),  # 1,024 for 200
        (make_plan(0, 1025), None),
        (make_plan(257, 900), None),
        (make_plan(256, 900), (256, 1024)),
        (make_plan(0, *[8] * MAX_CHUNKS), (0, 128)),
        (make_plan(0, *[7] * (MAX_CHUNKS + 1)), None),
        (make_plan(8), None),
    ],
)
def test_a_step_runs_in_the_smallest_recording_that_holds_it(plan: StepPlan, size: tuple[int, int] | None) -> None:
    """Oracle: by hand; a step is launched if padding more than doubles its tokens, or if it is too large."""
    found = SIZES.size_for(plan)
    assert (None if found is None else (found.decodes, found.tokens)) == size


def test_the_largest_size_is_recorded_first() -> None:
    """Oracle: the first size holds every other, because all share its memory."""
    sizes = SIZES.largest_first
    assert len(sizes) == 12 and (sizes[0].decodes, sizes[0].tokens) == (256, 1024)
    assert len(set(sizes)) == 12 and all(size.num_tokens <= sizes[0].num_tokens for size in sizes)


@pytest.mark.parametrize("num_decodes", [0, 8, 32])
def test_parts_of_the_upload_are_aligned(num_decodes: int) -> None:
    """Oracle: multiples of 16 bytes, so that Triton compiles a kernel once."""
    tables = RowTables(
        token_ids=torch.zeros((4, 9), dtype=torch.int32),
        num_computed=torch.zeros(4, dtype=torch.int32),
        block_table=torch.zeros((1, 4, 2), dtype=torch.int32),
        block_size=4,
    )
    requests = PaddedBatch(tables, StepSizes(decodes=(32,), tokens=(32,))).requests(num_decodes)
    names = ("rows", "wanted", "sampled_rows", "sampled_places", "query_start")
    assert all(getattr(requests, name).data_ptr() % 16 == 0 for name in names)
    assert len(requests.query_start) == num_decodes + MAX_CHUNKS + 1


class Stub:
    """Whatever the rules ask of a model, a communicator or a backend."""

    def __init__(self, **facts: Any) -> None:
        self.__dict__.update(facts)


@pytest.mark.skipif(not has_triton(), reason="triton is not installed")
@pytest.mark.parametrize(
    ("options", "can_capture", "states", "reason"),
    [
        ({"cudagraph_prefill_capture_sizes": "auto"}, True, [], None),
        ({}, True, [], ""),
        ({"cudagraph_prefill_capture_sizes": "none"}, False, [], ""),
        (
            {"cudagraph_prefill_capture_sizes": "auto"},
            False,
            [],
            "the attention backend test plans prompts on the host",
        ),
        ({"cudagraph_prefill_capture_sizes": "auto"}, True, ["a layer"], "some layers have recurrent states"),
    ],
)
def test_rules(
    options: dict[str, Any], can_capture: bool, states: list[str], reason: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """Oracle: the rules, by hand; the reason is in the log if graphs of prompts were asked for, and only then."""
    config = EngineConfig(model="unused", device="cuda", max_num_seqs=20, max_num_batched_tokens=128, **options)
    backend: Any = Stub(name="test", can_capture_decodes=True, can_capture_prompts=can_capture)
    communicator: Any = Stub(can_capture=True, why_not_capture=lambda *_: None)
    model: Any = Stub(why_not_capture=None, state_layers=states, hidden_size=64, dtype=torch.bfloat16, modules=list)
    with caplog.at_level(logging.WARNING, logger="tp_engine"):
        plan = graph_plan(config, backend, communicator, model)
    assert plan is not None and plan.sizes[-1] == 20
    expected = StepSizes(decodes=(0, 8, 32), tokens=(32, 64, 128))
    assert plan.prompts == (expected if reason is None else None)
    assert bool(caplog.messages) == bool(reason) and all(str(reason) in text for text in caplog.messages)


@pytest.mark.parametrize("prompts", ["none", "auto"])
def test_what_a_model_cannot_hold_is_not_recorded(prompts: str, caplog: pytest.LogCaptureFixture) -> None:
    """Oracle: no graph of decodes or of prompts, and the model's own reason in the log, once."""
    config = EngineConfig(model="unused", device="cuda", max_num_seqs=20, cudagraph_prefill_capture_sizes=prompts)
    backend: Any = Stub(name="test", can_capture_decodes=True, can_capture_prompts=True)
    communicator: Any = Stub(can_capture=True, why_not_capture=lambda *_: None)
    with caplog.at_level(logging.WARNING, logger="tp_engine"):
        assert graph_plan(config, backend, communicator, cast("Any", Stub(why_not_capture="it reads values"))) is None
    assert caplog.messages == ["no CUDA graphs, so decode steps are slower: it reads values"]


@pytest.mark.skipif(not has_triton(), reason="triton is not installed")
def test_drafts_that_the_host_orders_are_not_recorded(caplog: pytest.LogCaptureFixture) -> None:
    """Oracle: the rule; without draft tokens the same layers are recorded, and with a kernel both."""
    backend: Any = Stub(name="test", can_capture_decodes=True, can_capture_prompts=False)
    communicator: Any = Stub(can_capture=True, why_not_capture=lambda *_: None)
    drafts = SpeculativeConfig(method="ngram", num_speculative_tokens=2)
    for can_record, speculation in ((True, drafts), (False, None), (False, drafts)):
        layers = [Stub(can_record_drafts=True), Stub(can_record_drafts=can_record)]
        model: Any = Stub(
            state_layers=layers, hidden_size=64, dtype=torch.bfloat16, modules=lambda: (), why_not_capture=None
        )
        config = EngineConfig(model="unused", device="cuda", max_num_seqs=20, speculative_config=speculation)
        with caplog.at_level(logging.WARNING, logger="tp_engine"):
            plan = graph_plan(config, backend, communicator, model)
        is_obstacle = speculation is not None and not can_record
        assert (plan is None) == ("leave out speculative_config" in caplog.text) == is_obstacle


@pytest.mark.skipif(not has_triton(), reason="triton is not installed")
def test_only_backends_that_read_all_on_the_device_are_recorded() -> None:
    """Oracle: Triton's own backend; latent attention chooses on the host what it launches for a chunk."""
    needs = AttentionNeeds(
        device_type="cuda", dtype=torch.bfloat16, kv_cache_dtype=torch.bfloat16, block_size=16, head_dims=(64,)
    )
    latents = replace(needs, has_latents=True)
    found = [select_backend(*one) for one in (("triton", needs), ("triton", latents))]
    assert [backend.can_capture_prompts for backend in found] == [True, False]
    assert all(backend.can_capture_decodes for backend in found)
