"""What a rank sends the others for the rows of a group, how it is exchanged, and what all ranks then decide.

| rows | a rank's share of a row |
| --- | --- |
| GREEDY, ANY | the rank key of its best token, after noise: 8 bytes |
| RANKED | the rank keys of its largest top_k |
| NUCLEUS, SORTED | its logits |
| NUCLEUS, CPU, large vocabulary | the rank keys of its 256 likeliest tokens, and the slice's weight; then logits |

Before that, ANY with min_p and the last method exchange the largest logit of every slice.  Edits and penalties have
been applied to the slices.

One all-gather carries shares of several shapes and types::

    rank r's words (int64)    [ share 0 | share 1 | ... ]        every share a whole number of words
    gathered                  [ rank 0's words | rank 1's words | ... ]

Every decision gives the token that a single rank draws from the gathered logits: a row's best tokens are among the best
of its slices, integers are merged exactly, and noise depends only on the token's id.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from tp_engine.distributed.collectives import Communicator
from tp_engine.layers.embedding import VocabSlice
from tp_engine.sampling.filters import NUCLEUS_START, draw, fixed_weights, keep_mask, noisy_scores, pick
from tp_engine.sampling.groups import RowGroup, SamplingMethod
from tp_engine.sampling.ranking import LOWEST_KEY, best_keys, key_ids, largest_keys, row_chunks, top_keys, unpack_keys

SHORT_WAY_FROM = 1 << 14  # gloo takes longer for a row of so many logits than for another collective


def exchange(communicator: Communicator, pieces: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Every rank's ``pieces``, stacked: (m, c) -> (world size, m, c).  A collective, unless there are no pieces.

    Pieces have the same shapes and types on every rank, and rows of a whole number of 8-byte words.
    """
    if not pieces:
        return []
    words = [piece.contiguous().view(torch.int64).reshape(-1) for piece in pieces]
    flat = words[0] if len(words) == 1 else torch.cat(words)
    gathered = communicator.all_gather(flat).view(communicator.info.world_size, -1)
    stacks, start = [], 0
    for piece, part in zip(pieces, words, strict=True):
        stack = gathered[:, start : start + len(part)].contiguous()
        stacks.append(stack.view(piece.dtype).view(-1, *piece.shape))
        start += len(part)
    return stacks


def side_by_side(stack: torch.Tensor) -> torch.Tensor:
    """(world size, m, c) -> (m, world size x c), in rank order."""
    world_size, num_rows, width = stack.shape
    return stack.transpose(0, 1).reshape(num_rows, world_size * width)


def needs_maximum(group: RowGroup, vocab_size: int, device: torch.device) -> bool:
    """Whether a share of the group depends on the largest logit of the whole row."""
    return (group.method is SamplingMethod.ANY and group.uses_min_p) or _has_short_way(group, vocab_size, device)


def _has_short_way(group: RowGroup, vocab_size: int, device: torch.device) -> bool:
    """Whether a few candidates are tried first for the nucleus; only on CPUs the result can be read without a wait."""
    return group.method is SamplingMethod.NUCLEUS and device.type == "cpu" and vocab_size >= SHORT_WAY_FROM


def maximum_share(logits: torch.Tensor) -> torch.Tensor:
    """The largest logit (m, 1) as a key; the largest key of all slices has the largest logit of the row."""
    if logits.shape[1] == 0:
        return _no_keys(logits)
    return best_keys(logits.amax(-1, keepdim=True), 0)[:, None]


def decide_maximum(stack: torch.Tensor) -> torch.Tensor:
    """Maxima (m, 1) float32 from the shares (world size, m, 1)."""
    return unpack_keys(stack.amax(0))[0]


def greedy_share(logits: torch.Tensor, vocab: VocabSlice) -> torch.Tensor:
    """GREEDY: (m, 1) int64.  ``logits`` (m, num_ids)."""
    return best_keys(logits, vocab.first)[:, None] if vocab.num_ids else _no_keys(logits)


