"""The passes of a draft head, with inputs and outputs at fixed places, so that recordings can hold them.

::

    store       tokens of a recorded step          -> K/V               for each size of a step without drafts
    take_in     the same, with drafts              -> K/V, outputs      for each size of a step with drafts
    choose      outputs of m requests              -> draft tokens      for each m, and for every place of a run of
    go_on       draft tokens, fed-back outputs     -> K/V, outputs      drafts: all is changed in place

Where there is no recording, the same is launched.  Recordings are made and closed with those of the steps
(``StepRunner``).  On a CPU, tapes hold the choice of greedy drafts by a single rank; other choices are launched.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tp_engine.attention.base import AttentionMetadata, Backends
from tp_engine.cpu import best_tokens, native_library
from tp_engine.distributed.collectives import Communicator
from tp_engine.kernels.ops import op
from tp_engine.kernels.steps.draft_inputs import DraftInputs
from tp_engine.layers.attention import forward_context
from tp_engine.layers.upload import upload_all
from tp_engine.models.draft_head import DraftHead
from tp_engine.plan import PAD_SLOT, IntArray
from tp_engine.sampling import vocab_parallel
from tp_engine.sampling.noise import device_noise_keys, gumbel_noise
from tp_engine.sampling.state import SamplingState
from tp_engine.worker.batch.input_batch import InputBatch
from tp_engine.worker.graphs.recorder import Recorder, Recording


class HeadPasses:
    """The passes of ``head``, whose layers are in KV ``groups``, for the rows of ``batch``, which sample by
    ``sampling``.

    Drafts are recorded for up to ``most_rows`` requests, as more are given none.
    """

    needs_pass = False
    """Whether the first draft of a run needs a pass; otherwise ``take_in`` has made the outputs for it."""

    def __init__(
        self,
        head: DraftHead,
        backends: Backends,
        groups: Sequence[int],
        batch: InputBatch,
        sampling: SamplingState,
        communicator: Communicator,
        most_rows: int,
    ) -> None:
        self.head, self._batch, self._sampling, self._communicator = head, batch, sampling, communicator
        self._backends, self._groups, self._most_rows = backends, groups, most_rows
        self._tables = batch.row_tables()
        self._room = room = batch.max_decodes
        device = self._tables.block_table.device
        self.states, (self.out, self.fed) = head.new_states(room), head.new_outputs(room)
        columns, turns_by_place = self._tables.block_table.shape[2], self._tables.rope_deltas is not None
        self._block_tables = torch.zeros((len(groups), room, columns), dtype=torch.int32, device=device)
        self._inputs = DraftInputs(
            positions=torch.zeros(room, dtype=torch.int64, device=device),
            limits=torch.zeros(room, dtype=torch.int64, device=device),
            block_table=self._block_tables[0],
            slot_mapping=torch.full((room,), PAD_SLOT, dtype=torch.int64, device=device),
            seq_lens=torch.zeros(room, dtype=torch.int32, device=device),
            rope_deltas=torch.zeros(room, dtype=torch.int32, device=device) if turns_by_place else None,
            rope_positions=torch.zeros(room, dtype=torch.int64, device=device) if turns_by_place else None,
        )
        self._tokens = torch.zeros(room, dtype=torch.int32, device=device)
        self._temperature = torch.zeros((room, 1), dtype=torch.float32, device=device)
        self._seeds = torch.zeros(room, dtype=torch.int64, device=device)
        self._advance, self._copy_rows = op("advance_drafts", device.type), op("copy_rows", device.type)
        self._is_alone = communicator.info.world_size == 1
        self._library = native_library() if device.type == "cpu" and self._is_alone else None
        self._recorded: dict[tuple[object, ...], Recording] = {}  # by the pass and its arguments
        self._sizes: set[int] = set()

    def record(self, size: int, recorder: Recorder) -> None:
        """Record what follows recorded steps of ``size`` decodes; a collective."""
        self._sizes.add(size)
        if not self.needs_pass:
            self._recorded[self._store, size] = recorder.record(partial(self._store, size))
        if size > self._most_rows:
            return
        if not self.needs_pass:
            self._recorded[self._take_in, size] = recorder.record(partial(self._take_in, size))
        self._recorded[self._go_on, size] = recorder.record(partial(self._go_on, size), partial(self._keep, size))
        on_tapes = () if self._library is None or self.head.has_map else (False,)
        for is_noisy in (False, True) if self.out.device.type == "cuda" else on_tapes:
            self._recorded[self._choose, size, is_noisy] = recorder.record(partial(self._choose, size, is_noisy))

    def forget(self) -> None:
        """Destroy the recordings."""
        self._recorded.clear()
        self._sizes.clear()

    def take_in(self, sampled: torch.Tensor, *, drafts: bool) -> None:
        """Give the head the recorded step that has just ended with ``sampled`` (n,), by way of ``states``; if it
        ``drafts``, its outputs are in ``out`` and ``fed``, else it stores K/V alone."""
        count = len(sampled)
        self._tokens[:count].copy_(sampled)
        self._run(self._take_in if drafts else self._store, self._size_for(count))

    def draft(
        self,
        count: int,
        rows: IntArray,
        limits: npt.NDArray[np.int64],
        first: torch.Tensor,
        fed: torch.Tensor,
        position: torch.Tensor,
    ) -> torch.Tensor:
        """Return ``count`` drafts (m, count) int32 after ``rows`` (m,), which have ``limits`` (m,) slots; those for
        which there is no slot are arbitrary.

        ``first`` and ``fed`` (m, hidden) are what the head gave at ``position`` (m,); if a run ``needs_pass``, the last
        tokens (m,) and the model's states after which they came.  A collective.
        """
        num_rows, size, found = len(rows), self._size_for(len(rows)), list[torch.Tensor]()
        is_noisy = self._begin(rows, limits, size)
        self._enter(first, fed, position)
        for index in range(count):
            if index or self.needs_pass:
                self._run(self._go_on, size)
            found.append(self._run(self._choose, size, is_noisy)[:num_rows].clone())
        return torch.stack(found, 1)

    def _enter(self, first: torch.Tensor, fed: torch.Tensor, position: torch.Tensor) -> None:
        """Put what ``draft`` was given in its places."""
        for place, given in ((self.out, first), (self.fed, fed), (self._inputs.positions, position)):
            if given.data_ptr() != place.data_ptr():
                place[: len(given)].copy_(given)

    def _run(self, launch: Callable[..., torch.Tensor], *given: Any) -> torch.Tensor:
        """What ``launch`` makes of what it is ``given``, by its recording if there is one."""
        recorded = self._recorded.get((launch, *given))
        return launch(*given) if recorded is None else recorded.run()

    def _size_for(self, count: int) -> int:
        """The smallest size that is recorded for ``count`` requests, the others of which are padding; ``count`` itself
        if there is none."""
        return min((size for size in self._sizes if size >= count), default=count)

    def _begin(self, rows: IntArray, limits: npt.NDArray[np.int64], size: int) -> bool:
        """Enter the requests, padded to ``size``; return whether some have noise."""
        padded = np.zeros(size, dtype=np.int64)
        padded[: len(rows)] = limits
        temperature = np.zeros((size, 1), dtype=np.float32)
        temperature[: len(rows), 0] = self._sampling.temperature[rows]
        seeds = np.zeros(size, dtype=np.int64)
        seeds[: len(rows)] = self._sampling.seed[rows].view(np.int64)
        is_noisy = bool(temperature.any())
        given = (rows.astype(np.int64), padded, *((temperature, seeds) if is_noisy else ()))
        on_rows, on_limits, *noise = upload_all(given, self.out.device)
        self._inputs.limits[:size].copy_(on_limits)
        for group, table in zip(self._groups, self._block_tables, strict=True):
            torch.index_select(self._tables.block_table[group], 0, on_rows, out=table[: len(rows)])
        if self._inputs.rope_deltas is not None and self._tables.rope_deltas is not None:
            torch.index_select(self._tables.rope_deltas, 0, on_rows, out=self._inputs.rope_deltas[: len(rows)])
        if is_noisy:
            self._temperature[:size].copy_(noise[0])
            self._seeds[:size].copy_(noise[1])
        return is_noisy

    def _take_in(self, size: int) -> torch.Tensor:
        """Run the head on the decodes of a step of ``size`` rows."""
        with forward_context(self._decodes_metadata(size)):
            return self._keep_outputs(self.head(*self._step_inputs(size)))

    def _store(self, size: int) -> torch.Tensor:
        """Store the head's K/V of the decodes of a step of ``size`` rows; the returned tensor means nothing."""
        with forward_context(self._decodes_metadata(size)):
            self.head.store(*self._step_inputs(size))
        return self.out[:size]

    def _step_inputs(self, size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What the head reads of a recorded step of ``size`` rows."""
        return (
            self._tokens[:size],
            self.head.combine(self.states[:size]),
            self._batch.decodes.inputs(size).rotary_positions,
        )

    def _decodes_metadata(self, size: int) -> Sequence[AttentionMetadata]:
        """Each group's metadata of a recorded step of ``size`` rows, of which the head's are prepared."""
        decodes = self._batch.decodes
        inputs = decodes.inputs(size)
        attention = decodes.metadata(inputs, decodes.recorded_seq_lens(inputs))
        for group in self._groups:
            self._backends[group].prepare(attention[group])
        return attention

    def _go_on(self, size: int) -> torch.Tensor:
        """Run the head on its own outputs and the draft tokens, at the next positions."""
        positions, metadata = self._next_inputs(size)
        with forward_context(metadata):
            return self._keep_outputs(self.head(self._tokens[:size], self.fed[:size], positions))

    def _next_inputs(self, size: int) -> tuple[torch.Tensor, list[AttentionMetadata]]:
        """Go on to the next positions; return those by which heads turn (n,), and each group's metadata."""
        inputs = self._inputs.first(size)
        self._advance(inputs, self._tables.block_size)
        return inputs.rotary_positions, self._metadata(inputs.seq_lens, inputs.slot_mapping)

    def _metadata(self, seq_lens: torch.Tensor, slot_mapping: torch.Tensor) -> list[AttentionMetadata]:
        """Each group's metadata of a token of each request, of which the head's are prepared."""
        size, on_host, found = len(seq_lens), self._host_lengths(seq_lens), dict[int, AttentionMetadata]()
        for group, table in zip(self._groups, self._block_tables, strict=True):
            found[group] = AttentionMetadata(
                num_decodes=size,
                slot_mapping=slot_mapping,
                block_table=table[:size],
                seq_lens=seq_lens,
                query_start=self._batch.decodes.inputs(size).query_start,
                host_query_lens=np.ones(size, dtype=np.int32),
                host_seq_lens=on_host,
                is_padded=bool(on_host.min() == 0),
            )
            self._backends[group].prepare(found[group])
        return [found.get(group, found[self._groups[0]]) for group in range(len(self._backends))]

    def _host_lengths(self, lengths: torch.Tensor) -> IntArray:
        """``lengths`` on the host: on a CPU the device's own; kernels that can be recorded need none."""
        if lengths.device.type != "cpu" and self._backends[0].can_capture_decodes:
            return np.zeros(len(lengths), dtype=np.int32)
        found: IntArray = lengths.cpu().numpy()
        return found

    def _keep_outputs(self, outputs: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Copy both of the head's ``outputs`` (n, hidden) to their places."""
        out, fed = outputs
        own = self.out[: len(out)]
        self._copy_rows(out, own)
        if fed.data_ptr() != self.fed.data_ptr():  # a head may change what it is given
            self._copy_rows(fed, self.fed[: len(fed)])
        return own

    def _keep(self, size: int) -> Callable[[], None]:
        """Keep what ``_go_on`` changes and reads; return a function that puts it back."""
        places = (self._inputs.positions[:size], self.fed[:size])
        kept = [place.clone() for place in places]

        def put_back() -> None:
            for place, one in zip(places, kept, strict=True):
                place.copy_(one)

        return put_back

    def _choose(self, size: int, is_noisy: bool) -> torch.Tensor:
        """The draft tokens (n,) int32 after the next tokens; they are the inputs of the next pass.  A collective."""
        lm_head = self.head.lm_head
        own, logits = lm_head.slice, lm_head(self.out[:size])[:, : lm_head.slice.num_ids]
        if is_noisy and own.num_ids:
            logits = self._noisy_scores(logits, own.first)
        if self._library is not None and not is_noisy:
            best = best_tokens(self._library, logits)
        else:
            share = vocab_parallel.greedy_share(logits, own)
            (stack,) = vocab_parallel.exchange(self._communicator, [share])
            best = vocab_parallel.merge_best(stack)
        tokens = self._tokens[:size]
        self._copy_rows(self.head.tokens_of(best)[:, None], tokens[:, None])
        return tokens

    def _noisy_scores(self, logits: torch.Tensor, first_id: int) -> torch.Tensor:
        """``logits`` (n, c) of tokens from ``first_id`` on, with the noise that the model samples with there: two
        positions after the head's K/V."""
        size = len(logits)
        ids = torch.arange(first_id, first_id + logits.shape[1], dtype=torch.int32, device=logits.device)
        temperature = self._temperature[:size]
        is_greedy, plain = temperature == 0.0, logits.float()
        noise = gumbel_noise(ids, device_noise_keys(self._seeds[:size], self._inputs.positions[:size] + 2))
        return torch.where(is_greedy, plain, plain / temperature.masked_fill(is_greedy, 1.0) + noise)


class SharedKvPasses(HeadPasses):
    """The passes of a head that reads the model's K/V: it takes no tokens in, and drafts at one position.

    That is the last token's, whose own K/V are not there yet; nothing is stored.
    """

    needs_pass = True

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        device = self.out.device
        self._at = torch.zeros(self._room, dtype=torch.int64, device=device)
        self._seen = torch.zeros(self._room, dtype=torch.int32, device=device)
        self._nowhere = torch.full((self._room,), PAD_SLOT, dtype=torch.int64, device=device)

    def _enter(self, first: torch.Tensor, fed: torch.Tensor, position: torch.Tensor) -> None:
        count = len(first)
        self._tokens[:count].copy_(first)
        self.fed[:count].copy_(fed)
        self._inputs.positions[:count].copy_(position - 1)  # the first pass goes on from here
        self._at[:count].copy_(position + 1)
        self._seen.zero_()  # for padding
        self._seen[:count].copy_(position + 1)

    def _next_inputs(self, size: int) -> tuple[torch.Tensor, list[AttentionMetadata]]:
        self._advance(self._inputs.first(size), self._tables.block_size)
        return self._at[:size], self._metadata(self._seen[:size], self._nowhere[:size])


def head_bytes(head: DraftHead, max_decodes: int, num_columns: int) -> int:
    """Bytes of the fixed places of ``head``, with a block table of ``num_columns`` for each of its KV groups."""
    of_tables = torch.int32.itemsize * num_columns * max(len(head.groups), 1)
    of_numbers = 7 * torch.int64.itemsize + 5 * torch.int32.itemsize
    return max_decodes * (head.token_bytes + of_tables + of_numbers)
