"""The codec ``pca:RANK``: each head's vectors in a fixed basis of fewer coordinates, with a bound on the error.

::

    state (head_dim,) of one token and head --- analysis (head_dim, rank) ---> coordinates --- quantise ---> int8, scale
    coordinates --- synthesis (rank, head_dim) ---> state, within the bound, or the block is refused

    blob    codes (heads, block_size, rank) int8 | scales (heads, block_size) bfloat16
            heads: KV heads of all parts, part after part (kernels/kv_cache/block_codes.py); a part is K or V of a layer

The basis of a head is that of the largest singular values of its vectors in the first blocks that are to be stored, 16
tokens for each dimension.  It stays fixed from then on; those blocks are refused.  A coordinate is divided by its
deviation, so that 8 bits suffice for the small ones beside the large ones.  Vectors are not centred: zeros stay zeros,
and a mean takes one coordinate.

A block is refused if for any head the error exceeds the bound: ||states - those that come back|| > bound * ||states||
over the block's tokens, as measured by decoding the blob.  Because a head's basis and error depend on that head alone,
the ranks of any tensor-parallel size refuse the same blocks together, but for the last bits of K/V.  A model with
several groups of layers has bases for each: moves name the group of their block in a third column.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from tp_engine.features.tiers.codecs.base import Codec, fingerprint_of
from tp_engine.kernels.kv_cache.block_codes import SCALE_BYTES, BlockForm, quantise
from tp_engine.layers.upload import upload
from tp_engine.plan import IntArray
from tp_engine.system.log import get_logger
from tp_engine.system.units import ceil_div

logger = get_logger(__name__)

TOKENS_PER_DIM = 16
_PORTION_BYTES = 8 << 20  # of float32 states that are worked on at once
_WORK_BYTES = 64 << 20  # eight times as much, for what is made of them
_LARGEST = 1e15  # of a state that calibrates: its square, summed up, is a number


@dataclass(frozen=True, slots=True)
class _Basis:
    """``analysis`` (heads, head_dim, rank) and ``synthesis`` (heads, rank, head_dim) float32."""

    analysis: torch.Tensor
    synthesis: torch.Tensor


class Pca(Codec):
    """Blocks of ``form`` in ``rank`` coordinates a head, with errors up to ``bound`` of a head's norm."""

    def __init__(self, form: BlockForm, rank: int, bound: float, group_parts: Sequence[int] = ()) -> None:
        """``group_parts``: parts that the blocks of each group have, if there are several."""
        assert 1 <= rank <= form.head_dim, "the configuration refuses it"
        self.blob_bytes = form.num_vectors * (rank + SCALE_BYTES)
        self._form, self._rank, self._bound = form, rank, bound
        self._num_heads = [parts * form.num_kv_heads for parts in group_parts or (form.num_parts,)]
        self.num_groups, dim = len(self._num_heads), form.head_dim
        self.work_bytes = 4 * sum(self._num_heads) * dim * (dim + 2 * rank) + _WORK_BYTES
        self._num_wanted = ceil_div(TOKENS_PER_DIM * form.head_dim, form.block_size)
        self._portion = max(1, _PORTION_BYTES // (4 * form.num_vectors * form.head_dim))
        self._num_seen = [0] * len(self._num_heads)
        self._moments: dict[int, torch.Tensor] = {}  # (heads, head_dim, head_dim) float32: sums of products
        self._bases: dict[int, _Basis] = {}

    def encode(self, pool: torch.Tensor, blobs: torch.Tensor, pairs: IntArray) -> torch.Tensor:
        refused = torch.ones(len(pairs), dtype=torch.bool, device=pool.device)
        for group, places in self._by_group(pairs):
            if group in self._bases:
                for some, blocks, to in self._portions(pairs, places, pool.device):
                    refused[some] = self._encode(pool[blocks], blobs, to, self._bases[group])
                continue
            for _, blocks, _ in self._portions(pairs, places, pool.device):
                self._calibrate(pool[blocks], group)
            if self._num_seen[group] >= self._num_wanted:
                self._make_basis(group)
        return refused

    def decode(self, blobs: torch.Tensor, pool: torch.Tensor, pairs: IntArray) -> None:
        for group, places in self._by_group(pairs):
            basis, heads = self._bases[group], self._num_heads[group]
            size = heads * self._form.block_size
            for _, some, to in self._portions(pairs, places, pool.device):
                given = blobs[some]
                codes = given[:, : size * self._rank].contiguous().view(torch.int8).view(len(to), heads, -1, self._rank)
                scales = given[:, size * self._rank : size * (self._rank + SCALE_BYTES)].contiguous()
                scales = scales.view(torch.bfloat16).view(len(to), heads, -1)
                pool[to] = self._blocks_of(self._synthesise(codes.transpose(0, 1), scales.transpose(0, 1), basis))

    def _by_group(self, pairs: IntArray) -> Iterator[tuple[int, npt.NDArray[np.intp]]]:
        """Each group among ``pairs`` that is known, and the places of its moves."""
        if pairs.shape[1] == 2:
            yield 0, np.arange(len(pairs))
            return
        for group in np.unique(pairs[pairs[:, 2] >= 0, 2]).tolist():
            yield group, np.flatnonzero(pairs[:, 2] == group)

    def _portions(
        self, pairs: IntArray, places: npt.NDArray[np.intp], device: torch.device
    ) -> Iterator[tuple[torch.Tensor, ...]]:
        """A portion of ``places`` at a time: these, and both columns of ``pairs`` there, on ``device``."""
        for first in range(0, len(places), self._portion):
            some = places[first : first + self._portion]
            columns = upload(np.stack((some, pairs[some, 0], pairs[some, 1])).astype(np.int64), device)
            yield columns.unbind(0)

    def fingerprint(self) -> bytes:
        """Blobs of another process are in another basis."""
        return fingerprint_of("pca", self._rank, self._form, id(self))

    def _encode(self, blocks: torch.Tensor, blobs: torch.Tensor, to_ids: torch.Tensor, basis: _Basis) -> torch.Tensor:
        """Write the blobs of ``blocks`` (n, block_bytes); which of them miss the bound (n,)."""
        states = self._states_of(blocks, len(basis.analysis))
        coordinates = torch.matmul(states.flatten(1, 2), basis.analysis)
        codes, scales = quantise(coordinates.view(*states.shape[:3], self._rank), torch.int8)
        parts = [one.transpose(0, 1).reshape(len(blocks), -1).view(torch.uint8) for one in (codes, scales)]
        rest = self.blob_bytes - sum(part.shape[1] for part in parts)
        blobs[to_ids] = torch.cat((*parts, parts[0].new_zeros(len(blocks), rest)), 1)
        missed = self._synthesise(codes, scales, basis).float().sub_(states)
        errors, norms = (one.flatten(2).square().sum(-1) for one in (missed, states))
        return ~(errors <= self._bound**2 * norms).all(0)  # refused too if it is NaN

    def _synthesise(self, codes: torch.Tensor, scales: torch.Tensor, basis: _Basis) -> torch.Tensor:
        """States (heads, n, block_size, head_dim) of the block's type."""
        coordinates = codes.float() * scales.float().unsqueeze(-1)
        found = torch.matmul(coordinates.flatten(1, 2), basis.synthesis).to(self._form.dtype)
        return found.view(*codes.shape[:3], self._form.head_dim)

    def _calibrate(self, blocks: torch.Tensor, group: int) -> None:
        states = self._states_of(blocks, self._num_heads[group]).flatten(1, 2)
        states = states.nan_to_num_(0.0, posinf=0.0, neginf=0.0).clamp_(-_LARGEST, _LARGEST)
        moments = torch.matmul(states.transpose(1, 2), states)
        self._moments[group] = moments.add_(self._moments[group]) if group in self._moments else moments
        self._num_seen[group] += len(blocks)

    def _make_basis(self, group: int) -> None:
        """The eigenvectors of the largest eigenvalues of each head's moments, scaled by the coordinates' deviation."""
        summed = self._moments.pop(group)
        values, vectors, kept = [], [], []
        for moments in summed.view(-1, self._form.num_kv_heads, *summed.shape[1:]):
            squares, axes = torch.linalg.eigh(moments.double())
            squares = squares.clamp_(min=0).flip(-1)
            kept.append(squares[:, : self._rank].sum(-1) / squares.sum(-1).clamp_(min=1e-300))
            values.append(squares[:, : self._rank])
            vectors.append(axes.flip(-1)[..., : self._rank])
        num_tokens = self._num_seen[group] * self._form.block_size
        deviations = (torch.cat(values) / num_tokens).sqrt().unsqueeze(1)  # (heads, 1, rank)
        deviations = torch.where(deviations > 1e-6 * deviations.amax(-1, keepdim=True), deviations, 1.0)
        axes = torch.cat(vectors)
        self._bases[group] = _Basis(
            (axes / deviations).float().contiguous(), (axes * deviations).float().transpose(1, 2).contiguous()
        )
        self._log(torch.cat(kept), group)

    def _log(self, kept: torch.Tensor, group: int) -> None:
        """``kept`` (heads,): the share of the squares of the calibration's states that the basis keeps."""
        logger.info(
            "PCA basis of rank %d for group %d of the layers, from %d blocks: it keeps %.2f %% of the squares of K/V, "
            "and %.2f %% in the worst head; a block may lose %.2f %% in each",
            *(
                self._rank,
                group,
                self._num_seen[group],
                100 * float(kept.mean()),
                100 * float(kept.min()),
                100 * self._bound**2,
            ),
        )

    def _states_of(self, blocks: torch.Tensor, num_heads: int) -> torch.Tensor:
        """``blocks`` (n, block_bytes) by head: (num_heads, n, block_size, head_dim) float32, of the first heads."""
        form = self._form
        vectors = form.vectors_of(blocks)
        if form.simd_width:
            states = vectors.view(len(blocks), -1, form.block_size, form.head_dim).transpose(0, 1)
        else:
            sizes = (len(blocks), form.num_parts, form.block_size, form.num_kv_heads, form.head_dim)
            states = vectors.view(sizes).permute(1, 3, 0, 2, 4).flatten(0, 1)
        return states[:num_heads].float().contiguous()

    def _blocks_of(self, states: torch.Tensor) -> torch.Tensor:
        """The inverse of ``_states_of``, from states of the block's type; heads that a group lacks are zeros."""
        form, count = self._form, states.shape[1]
        rest = form.num_parts * form.num_kv_heads - len(states)
        if rest:
            states = torch.cat((states, states.new_zeros(rest, *states.shape[1:])))
        if form.simd_width:
            vectors = states.transpose(0, 1)
        else:
            vectors = states.view(form.num_parts, form.num_kv_heads, *states.shape[1:]).permute(2, 0, 3, 1, 4)
        return form.blocks_of(vectors.reshape(count, form.num_parts, form.part_vectors, form.head_dim))
