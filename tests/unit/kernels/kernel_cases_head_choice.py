"""The LM head that chooses tokens: interpreted (``main``), on CUDA (``CASES``), and its launches in engines
(``launch_all``).

Where the oracle is PyTorch, hidden states and weights are small multiples of powers of two, so that sums are exact in
float32 and logits have ties.  The noise of the interpreter may differ from the twin's in the last bits, which changes
no token here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F

from tests.simulated_ranks import run_ranks
from tests.unit.kernels.kernel_cases_decode_inputs import make_tables
from tests.unit.kernels.kernel_cases_sampling import ONE_AT_A_TIME, make_state
from tests.unit.kernels.kernel_harness import AGREEMENT
from tp_engine.kernels.elementwise_triton import cap_logits_triton
from tp_engine.kernels.linear import head_choice_triton as head_choice
from tp_engine.kernels.linear.few_rows_linear_triton import few_rows_linear_triton
from tp_engine.kernels.sampling.best_triton import BestTokens, best_tokens_triton
from tp_engine.kernels.sampling.tables import SamplingTables
from tp_engine.kernels.steps.decode_inputs import DecodeInputs, RowTables, advance_decodes, prepare_decodes
from tp_engine.layers.embedding import VocabSlice
from tp_engine.layers.formats.head_choice import HeadChoice
from tp_engine.model_config import padded_vocab_size
from tp_engine.plan import RowSampling
from tp_engine.ranks.collectives import Communicator
from tp_engine.sampling.device_sampler import DeviceSampler
from tp_engine.sampling.noise import device_noise_keys, gumbel_noise
from tp_engine.sampling.ranking import best_keys, key_ids

FLOAT32, BFLOAT16, FLOAT16 = torch.float32, torch.bfloat16, torch.float16
GREEDY = [RowSampling()]
DRAWN = [RowSampling(temperature=1.0, seed=1), RowSampling(temperature=0.6, seed=-(2**63))]
WAYS = {"greedy": GREEDY, "temperature": DRAWN, "mixed": [*GREEDY, *DRAWN]}
HIDDEN, VOCAB = 96, 203


def exact_values(shape: tuple[int, ...], dtype: torch.dtype, device: str, seed: int) -> torch.Tensor:
    """Multiples of 1/8 from -1 to 1."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randint(-8, 9, shape, generator=generator) / 8).to(device, dtype)


