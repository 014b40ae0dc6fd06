"""Moves of whole blocks between a rank's pool and its host tier, in the order that plan.py promises.

::

    plans          n: loads          n+1                  n+2: wait_load = batch of n
    compute   | forward n-1 | forward n | forward n+1 |       | forward n+2
    copies                  | stores, loads of n ............ |

On CUDA a stream of its own makes the moves: each batch begins when the forward passes of the plans before have ended,
batches end in their order, and the compute stream waits for a batch only where a plan says so.  Nothing waits on the
host.  On a CPU a batch is made at once, in the plan's place, so nothing is left to wait for.

A slot holds a block as a codec encodes it (codecs/base.py).  On a CPU encoding is the copy.  On CUDA the stream encodes
into a staging area on the device, so that fewer bytes go to the host::

    pool --- encode ---> staging --- copy ---> slots            slots --- copy ---> staging --- decode ---> pool

A store that reads a block, a load that overwrites one, and a slot that is used again are safe by these two orders: of
the stream, and of the batch behind the compute stream's past.  ``wait_load`` guards what comes later.
"""

from collections import deque
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
import torch

from tp_engine.features.tiers.codecs.base import Codec
from tp_engine.features.tiers.feature import LOADS, STORES
from tp_engine.job.tier_progress import TierProgress
from tp_engine.model_config.kv_layout import MoveCounters
from tp_engine.plan import IntArray, StepPlan
from tp_engine.worker.results.readback import SpanClock, mark

UNKNOWN_GROUP = -1
_STAGING_BYTES = 32 << 20
_B300 = (10, 3)


class BlockGroups:
    """Which group of layers has each block and slot, for codecs that treat groups in different ways.

    ::

        plan n      stores (5, 0)            of the group that block 5 has had before this plan
                    loads  (3, 8)            block 8 gets the group of slot 3
                    admitted, block_ids      their blocks have the group of their place from the next plan on (plan.py)

    A block keeps its group while it is cached, so every plan must be shown to ``note``.  Entries of an admitted row
    that a window has left behind are 0, and so may a block of the row be: block 0 is then ``UNKNOWN_GROUP``.
    """

    def __init__(self, num_blocks: int, num_slots: int, num_groups: int) -> None:
        self._num_groups = num_groups
        self._of_block: npt.NDArray[np.int32] = np.full(num_blocks, UNKNOWN_GROUP, dtype=np.int32)
        self._of_slot: npt.NDArray[np.int32] = np.full(num_slots, UNKNOWN_GROUP, dtype=np.int32)

    def moves(self, plan: StepPlan) -> tuple[IntArray, IntArray]:
        """Return the plan's stores and loads (n, 3): the third column is the block's group.  Before ``note``."""
        stores, loads = STORES.of(plan), LOADS.of(plan)
        stored = self._of_block[stores[:, 0]]
        self._of_slot[stores[:, 1]] = stored
        loaded = self._of_slot[loads[:, 0]]
        self._of_block[loads[:, 1]] = loaded
        return np.column_stack((stores, stored)), np.column_stack((loads, loaded))

    def note(self, plan: StepPlan) -> None:
        """Rows have got these blocks."""
        for admission in plan.admitted:
            self._enter(admission.block_ids)
            if not admission.block_ids.all():
                self._of_block[0] = UNKNOWN_GROUP
        if len(plan.block_ids):
            self._enter(plan.block_ids)

    def _enter(self, block_ids: IntArray) -> None:
        """The blocks of logical blocks (n * groups,)."""
        self._of_block[block_ids] = np.arange(len(block_ids), dtype=np.int32) % self._num_groups


class StoreReports:
    """Says which stores have ended, and which of them the codec has refused, to rank 0: the channel ``stores``."""

    def __init__(self, progress: TierProgress) -> None:
        self._progress = progress
        self._open: deque[tuple[torch.Tensor, torch.cuda.Event | None]] = deque()

    @property
    def num_open(self) -> int:
        """Batches of stores that have not been reported."""
        return len(self._open)

    def add(self, refused: torch.Tensor, stream: torch.cuda.Stream | None = None) -> None:
        """Add the next stores, ``refused`` (n,) bool: on the CPU, or made by ``stream``, which is the current one."""
        if stream is None:
            self._open.append((refused, None))
            return
        on_host = torch.empty(len(refused), dtype=torch.bool, pin_memory=True, device="cpu")
        on_host.copy_(refused, non_blocking=True)
        self._open.append((on_host, mark(stream)))

    def send(self) -> None:
        """Report what has ended; does not wait for the rest."""
        while self._open and (self._open[0][1] is None or self._open[0][1].query()):
            refused, _ = self._open.popleft()
            failed = (refused.nonzero().flatten() + self._progress.num_ended + 1).tolist()
            self._progress.end(len(refused), failed)


