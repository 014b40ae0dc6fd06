"""Masks from grammars on the way into the samplers.

Oracle for tokens: ``Sampler`` without masks, on whole logits with -inf written by this test.  Oracle for
log-probabilities: ``Sampler`` on the raw logits.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from tests.simulated_ranks import run_ranks
from tests.unit.sampling.sampler_cases import CPU, ids, mixed_samplings
from tp_engine.distributed.collectives import Communicator, SingleRank
from tp_engine.layers.embedding import VocabSlice
from tp_engine.model_config import padded_vocab_size
from tp_engine.plan import NO_IDS, IntArray, RowSampling
from tp_engine.sampling.device_sampler import SamplerVariant
from tp_engine.sampling.sampler import Sampler
from tp_engine.sampling.state import SamplingState

VOCAB = 1003
KINDS = [
    *mixed_samplings(12),
    RowSampling(temperature=1.0, top_p=0.9, seed=1, logprobs=2),
    RowSampling(temperature=0.8, min_p=0.2, seed=3, repetition_penalty=1.5),
    RowSampling(temperature=1.0, top_k=700, top_p=0.99, seed=5),
    RowSampling(logprobs=4),
]


def packed(allowed: np.ndarray) -> IntArray:
    """Flags (m, vocab) as masks (m, words)."""
    words = -(-allowed.shape[1] // 32)
    padded = np.zeros((len(allowed), words * 32), dtype=np.uint8)
    padded[:, : allowed.shape[1]] = allowed
    return np.packbits(padded, axis=1, bitorder="little").view(np.int32)


def filled(state: SamplingState, kinds: Sequence[RowSampling]) -> SamplingState:
    for row, kind in enumerate(kinds):
        state.admit(row, kind, ids(0, 1), 2)
    return state


def case(seed: int, share: float) -> tuple[torch.Tensor, IntArray, np.ndarray]:
    """Logits of all ``KINDS``, the masked rows, and the tokens that they allow: at least one each."""
    rng = np.random.default_rng(seed)
    logits = torch.from_numpy(rng.normal(size=(len(KINDS), VOCAB)).astype(np.float32) * 3)
    rows = np.sort(rng.choice(len(KINDS), size=len(KINDS) * 2 // 3, replace=False)).astype(np.int32)
    allowed = rng.random((len(rows), VOCAB)) < share
    allowed[np.arange(len(rows)), rng.integers(0, VOCAB, len(rows))] = True
    for place, row in enumerate(rows.tolist()):  # no mask may contradict a row's own list
        if len(KINDS[row].allowed_token_ids):
            allowed[place, KINDS[row].allowed_token_ids] = True
    return logits, rows, allowed


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("share", [0.0, 0.002, 0.5, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_under_masks(world_size: int, share: float, dtype: torch.dtype) -> None:
    """Oracle: see above.  Every kind of row, masked or not, in one batch."""
    logits, rows, allowed = case(int(share * 1000), share)
    logits = logits.to(dtype)
    everyone, positions = np.arange(len(KINDS), dtype=np.int32), np.full(len(KINDS), 4, dtype=np.int32)
    written = logits.clone()
    written[torch.from_numpy(rows.astype(np.int64))] = logits[rows].masked_fill(torch.from_numpy(~allowed), -torch.inf)
    plain = filled(SamplingState(max_num_seqs=len(KINDS), vocab_size=VOCAB, device=CPU), KINDS)
    expected, _ = Sampler(plain, SingleRank()).sample(written, everyone, positions)
    padded = torch.nn.functional.pad(logits, (0, padded_vocab_size(VOCAB, world_size) - VOCAB))

    def body(communicator: Communicator) -> list[list[int]]:
        info = communicator.info
        own = VocabSlice.of_rank(VOCAB, info)
        state = SamplingState(max_num_seqs=len(KINDS), vocab_size=VOCAB, device=CPU, info=info)
        filled(state, KINDS).masks.set(rows, packed(allowed))
        sampler = Sampler(state, communicator)
        part = padded[:, info.rank * own.width :][:, : own.width].clone()
        tokens, scores = sampler.sample(part, everyone, positions)
        if scores is not None:
            chosen = torch.log_softmax(logits.float(), -1).gather(1, tokens[:, None].long())[:, 0]
            asked = [row for row, kind in enumerate(KINDS) if kind.logprobs >= 0]
            torch.testing.assert_close(scores.logprobs[asked, 0], chosen[asked])
        return tokens.tolist()

    for found in run_ranks(world_size, body):
        assert found == expected.tolist()
    for place, row in enumerate(rows.tolist()):
        assert allowed[place, int(expected[row])]


def test_a_mask_holds_for_one_step() -> None:
    """Oracle: neither the row's next step, nor its next occupant, nor another row sees the mask."""
    state = filled(SamplingState(max_num_seqs=3, vocab_size=70, device=CPU), [RowSampling()] * 3)
    sampler, logits = Sampler(state, SingleRank()), torch.arange(70.0).repeat(3, 1)
    rows, positions = ids(0, 1, 2), ids(4, 4, 4)
    allowed = np.zeros((1, 70), dtype=np.bool_)
    allowed[0, [3, 64]] = True
    state.masks.set(ids(1), packed(allowed))
    assert sampler.sample(logits.clone(), rows, positions)[0].tolist() == [69, 64, 69]
    assert sampler.sample(logits.clone()[:1], ids(2), ids(4))[0].tolist() == [69]
    state.masks.set(ids(2), packed(~allowed))
    assert sampler.sample(logits.clone(), rows, positions)[0].tolist() == [69, 69, 69]
    state.masks.set(NO_IDS, NO_IDS.reshape(0, 0))
    state.release(ids(1))
    state.admit(1, RowSampling(temperature=0.0), ids(0, 1), 2)
    assert sampler.sample(logits.clone(), rows, positions)[0].tolist() == [69, 69, 69]