def best_share(
    logits: torch.Tensor, group: RowGroup, keys: torch.Tensor | None, vocab: VocabSlice, maximum: torch.Tensor | None
) -> torch.Tensor:
    """GREEDY, ANY: (m, 1) int64.  ``logits`` (m, num_ids), noise ``keys`` (m, 2), ``maximum`` (m, 1) for min_p."""
    if vocab.num_ids == 0 or group.method is SamplingMethod.GREEDY:
        return greedy_share(logits, vocab)
    assert keys is not None
    token_ids = torch.arange(vocab.first, vocab.first + vocab.num_ids, dtype=torch.int32, device=logits.device)
    parts = []
    for start, stop in row_chunks(logits.shape[0], logits.shape[1], logits.device):
        highest = None if maximum is None else maximum[start:stop]
        part, own_keys = group.part(start, stop), keys[start:stop]
        scores = noisy_scores(logits[start:stop].float(), part, own_keys, token_ids, highest)
        parts.append(best_keys(scores, vocab.first))
    return torch.cat(parts)[:, None]


def merge_best(stack: torch.Tensor) -> torch.Tensor:
    """Token ids (m,) int32 from the shares (world size, m, 1)."""
    return key_ids(stack.amax(0)[:, 0])


def ranked_share(logits: torch.Tensor, count: int, vocab: VocabSlice) -> torch.Tensor:
    """RANKED: (m, up to ``count``) int64 from ``logits`` (m, num_ids), equally many on every rank."""
    width = min(count, vocab.width)
    found = [
        top_keys(logits[start:stop].float(), min(width, vocab.num_ids), vocab.first)
        for start, stop in row_chunks(logits.shape[0], vocab.width, logits.device)
    ]
    return F.pad(torch.cat(found), (0, width - min(width, vocab.num_ids)), value=LOWEST_KEY)


def decide_ranked(stack: torch.Tensor, group: RowGroup, keys: torch.Tensor) -> torch.Tensor:
    """Token ids (m,) int32 from the shares (world size, m, c)."""
    values, token_ids = unpack_keys(largest_keys(side_by_side(stack), group.largest_top_k))
    scaled = values.div_(group.temperature)
    return pick(scaled, token_ids, keep_mask(scaled, group), keys)


def nucleus_share(logits: torch.Tensor, group: RowGroup, vocab: VocabSlice, maximum: torch.Tensor) -> torch.Tensor:
    """NUCLEUS by the short way: (m, c + 1) int64, the candidates' keys, then the weight of the slice."""
    highest = maximum / group.temperature
    totals = [
        fixed_weights(logits[start:stop].float() / group.temperature[start:stop], highest[start:stop]).sum(-1)
        for start, stop in row_chunks(logits.shape[0], vocab.width, logits.device)
    ]
    return torch.cat((ranked_share(logits, NUCLEUS_START, vocab), torch.cat(totals)[:, None]), dim=1)


def decide_nucleus(
    stack: torch.Tensor, group: RowGroup, keys: torch.Tensor, vocab_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids (m,) int32 from the shares (world size, m, c + 1), and the places (int64) with too few candidates."""
    total = stack[:, :, -1].sum(0)[:, None]
    found = largest_keys(side_by_side(stack[:, :, :-1]), min(NUCLEUS_START, vocab_size))
    values, token_ids = unpack_keys(found)
    scaled = values.div_(group.temperature)
    keep = keep_mask(scaled, group, total)
    too_few = keep[:, -1] if vocab_size > NUCLEUS_START else torch.zeros_like(keep[:, -1])
    return pick(scaled, token_ids, keep, keys), too_few.nonzero()[:, 0]


def whole_logits(stack: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """(world size, m, width) -> (m, vocab_size)."""
    return side_by_side(stack)[:, :vocab_size]


def decide_from_logits(
    logits: Callable[[int, int | None], torch.Tensor],
    group: RowGroup,
    keys: torch.Tensor | None,
    vocab_ids: torch.Tensor,
) -> torch.Tensor:
    """Token ids (m,) int32 from whole logits; ``logits(start, stop)`` are those of some rows (n, vocab)."""
    if group.method is SamplingMethod.GREEDY and group.source is None:  # nothing is copied
        return draw(logits(0, None), group, keys, vocab_ids)
    chunks = list(row_chunks(len(group.members), len(vocab_ids), vocab_ids.device))
    if len(chunks) == 1:
        return draw(logits(0, None), group, keys, vocab_ids)
    parts = [
        draw(logits(start, stop), group.part(start, stop), None if keys is None else keys[start:stop], vocab_ids)
        for start, stop in chunks
    ]
    return torch.cat(parts)


def _no_keys(logits: torch.Tensor) -> torch.Tensor:
    """The share (m, 1) of a rank whose slice is padding alone."""
    return torch.full((logits.shape[0], 1), LOWEST_KEY, dtype=torch.int64, device=logits.device)
