"""The noise of sampling kernels, and the rows that they sample."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.unit.kernels.kernel_harness import needs_triton
from tests.unit.sampling.sampler_cases import ids
from tp_engine.distributed.collectives import SingleRank
from tp_engine.job.topology import RankInfo
from tp_engine.plan import RowSampling
from tp_engine.sampling import noise
from tp_engine.sampling.device_sampler import SHARE_BYTES, DeviceSampler, Filters, SamplerVariant
from tp_engine.sampling.state import SamplingState


def test_noise_keys_on_the_device() -> None:
    """Oracle: ``noise_keys``, in unsigned 64-bit numpy."""
    generator = np.random.default_rng(0)
    seeds = generator.integers(0, 2**64, 1000, dtype=np.uint64)
    positions = generator.integers(0, 2**31, 1000).astype(np.int32)
    found = noise.device_noise_keys(torch.from_numpy(seeds.view(np.int64)), torch.from_numpy(positions))
    assert np.array_equal(found.numpy(), noise.noise_keys(seeds, positions))


class ValuelessRanks(SingleRank):
    """Four ranks whose collectives give tensors without values; notes the bytes of each part."""

    def __init__(self) -> None:
        self.info = RankInfo(world_size=4, local_world_size=4)
        self.gathered: list[int] = []

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        self.gathered.append(tensor.nbytes)
        return torch.empty(4 * tensor.numel(), dtype=tensor.dtype, device="meta")


Valueless: TypeAlias = tuple[DeviceSampler, ValuelessRanks, tuple[torch.Tensor, ...]]


@pytest.fixture
def valueless(monkeypatch: pytest.MonkeyPatch) -> Valueless:
    """A sampler of four ranks without values, and logits, rows and positions of five rows."""
    monkeypatch.setattr("tp_engine.kernels.dependent_launch_triton.can_launch_early", lambda device: True)
    ranks, device = ValuelessRanks(), torch.device("meta")
    state = SamplingState(max_num_seqs=8, vocab_size=5000, device=device, info=ranks.info, has_tables=True)
    logits, rows = torch.empty(5, state.vocab.width, device=device), torch.empty(5, dtype=torch.int32, device=device)
    return DeviceSampler(state, ranks), ranks, (logits, rows, torch.empty(5, dtype=torch.int64, device=device))


@needs_triton
def test_recorded_kinds_have_fixed_launches(monkeypatch: pytest.MonkeyPatch, valueless: Valueless) -> None:
    """Oracle: the meta device, whose tensors have no values, so that a host's look at one raises; and the sizes of the
    exchanges that ``graph_plan`` counts on."""
    from triton.runtime.jit import JITFunction

    launched: set[str] = set()
    monkeypatch.setattr(JITFunction, "run", lambda self, *_, **__: launched.add(self.fn.__name__))
    sampler, ranks, inputs = valueless
    for kind in sampler.kinds:
        tokens = sampler.sample(kind, *inputs)
        assert tokens.shape == (5,) and tokens.dtype == torch.int32
    assert set(ranks.gathered) == {5 * size for size in SHARE_BYTES}
    assert {"front_of_slice_kernel", "weigh_front_kernel", "choose_kernel", "top_keys_kernel"} <= launched


class Launches(TorchDispatchMode):
    """Counts operations that launch a kernel: all but views and empty tensors."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_view = any(argument.alias_info and not argument.alias_info.is_write for argument in func._schema.arguments)
        self.count += not is_view and "empty" not in func.__name__
        return func(*args, **(kwargs or {}))


@needs_triton
@pytest.mark.parametrize(
    ("kind", "most"),
    [(SamplerVariant(), 8), (SamplerVariant(Filters.NUCLEUS), 17), (SamplerVariant(Filters.RANKED), 12)],
)
def test_sampling_on_ranks_takes_few_launches(
    monkeypatch: pytest.MonkeyPatch, valueless: Valueless, kind: SamplerVariant, most: int
) -> None:
    """Oracle: the nodes of a recorded step, counted on the meta device; the exchange is one. By PyTorch alone top_k
    took 110."""
    from triton.runtime.jit import JITFunction

    counted = Launches()  # type: ignore[no-untyped-call]

    def launch(*_: object, **__: object) -> None:
        counted.count += 1

    monkeypatch.setattr(JITFunction, "run", launch)
    sampler, ranks, inputs = valueless
    with counted:
        sampler.sample(kind, *inputs)
    assert counted.count + len(ranks.gathered) <= most


NUCLEUS, TOP_K = RowSampling(temperature=1.0, top_p=0.9), RowSampling(temperature=1.0, top_k=9)
PENALISED = RowSampling(presence_penalty=1.0)


@needs_triton
@pytest.mark.parametrize(
    ("samplings", "alone", "with_others"),
    [
        ([RowSampling(), RowSampling(temperature=1.0)], SamplerVariant(), SamplerVariant()),
        ([RowSampling(), PENALISED], SamplerVariant(penalised=True), SamplerVariant(penalised=True)),
        ([RowSampling(temperature=1.0, min_p=0.1)], SamplerVariant(min_p=True), SamplerVariant(min_p=True)),
        ([RowSampling(min_p=0.1, top_k=5, top_p=0.5)], SamplerVariant(), SamplerVariant()),
        (
            [RowSampling(temperature=1.0, top_k=64, min_p=0.1)],
            SamplerVariant(Filters.RANKED),
            SamplerVariant(Filters.RANKED),
        ),
        (
            [RowSampling(temperature=1.0, top_k=65), NUCLEUS],
            SamplerVariant(Filters.RANKED),
            SamplerVariant(Filters.GATHERED),
        ),
        ([NUCLEUS, PENALISED], *[SamplerVariant(Filters.NUCLEUS, penalised=True)] * 2),
        ([NUCLEUS, TOP_K], SamplerVariant(Filters.RANKED), SamplerVariant(Filters.BOTH)),
        ([RowSampling(temperature=1.0, top_k=9, presence_penalty=1.0)], None, None),
        ([RowSampling(logprobs=0)], None, None),
        ([RowSampling(allowed_token_ids=ids(4))], None, None),
        ([RowSampling(min_tokens=5, stop_token_ids=ids(4))], None, None),
    ],
)
def test_kinds_of_steps(
    samplings: list[RowSampling], alone: SamplerVariant | None, with_others: SamplerVariant | None
) -> None:
    """Oracle: the table in ``device_sampler``, for one rank and for two."""
    for world_size, expected in ((1, alone), (2, with_others)):
        info = RankInfo(world_size=world_size, local_world_size=world_size)
        state = SamplingState(max_num_seqs=4, vocab_size=100, device=torch.device("cpu"), info=info, has_tables=True)
        communicator = SingleRank()
        communicator.info = info
        for row, sampling in enumerate(samplings):
            state.admit(row, sampling, ids(1, 2, 3), 3)
        rows = np.arange(len(samplings), dtype=np.int32)
        sampler = DeviceSampler(state, communicator)
        assert sampler.kind_of(rows, np.full(len(samplings), 4, np.int32)) == expected
        state.release(rows)
        assert sampler.kind_of(rows, np.full(len(samplings), 4, np.int32)) == SamplerVariant()