def test_masked_steps_are_not_recorded() -> None:
    """Oracle: no kind of recording fits a step with a masked row; the next step has one again."""
    state = filled(SamplingState(max_num_seqs=2, vocab_size=40, device=CPU, has_tables=True), [RowSampling()] * 2)
    sampler, both, positions = Sampler(state, SingleRank()), ids(0, 1), lambda: ids(4, 4)
    assert sampler.device is not None
    state.masks.set(ids(1), packed(np.arange(40)[None] < 5))
    assert sampler.recorded_kind(both, positions) is None
    assert sampler.recorded_kind(ids(0), lambda: ids(4)) == SamplerVariant()
    state.masks.set(NO_IDS, NO_IDS.reshape(0, 0))
    assert sampler.recorded_kind(both, positions) == SamplerVariant()


def test_logits_stay_raw_where_somebody_wants_log_probabilities() -> None:
    """Oracle: the tensor itself; without log-probabilities no copy is made."""
    for kind, is_copied in ((RowSampling(logprobs=1), True), (RowSampling(), False)):
        state = filled(SamplingState(max_num_seqs=1, vocab_size=40, device=CPU), [kind])
        state.masks.set(ids(0), packed(np.arange(40)[None] < 5))
        logits = torch.zeros(1, 40)
        Sampler(state, SingleRank()).sample(logits, ids(0), ids(4))
        assert torch.isfinite(logits).all() == is_copied


def test_rows_of_an_epoch_are_judged_once() -> None:
    """Oracle: row 0 is greedy, row 1 draws; rows of the known epoch are not read again until a row enters."""
    state = SamplingState(max_num_seqs=2, vocab_size=40, device=CPU)
    filled(state, [RowSampling(temperature=0.0), RowSampling(temperature=1.0)])
    sampler, position = Sampler(state, SingleRank()), lambda: ids(4)
    assert sampler.recorded_kind(ids(0), position, 5) == sampler.recorded_kind(ids(1), position, 5) == SamplerVariant()
    assert sampler.recorded_kind(ids(1), position, 6) is None and sampler.recorded_kind(ids(0), position, 6) is None
    assert (
        sampler.recorded_kind(ids(0), position) == SamplerVariant() and sampler.recorded_kind(ids(1), position) is None
    )
    assert sampler.recorded_kind(ids(0), position, 7) == SamplerVariant()
    state.release(ids(0))
    state.admit(0, RowSampling(temperature=1.0), ids(0, 1), 2)
    assert sampler.recorded_kind(ids(0), position, 7) is None