def step(num_rows: int, samplings: Sequence[RowSampling], device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of a state of ``make_state``, repeated, the third of them padding, and positions of their last tokens."""
    rows = torch.arange(num_rows, dtype=torch.int32, device=device) % len(samplings) * 2 + 1
    rows[2:3] = -1
    return rows, torch.arange(20, 20 + num_rows, device=device)


def tables_of(samplings: Sequence[RowSampling], device: str) -> SamplingTables:
    tables = make_state(samplings, VOCAB, device, has_tables=True).tables
    assert tables is not None
    return tables


def twin_scores(
    logits: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, tables: SamplingTables, first_id: int
) -> torch.Tensor:
    """In plain PyTorch, float32: greedy rows as they are, the others over their temperature with noise."""
    known = rows.clamp(min=0).long()
    temperature = torch.where(rows >= 0, tables.floats[known, 0], 0.0)[:, None]
    token_ids = torch.arange(first_id, first_id + logits.shape[1], dtype=torch.int32, device=logits.device)
    noise = gumbel_noise(token_ids, device_noise_keys(tables.seeds[known], positions + 1))
    wide = logits.float()
    return torch.where(temperature > 0, noise + wide / temperature, wide)


def check_twin(device: str, dtype: torch.dtype, num_rows: int, way: str, change: str = "", scale: float = 1.0) -> None:
    """Oracle: product, rounding, noise and ``best_keys``; the vocabulary ends within a tile and before the weight."""
    first_id, room = 1024, 208
    tables = tables_of(WAYS[way], device)
    rows, positions = step(num_rows, WAYS[way], device)
    hidden = exact_values((num_rows, HIDDEN + 32), dtype, device, num_rows)[:, :HIDDEN]
    weight = exact_values((room, HIDDEN), dtype, device, 7)
    weight[VOCAB:] = 8.0  # would win
    if change == "ties":
        weight[64:] = weight[:64].repeat(3, 1)[: room - 64]
    elif change == "nan":
        weight[[150, 70]] = torch.nan
    logits = F.linear(hidden.float(), weight[:VOCAB].float()).to(dtype) * scale
    expected = best_keys(twin_scores(logits, rows, positions, tables, first_id), first_id)
    found = head_choice.head_choice_triton(
        hidden, weight, rows, positions, tables,
        first_id=first_id, num_ids=VOCAB, scale=scale, sizes=head_choice.head_sizes(weight, num_rows),
    )  # fmt: skip
    assert found.token_ids.dtype == torch.int32 and torch.equal(found.token_ids, key_ids(expected))
    assert torch.equal(found.token_ids, key_ids(found.keys))
    is_greedy = (rows < 0) | (tables.floats[rows.clamp(min=0).long(), 0] == 0)
    assert torch.equal(found.keys[is_greedy], expected[is_greedy])
    if change == "nan":
        assert (found.token_ids == first_id + 70).all()
    elif change == "ties" and way == "greedy":
        assert (found.token_ids < first_id + 64).all()


def check_logits(device: str, dtype: torch.dtype, num_rows: int, scale: float, softcap: float | None) -> None:
    """Oracle: the logits that the same product writes, and the kernel that reads them; keys are equal bit by bit."""
    first_id, num_ids, samplings = 0, 120, WAYS["mixed"]
    tables = tables_of(samplings, device)
    rows, positions = step(num_rows, samplings, device)
    generator = torch.Generator().manual_seed(num_rows)
    hidden, weight = (torch.randn(count, HIDDEN, generator=generator).to(device, dtype) for count in (num_rows, 128))
    sizes = head_choice.head_sizes(weight, num_rows)
    logits = few_rows_linear_triton(hidden, weight, None, sizes=sizes, arrivals=tables.arrivals)[:, :num_ids]
    cap_logits_triton(logits, scale, softcap)
    expected = best_tokens_triton(logits, rows, positions, tables, first_id=first_id)
    found = head_choice.head_choice_triton(
        hidden, weight, rows, positions, tables,
        first_id=first_id, num_ids=num_ids, scale=scale, softcap=softcap, sizes=sizes,
    )  # fmt: skip
    assert torch.equal(found.keys, expected.keys) and torch.equal(found.token_ids, expected.token_ids)


def check_many_tiles(device: str) -> None:
    """More tiles than a program of the join reads at once.  Oracle: the one row of the weight that is not zero."""
    weight = torch.zeros((600, 32), dtype=BFLOAT16, device=device)
    hidden, rows = torch.ones((2, 32), dtype=BFLOAT16, device=device), torch.full((2,), -1, device=device)
    options: dict[str, Any] = {"first_id": 0, "num_ids": 600, "sizes": head_choice.head_sizes(weight, 2)}
    tables = SamplingTables.empty(1, torch.device(device))
    with patch.object(head_choice, "_JOINED_TILES", 4):
        for winner in (0, 255, 256, 599):
            weight.zero_()[winner, 0] = 1.0
            found = head_choice.head_choice_triton(hidden, weight, rows.int(), rows, tables, **options)
            assert found.token_ids.tolist() == [winner, winner]


def check_sampler(device: str, world_size: int, vocab_size: int = VOCAB) -> None:
    """Plain steps of a sampler, by the head and by logits; a single rank also ends them, and padding changes nothing.

    Oracle: the same sampler on logits, then the twin of ``advance_decodes``.
    """
    samplings = WAYS["mixed"]
    width = padded_vocab_size(vocab_size, world_size) // world_size
    hidden = exact_values((4, HIDDEN), BFLOAT16, device, 1)
    weight = exact_values((width * world_size, HIDDEN), BFLOAT16, device, 2)

    def body(communicator: Communicator) -> None:
        state = make_state(samplings, vocab_size, device, has_tables=True, info=communicator.info)
        sampler, own = DeviceSampler(state, communicator), VocabSlice.of_rank(vocab_size, communicator.info)
        part = weight[communicator.info.rank * width :][:width]
        place: dict[str, Any] = {"first_id": own.first, "num_ids": own.num_ids, "scale": 1.0, "softcap": None}
        head = HeadChoice(part, **place, most_rows=256)
        tables, expected_tables = (make_tables(2 * len(samplings) + 1, 40, 16, 1, device) for _ in range(2))
        inputs = DecodeInputs.allocate(4, tables)
        inputs.rows.copy_(torch.tensor([5, -1, 1, 3], dtype=torch.int32))
        prepare_decodes(tables, inputs)
        logits = (hidden.float() @ part.T.float()).to(BFLOAT16)[:, : own.width]
        advanced = tables if sampler.advancing else None
        with_lock = one_at_a_time(head), one_at_a_time(sampler._best_tokens)
        sampler._best_tokens = with_lock[1]
        found = sampler.choose(with_lock[0], hidden, inputs.rows, inputs.positions, advanced=advanced)
        kind = sampler.kinds[0]
        expected = sampler.sample(kind, logits, inputs.rows, inputs.positions)
        assert found.dtype == torch.int32 and torch.equal(found, expected), (found, expected)
        if advanced is not None:
            advance_decodes(expected_tables, inputs, expected)
            assert torch.equal(tables.token_ids, expected_tables.token_ids)
            assert torch.equal(tables.num_computed, expected_tables.num_computed)

    run_ranks(world_size, body)


def one_at_a_time(launch: Callable[..., BestTokens]) -> Any:
    """``launch`` with a lock: the interpreter supports one thread at a time."""

    def locked(*args: Any, **kwargs: Any) -> BestTokens:
        with ONE_AT_A_TIME:
            return launch(*args, **kwargs)

    return locked


def make_cases() -> dict[str, Callable[[str], None]]:
    """Name -> check on a device."""
    cases: dict[str, Callable[[str], None]] = {}
    for dtype, num_rows, way in product((FLOAT32, BFLOAT16, FLOAT16), (1, 2, 7, 33), WAYS):
        name = f"{num_rows} rows, {way}, {str(dtype)[6:]}"
        cases[name] = partial(check_twin, dtype=dtype, num_rows=num_rows, way=way)
    for change, way in product(("ties", "nan"), ("greedy", "mixed")):
        cases[f"{change}, {way}"] = partial(check_twin, dtype=BFLOAT16, num_rows=7, way=way, change=change)
    cases["scale"] = partial(check_twin, dtype=FLOAT16, num_rows=3, way="mixed", scale=0.25)
    for dtype, num_rows in product((BFLOAT16, FLOAT16), (3, 70)):
        for scale, softcap in ((1.0, None), (0.3, 5.0)):
            name = f"logits, {num_rows} rows, {softcap}, {str(dtype)[6:]}"
            cases[name] = partial(check_logits, dtype=dtype, num_rows=num_rows, scale=scale, softcap=softcap)
    cases["many tiles"] = check_many_tiles
    for world_size in (1, 2):
        cases[f"sampler, {world_size}"] = partial(check_sampler, world_size=world_size)
    cases["sampler, a rank without tokens"] = partial(check_sampler, world_size=2, vocab_size=16)
    return cases


CASES = make_cases()


def launch_all() -> None:
    """Qwen3-0.6B on one rank, which ends the step, at each padded number of rows, and on one of eight; a head with
    scale and cap; other types."""

    def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    tables = SamplingTables.empty(256, torch.device("meta"))
    ids, lengths, blocks = (empty(*shape, dtype=torch.int32) for shape in ((256, 4097), (256,), (1, 256, 256)))
    advanced = RowTables(token_ids=ids, num_computed=lengths, block_table=blocks, block_size=16)
    whole: dict[str, Any] = {"first_id": 0, "num_ids": 151_936, "advanced": advanced}
    part: dict[str, Any] = {"first_id": 18_992, "num_ids": 18_992}
    launches: list[tuple[int, int, torch.dtype, dict[str, Any]]] = [
        *((rows, 151_936, BFLOAT16, whole) for rows in (8, 16, 32, 64, 128, 256)),
        (64, 18_992, BFLOAT16, part),
        (256, 18_992, BFLOAT16, part | {"scale": 0.125, "softcap": 30.0}),
        (64, 18_992, FLOAT16, part),
        (64, 18_992, FLOAT32, part),
    ]
    for rows, room, dtype, options in launches:
        weight, hidden = empty(room, 1024, dtype=dtype), empty(rows, 1024, dtype=dtype)
        head_choice.head_choice_triton(
            hidden,
            weight,
            empty(rows, dtype=torch.int32),
            empty(rows, dtype=torch.int64),
            tables,
            sizes=head_choice.head_sizes(weight, rows),
            **options,
        )


def main() -> None:
    for name, case in CASES.items():
        try:
            case("cpu")
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error
    print(AGREEMENT)


if __name__ == "__main__":
    main()
