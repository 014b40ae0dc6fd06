"""Which sequence enters next: clients take turns, and within one client whoever came first goes first.

::

    between clients       the fewest rows first; of equal ones, the one whose next sequence has the smallest key
    within one client     ``Sequence.key``: (priority, turn, number of the request, index of the sequence)

A *turn* is the number of the body, in order of arrival.  What one body multiplies (prompts, copies ``n``) comes in
portions of ``PORTION``, and each further portion as if it had been sent ``LATER`` bodies later: so a body of a thousand
copies does not keep the next one waiting for all of them, and bodies of up to ``PORTION`` sequences are served in order
of arrival.  A client may send its own requests after those of others, by a priority above 0, but never before them.

Each client has a heap, and a heap has the clients, so push and pop cost O(log n).  An aborted sequence stays in its
heap and is only counted as dead; it goes when it comes up, or when half of all are dead.
"""

import heapq
from typing import TypeAlias

from tp_engine.sched.sequence import OrderKey, Sequence, SequencePhase

PORTION, LATER = 16, 64

#: Clients come in this order: (priority, never below 0; rows; the key of the next sequence).
_Rank: TypeAlias = tuple[int, int, OrderKey]


def turn_of(body: int, place: int) -> int:
    """Return the turn of sequence ``place`` of a body, the ``body``-th that came."""
    return body + place // PORTION * LATER


class _Client:
    """The waiting sequences of one client, and how many others of it have rows."""

    __slots__ = ("heap", "num_rows", "rank")

    def __init__(self) -> None:
        self.heap: list[tuple[OrderKey, Sequence]] = []
        self.num_rows = 0
        self.rank: _Rank | None = None  # as the heap of clients has it

    def rank_now(self) -> _Rank:
        key = self.heap[0][0]
        return max(0, key[0]), self.num_rows, key


class WaitingQueue:
    """Sequences that wait for a row.  ``version`` changes with the queue and with the rows of its clients."""

    def __init__(self) -> None:
        self._clients: dict[str, _Client] = {}
        self._order: list[tuple[_Rank, int, _Client]] = []  # an entry counts while its client has that rank
        self._num_entries = 0
        self._num_queued = self._num_dead = 0
        self.version = 0

    def __len__(self) -> int:
        return self._num_queued - self._num_dead

    @property
    def num_clients(self) -> int:
        """Clients that wait or have rows."""
        return len(self._clients)

    def num_rows(self, client: str) -> int:
        """Return how many rows a client has."""
        found = self._clients.get(client)
        return 0 if found is None else found.num_rows

    def most_rows(self) -> tuple[int, str]:
        """Return how many rows the client with the most has, and its name."""
        return max(((one.num_rows, name) for name, one in self._clients.items()), default=(0, ""))

    def count_row(self, sequence: Sequence, change: int) -> None:
        """A sequence has got a row (1) or left it (-1)."""
        name = sequence.group.request.client
        client = self._client(name)
        client.num_rows += change
        self.version += 1
        if client.heap:
            self._rank(client)
        elif not client.num_rows:
            del self._clients[name]

    def push(self, sequence: Sequence) -> None:
        """Add at its place, which for a preempted sequence is before all of its client that arrived later."""
        assert sequence.phase is SequencePhase.WAITING
        client = self._client(sequence.group.request.client)
        heapq.heappush(client.heap, (sequence.key, sequence))
        self._num_queued += 1
        self.version += 1
        self._rank(client)

    def peek(self) -> Sequence | None:
        """Return the next living sequence; None if there is none."""
        while self._order:
            rank, _, client = self._order[0]
            if rank == client.rank:
                sequence = client.heap[0][1]
                if sequence.phase is SequencePhase.WAITING:
                    return sequence
                self._num_dead -= 1
                self._take(client)
            else:
                heapq.heappop(self._order)
        return None

    def pop(self) -> Sequence | None:
        """Remove and return the next living sequence; None if there is none."""
        sequence = self.peek()
        if sequence is not None:
            self._take(self._order[0][2])
            self.version += 1
            self._drop_dead()
        return sequence

    def first(self, count: int) -> list[Sequence]:
        """Return about the first ``count``, without those among them that were aborted: of each client they are on the
        first ``count`` levels of its heap."""
        queued = [client for client in self._clients.values() if client.heap]
        items = [
            (client.num_rows + place, *item)
            for client in heapq.nsmallest(count, queued, key=_Client.rank_now)
            for place, item in enumerate(heapq.nsmallest(count, client.heap[: (1 << count) - 1]))
        ]
        first = heapq.nsmallest(count, items)
        return [sequence for *_, sequence in first if sequence.phase is SequencePhase.WAITING]

    def forget(self, sequence: Sequence) -> None:
        """Count a queued sequence that has been aborted."""
        assert sequence.phase is SequencePhase.FINISHED
        self._num_dead += 1
        self.version += 1
        self._drop_dead()

    def check_integrity(self) -> None:
        """Assert that the counts are right, that nothing is queued twice, and that each client that waits is ranked."""
        items = [item for client in self._clients.values() for item in client.heap]
        assert len(items) == self._num_queued == len({key for key, _ in items})
        assert sum(sequence.phase is not SequencePhase.WAITING for _, sequence in items) == self._num_dead
        entries = {(rank, id(client)) for rank, _, client in self._order}
        for client in self._clients.values():
            assert client.heap or client.num_rows > 0
            assert not client.heap or (client.rank == client.rank_now() and (client.rank, id(client)) in entries)

    def _client(self, name: str) -> _Client:
        client = self._clients.get(name)
        if client is None:
            client = self._clients[name] = _Client()
        return client

    def _take(self, client: _Client) -> None:
        """Remove the first sequence of ``client``, which is the first of all."""
        heapq.heappop(self._order)
        sequence = heapq.heappop(client.heap)[1]
        self._num_queued -= 1
        client.rank = None
        if client.heap:
            self._rank(client)
        elif not client.num_rows:
            del self._clients[sequence.group.request.client]

    def _rank(self, client: _Client) -> None:
        """Let the heap of clients have ``client``, which waits, at its present rank."""
        rank = client.rank_now()
        if rank == client.rank:
            return
        client.rank = rank
        self._num_entries += 1
        heapq.heappush(self._order, (rank, self._num_entries, client))
        if len(self._order) > 2 * len(self._clients) + PORTION:
            self._order = [entry for entry in self._order if entry[0] == entry[2].rank]
            heapq.heapify(self._order)

    def _drop_dead(self) -> None:
        """Remove the dead if they are the most."""
        if self._num_dead * 2 <= self._num_queued:
            return
        self._num_queued = self._num_dead = 0
        self._order.clear()
        for name, client in list(self._clients.items()):
            client.heap = [item for item in client.heap if item[1].phase is SequencePhase.WAITING]
            heapq.heapify(client.heap)
            self._num_queued += len(client.heap)
            client.rank = None
            if client.heap:
                self._rank(client)
            elif not client.num_rows:
                del self._clients[name]
