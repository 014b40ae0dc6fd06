"""How many tokens of KV cache a block size wastes on requests of given lengths, and the size to choose.  No torch.

::

    last block   (size - 1) / 2: while a request decodes, its length takes every place in a block equally often
    sharing      prefix mod size: only full blocks are shared, the rest is computed and held again
    share        (last block + sharing) / (prompt + output / 2): the tokens that a request holds on the average

The waste grows with the size, and so do runs of neighbouring tokens; tables and hashed prefixes get shorter.  The
choice is therefore the largest size below ``MAX_WASTE``.  Layers with a window hold fewer tokens and waste more.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

BLOCK_SIZES = (8, 16, 32, 64)
MAX_WASTE = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Lengths in tokens: the means of prompts and outputs, and the prefixes that ``num_requests`` requests shared.

    ``prefixes`` counts requests by length of prefix; requests without one may be left out.  A server finds prefixes in
    full blocks only: ``block_size`` is that of the server, and 1 if the lengths are exact.
    """

    prompt: float
    output: float
    prefixes: Mapping[int, int] = field(default_factory=dict)
    num_requests: int = 1
    block_size: int = 1

    @property
    def held_tokens(self) -> float:
        """Tokens that a request holds on the average during its life."""
        return self.prompt + self.output / 2

    @property
    def shared_tokens(self) -> float:
        """Mean length of a request's shared prefix."""
        return sum(length * count for length, count in self.prefixes.items()) / self.num_requests

    def wasted_tokens(self, block_size: int) -> float:
        """Tokens that a request wastes on the average with blocks of ``block_size``."""
        # A prefix that was found may go on in the next block, to any place of it: half of that is lost.
        unseen = (min(block_size, self.block_size) - 1) / 2
        lost = sum(count * (length % block_size + unseen) for length, count in self.prefixes.items() if length)
        return (block_size - 1) / 2 + lost / self.num_requests

    def waste(self, block_size: int) -> float:
        """``wasted_tokens`` as a share of the held ones."""
        return self.wasted_tokens(block_size) / self.held_tokens


class LengthCounter:
    """Adds up the lengths of finished sequences; each of a request's ``n`` sequences counts as a request."""

    def __init__(self) -> None:
        self.num_requests = 0
        self._num_prompt_tokens = 0
        self._num_output_tokens = 0
        self._prefixes: Counter[int] = Counter()

    def observe(self, num_prompt_tokens: int, num_output_tokens: int, num_shared_tokens: int) -> None:
        """Count a sequence that has finished; ``num_shared_tokens`` of its prompt came from the prefix cache."""
        self.num_requests += 1
        self._num_prompt_tokens += num_prompt_tokens
        self._num_output_tokens += num_output_tokens
        self._prefixes[num_shared_tokens] += 1

    def lengths(self, block_size: int) -> Lengths:
        """Return the lengths so far, of at least one request; ``block_size`` is that of the prefix cache."""
        return Lengths(
            prompt=self._num_prompt_tokens / self.num_requests,
            output=self._num_output_tokens / self.num_requests,
            prefixes=self._prefixes,
            num_requests=self.num_requests,
            block_size=block_size,
        )


def choose_block_size(lengths: Lengths) -> int:
    """Return the largest of ``BLOCK_SIZES`` that wastes at most ``MAX_WASTE``, else the smallest, which wastes
    least."""
    return max((size for size in BLOCK_SIZES if lengths.waste(size) <= MAX_WASTE), default=BLOCK_SIZES[0])


def describe_waste(lengths: Lengths, block_size: int) -> str:
    """Return the waste of ``block_size`` and of the other sizes, such as ``16 wastes 1.2% of the 640 tokens that
    ...``."""
    shared = f", of which {lengths.shared_tokens:,.0f} are shared" if lengths.shared_tokens else ""
    first, *others = (f"{size} {lengths.waste(size):.1%}" for size in BLOCK_SIZES if size != block_size)
    return (
        f"{block_size} wastes {lengths.waste(block_size):.1%} of the {lengths.held_tokens:,.0f} tokens that a request "
        f"holds on the average{shared}; {first.replace(' ', ' would waste ')}, {', '.join(others)}"
    )


def advise_measured(lengths: Lengths) -> str:
    """Return the line of a running server: what its block size wastes, over which requests, and the size to choose."""
    best = choose_block_size(lengths)
    reason = f"the largest with at most {MAX_WASTE:.0%}" if lengths.waste(best) <= MAX_WASTE else "which wastes least"
    return (
        f"block size {describe_waste(lengths, lengths.block_size)} ({lengths.num_requests:,} requests with "
        f"{lengths.prompt:,.0f} tokens of prompt and {lengths.output:,.0f} of output); best is --block-size {best}, "
        f"{reason}"
    )
