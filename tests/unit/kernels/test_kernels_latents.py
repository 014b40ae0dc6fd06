"""The sizes and specialisations of latent attention's Triton kernels."""

from __future__ import annotations

import pytest

from tests.unit.kernels.kernel_harness import SHARED_MEMORY, compiled_for, needs_triton, quiet, spilled_bytes
from tp_engine.kernels.candidates import Shape

UNITS = {80: "mma.sync", 90: "wgmma", 100: "tcgen05", 120: "mma.sync"}


@needs_triton
@quiet
def test_no_size_of_a_batch_compiles_a_kernel_anew() -> None:
    """Oracle: Triton's own cache: three steps cover splits and chunks, and no later step adds to it."""
    from tests.unit.kernels.kernel_cases_latents import launch_model

    with compiled_for(90) as kernels:
        launch_model(3, 2, 60)
        launch_model(3, 2000, 2000)
        known = {id(kernel) for kernel in kernels}
        for num_decodes, num_tokens, num_chunks in ((1, 1, 0), (16, 17, 1), (0, 5, 1), (33, 99, 16), (0, 4000, 300)):
            launch_model(3, num_decodes, num_tokens, num_chunks)
        added = [kernel.name for kernel in kernels if id(kernel) not in known]
    assert not added, f"compiled for a size: {sorted(set(added))}"


@needs_triton
@quiet
@pytest.mark.slow
def test_no_number_of_rows_compiles_sparse_attention_anew() -> None:
    """Oracle: Triton's own cache: a step of decodes compiles all, also for the tokens of prompts and for other lengths
    of block tables; rows that choose at several times begin at any address."""
    from tests.unit.kernels.kernel_cases_index_keys import launch_model

    with compiled_for(90) as kernels:
        launch_model(0, 2)
        known = {id(kernel) for kernel in kernels}
        for num_rows, width in ((1, 100), (3, 33), (64, 10_240), (7000, 1)):
            launch_model(0, num_rows, width)
        added = [kernel.name for kernel in kernels if id(kernel) not in known]
    assert not added, f"compiled for a size: {sorted(set(added))}"


@needs_triton
def test_numbers_of_splits() -> None:
    """Oracle: by hand: powers of two; one program per multiprocessor, four at most; 128 heads are four programs, and 8
    heads four queries to a program."""
    from tp_engine.kernels.attention.paged_mla_triton import latent_sizes

    found = [latent_sizes(count, heads, 2, 132) for count, heads in ((1, 16), (1, 128), (8, 16), (132, 128))]
    assert [(one.usual_splits, one.num_splits) for one in found] == [(64, 64), (32, 64), (16, 64), (1, 1)]
    chunks = latent_sizes(2, 8, 2, 132, num_queries=64)  # 18 programs
    assert (chunks.usual_splits, chunks.num_splits) == (4, 16)


@needs_triton
@quiet
@pytest.mark.parametrize(("capability", "unit"), [(90, "wgmma"), (100, "tcgen05")])
def test_wide_chunks_meet_the_large_units(capability: int, unit: str) -> None:
    """Oracle: the compiled code: wide chunks multiply by groups of warps, spill nothing and fit; usual ones do not."""
    from tests.unit.kernels.kernel_cases_candidates import launch_latents

    with compiled_for(capability) as kernels:
        assert launch_latents("latent_prompt_attention", ["own", "wide"]) == ["own", "wide"]
    own, wide = kernels
    assert unit in wide.asm["ptx"] and unit not in own.asm["ptx"]
    assert wide.metadata.shared <= SHARED_MEMORY[capability]
    assert [spilled_bytes(kernel) for kernel in kernels] == [0, 0]


@needs_triton
@quiet
@pytest.mark.parametrize(
    ("capability", "unit", "most"),
    [
        (90, "wgmma", 1),
        (100, "tcgen05", 1),
        *(pytest.param(one, unit, 5, marks=pytest.mark.slow) for one, unit in UNITS.items()),
    ],
)
def test_long_chunks_meet_the_large_units(capability: int, unit: str, most: int) -> None:
    """Oracle: the compiled code of DeepSeek-V3's widths, 192 and 128: each candidate that fits multiplies by the units
    of its GPU and needs as much shared memory as its rule says, or less; none spills where units are for groups of
    warps, one does not elsewhere; another length compiles nothing anew."""
    from tests.unit.kernels.kernel_cases_latents import MODELS, launch_expanded
    from tp_engine.attention.expanded import tile_bytes

    _, _, rope, nope, dtype, _ = MODELS[1]
    shape: Shape = {"nope": nope, "rope": rope, "value": 128, "type": str(dtype).removeprefix("torch.")}
    with compiled_for(capability) as kernels:
        fitting = launch_expanded(capability, 1, most)
        known = {id(kernel) for kernel in kernels}
        launch_expanded(capability, 1, 1, num_tokens=1001)
    assert len(known) == len(fitting) and {id(kernel) for kernel in kernels} == known
    spilled = [spilled_bytes(kernel) for kernel in kernels]
    assert max(spilled) == 0 if capability in (90, 100) else min(spilled) == 0, spilled
    for kernel, tiles in zip(kernels, fitting, strict=False):
        assert unit in kernel.asm["ptx"], tiles
        assert kernel.metadata.shared <= tile_bytes(tiles, shape) <= SHARED_MEMORY[capability], tiles


@needs_triton
@quiet
@pytest.mark.slow
@pytest.mark.parametrize("chosen", [0, 2048])
@pytest.mark.parametrize("capability", [90, 100, 120])
def test_latent_decodes_keep_all_in_registers(capability: int, chosen: int) -> None:
    """Oracle: the compiled code of every candidate for DeepSeek-V3 on one of 8 ranks: nothing is spilled, but for two
    registers where keys are chosen, and what a program needs of shared memory fits."""
    from tests.unit.kernels.kernel_cases_candidates import launch_latents
    from tp_engine.kernels.attention.latent_candidates import LATENT_DECODE

    names = [one.name for one in LATENT_DECODE.candidates]
    with compiled_for(capability) as kernels:
        assert launch_latents("latent_decode_attention", names, chosen=chosen) == names
    compiled = {id(kernel): kernel for kernel in kernels}.values()  # numbers of splits are no code of their own
    assert max(spilled_bytes(kernel) for kernel in compiled) <= (8 if chosen else 0)
    assert max(kernel.metadata.shared for kernel in compiled) <= SHARED_MEMORY[capability]