class BlockMover:
    """Moves blocks between ``pool`` (blocks, block_bytes) and ``slots`` (slots, blob_bytes), both uint8: in place, by
    all threads of this rank."""

    is_async = False

    def __init__(
        self, pool: torch.Tensor, slots: torch.Tensor, codec: Codec, reports: StoreReports | None = None
    ) -> None:
        self._pool, self._slots, self._codec, self._reports = pool, slots, codec, reports
        self._stores, self._loads, self._waits = (SpanClock(is_async=self.is_async) for _ in range(3))

    def move(self, stores: IntArray, loads: IntArray) -> None:
        """Begin the next batch, counted from 1: pairs (block, slot), then pairs (slot, block), (n, 2) int32.

        With a codec of several groups they have the block's group as a third column.
        """
        blob_bytes = self._codec.blob_bytes
        with self._stores.span(len(stores) * blob_bytes):
            refused = self._codec.encode(self._pool, self._slots, stores) if len(stores) else None
            if self._reports is not None and refused is not None:
                self._reports.add(refused)
        with self._loads.span(len(loads) * blob_bytes):
            if len(loads):
                self._codec.decode(self._slots, self._pool, loads)

    def wait(self, batch: int) -> None:
        """Let what is launched from now on begin after the moves of all batches up to ``batch``."""

    def past(self) -> Callable[[], None]:
        """Return what waits on the host for all moves that have begun."""
        return lambda: None

    def counters(self) -> MoveCounters:
        """Return the moves that have ended; does not wait for others."""
        (store_s, stored), (load_s, loaded), (wait_s, _) = self._stores.read(), self._loads.read(), self._waits.read()
        wait_s = wait_s if self.is_async else store_s + load_s
        return MoveCounters(stored_bytes=stored, loaded_bytes=loaded, store_s=store_s, load_s=load_s, wait_s=wait_s)


def _stream_of_copies(device: torch.device) -> torch.cuda.Stream:
    """A stream of their own; on B300 that of the steps: there a copy to the host on a second stream can stop two graphs
    that are replayed back to back (pytorch#196133), as every step's are."""
    if torch.cuda.get_device_capability(device) == _B300:
        return torch.cuda.current_stream(device)
    return torch.cuda.Stream(device)


class CudaMover(BlockMover):
    """Moves on a stream of its own; ``slots`` are pinned memory."""

    is_async = True

    def __init__(
        self, pool: torch.Tensor, slots: torch.Tensor, codec: Codec, reports: StoreReports | None = None
    ) -> None:
        super().__init__(pool, slots, codec, reports)
        self._staging: torch.Tensor | None = None
        if not codec.is_copy:
            self._staging = pool.new_empty((num_staged(codec), codec.blob_bytes))
        self._stream = _stream_of_copies(pool.device)
        self._num_batches = 0
        self._ends: deque[tuple[int, torch.cuda.Event]] = deque()

    def move(self, stores: IntArray, loads: IntArray) -> None:
        self._num_batches += 1
        self._stream.wait_event(mark(torch.cuda.current_stream(self._pool.device)))
        blob_bytes = self._codec.blob_bytes
        with torch.cuda.stream(self._stream):
            with self._stores.span(len(stores) * blob_bytes, self._stream):
                self._store(stores)
            with self._loads.span(len(loads) * blob_bytes, self._stream):
                self._load(loads)
        self._ends.append((self._num_batches, mark(self._stream)))

    def wait(self, batch: int) -> None:
        end = None
        while self._ends and self._ends[0][0] <= batch:
            _, end = self._ends.popleft()
        if end is not None:  # else an earlier step has waited for it
            compute = torch.cuda.current_stream(self._pool.device)
            with self._waits.span(stream=compute):
                compute.wait_event(end)

    def past(self) -> Callable[[], None]:
        end = torch.cuda.Event(blocking=True)
        end.record(self._stream)
        return end.synchronize

    def _store(self, stores: IntArray) -> None:
        if self._staging is None:
            self._copy(self._pool, self._slots, stores)
            return
        for pairs, places in _portions(stores, len(self._staging)):
            self._encode(np.column_stack((pairs[:, 0], places, pairs[:, 2:])))
            self._copy(self._staging, self._slots, np.stack((places, pairs[:, 1]), 1))

    def _load(self, loads: IntArray) -> None:
        if self._staging is None:
            self._copy(self._slots, self._pool, loads)
            return
        for pairs, places in _portions(loads, len(self._staging)):
            self._copy(self._slots, self._staging, np.stack((pairs[:, 0], places), 1))
            self._decode(np.column_stack((places, pairs[:, 1:])))

    def _encode(self, pairs: IntArray) -> None:
        """Blocks to places in the staging area."""
        assert self._staging is not None
        refused = self._codec.encode(self._pool, self._staging, pairs)
        if self._reports is not None and refused is not None:
            self._reports.add(refused, self._stream)

    def _decode(self, pairs: IntArray) -> None:
        """Places in the staging area to blocks."""
        assert self._staging is not None
        self._codec.decode(self._staging, self._pool, pairs)

    @staticmethod
    def _copy(source: torch.Tensor, target: torch.Tensor, pairs: IntArray) -> None:
        for first, to, count in runs_of(pairs):
            target[to : to + count].copy_(source[first : first + count], non_blocking=True)


def num_staged(codec: Codec) -> int:
    """Blobs that the staging area on a GPU has room for."""
    return max(1, _STAGING_BYTES // codec.blob_bytes)


def staging_bytes(codec: Codec) -> int:
    """Bytes of the staging area that a codec takes on a GPU."""
    return 0 if codec.is_copy else num_staged(codec) * codec.blob_bytes


def _portions(pairs: IntArray, size: int) -> Iterator[tuple[IntArray, IntArray]]:
    """``pairs`` in parts of at most ``size``, each with its places 0, 1, ... in the staging area."""
    for first in range(0, len(pairs), size):
        part = pairs[first : first + size]
        yield part, np.arange(len(part), dtype=np.int32)


def runs_of(pairs: IntArray) -> Iterator[tuple[int, int, int]]:
    """``pairs`` (n, 2) as (first source, first target, count), one for pairs that follow each other in both columns."""
    if not len(pairs):
        return
    breaks = np.flatnonzero((np.diff(pairs, axis=0) != 1).any(1)) + 1
    begins = np.concatenate(([0], breaks))
    counts = np.diff(begins, append=len(pairs))
    for (source, target), count in zip(pairs[begins].tolist(), counts.tolist(), strict=True):
        yield source, target, count
