"""A residual of several streams in plain PyTorch (``model_config/streams.py``).

A token's row holds its streams, and the weights with which the next block's output will be written::

    rows (N, row_size)    | stream 0 | stream 1 | ... | post (S) | comb (S, S), if streams are mixed | unused |

    written_k = post_k output + sum over j of comb[j, k] stream_j        or without comb    + stream_k

Hyper-connections, with x all streams side by side, in float32::

    m = scale (W x / sqrt(mean(x^2) + eps)) + base            24 numbers of 4 streams: pre, post, comb
    pre = sigmoid(m) + floor        post = 2 sigmoid(m)       mixture = sum over i of pre_i stream_i
    comb = softmax of rows + floor, then columns, rows, columns, ... are divided by their sums + floor

Gated streams, with n the streams, each RMS-normalised alone::

    mixture = mean over the streams of sigmoid(up(silu(down(n) / S))) n        post = 2 sigmoid(inject(n) / S)
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from tp_engine.kernels.layer_ops import widened


@dataclass(frozen=True, slots=True, eq=False)
class MixtureRule:
    """The constants of one mixture of ``count`` streams: ``weight`` (M, count * hidden), ``scale`` and ``base`` (M,)
    float32.  M is ``count`` where only a mixture is read, and has post and comb behind it before a block."""

    count: int
    weight: torch.Tensor
    scale: torch.Tensor
    base: torch.Tensor
    eps: float
    floor: float
    num_steps: int


def spread_streams(embedded: torch.Tensor, count: int, row_size: int) -> torch.Tensor:
    """``embedded`` (N, hidden) in each of ``count`` streams -> (N, row_size), with no weights yet."""
    rows = embedded.new_zeros(len(embedded), row_size)
    streams_of(rows, count, embedded.shape[1]).copy_(embedded.unsqueeze(1))
    return rows


def streams_of(rows: torch.Tensor, count: int, hidden_size: int) -> torch.Tensor:
    """The streams (N, count, hidden) of ``rows``, a view."""
    streams: torch.Tensor = rows[:, : count * hidden_size].unflatten(1, (count, hidden_size))
    return streams


def read_mixture(rows: torch.Tensor, rule: MixtureRule) -> torch.Tensor:
    """Read the mixture (N, hidden) of ``rows``; before a block, put the weights of its output into ``rows``."""
    count, width = rule.count, rule.weight.shape[1]
    flat = widened(rows[:, :width])
    factor = (flat.square().mean(-1, keepdim=True) + rule.eps).rsqrt()
    made = F.linear(flat, rule.weight) * factor * rule.scale + rule.base
    pre = made[:, :count].sigmoid() + rule.floor
    if made.shape[1] > count:
        post = 2 * made[:, count : 2 * count].sigmoid()
        comb = _doubly_stochastic(made[:, 2 * count :].unflatten(1, (count, count)), rule.floor, rule.num_steps)
        rows[:, width : width + made.shape[1] - count] = torch.cat((post, comb.flatten(1)), 1).to(rows.dtype)
    return torch.einsum("ns,nsh->nh", pre, flat.unflatten(1, (count, -1))).to(rows.dtype)


def _doubly_stochastic(logits: torch.Tensor, floor: float, num_steps: int) -> torch.Tensor:
    """``logits`` (N, S, S) as matrices whose rows and columns have a sum of nearly 1: Sinkhorn's iteration."""
    found = logits.softmax(-1) + floor
    found = found / (found.sum(-2, keepdim=True) + floor)
    for _ in range(num_steps - 1):
        found = found / (found.sum(-1, keepdim=True) + floor)
        found = found / (found.sum(-2, keepdim=True) + floor)
    return found


def write_streams(output: torch.Tensor, rows: torch.Tensor, count: int, *, is_mixed: bool) -> None:
    """Write a block's ``output`` (N, hidden) to the streams of ``rows``, in place, by the weights there."""
    hidden = output.shape[1]
    streams, weights = streams_of(rows, count, hidden), widened(rows[:, count * hidden :])
    before = widened(streams)
    if is_mixed:
        comb = weights[:, count : count * (1 + count)].unflatten(1, (count, count))
        before = comb.transpose(1, 2) @ before
    streams.copy_(torch.addcmul(before, weights[:, :count, None], widened(output).unsqueeze(1)))


def norm_streams(rows: torch.Tensor, weight: torch.Tensor, count: int, eps: float) -> torch.Tensor:
    """The streams of ``rows``, each normalised alone and times 1 + its part of ``weight`` (count * hidden,)."""
    wide = streams_of(widened(rows), count, len(weight) // count)
    normed = (wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt()).flatten(1)
    return (normed * (1 + widened(weight))).to(rows.dtype)


def gate_low(low: torch.Tensor, count: int) -> torch.Tensor:
    """What the gates are made of: silu of ``low`` (N, rank) / count."""
    return F.silu(low / count)


def read_gated(
    rows: torch.Tensor, normed: torch.Tensor, gates: torch.Tensor, made: torch.Tensor | None, count: int
) -> torch.Tensor:
    """The mean (N, hidden) of the streams ``normed`` (N, count * hidden), each element times its gate's sigmoid.

    Before a block, the weights of its output, from what inject has ``made`` (N, count), go into ``rows``.
    """
    if made is not None:
        rows[:, normed.shape[1] : normed.shape[1] + count] = 2 * (made / count).sigmoid()
    return streams_of(gates.sigmoid() * normed, count, normed.shape[1] // count).mean(1)
