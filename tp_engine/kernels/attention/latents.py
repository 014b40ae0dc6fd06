"""Latent attention's small operations in plain PyTorch (``model_config/mla.py`` has the sizes and the names).

::

    prepare     query heads [ nope | rope ] -> [ nope | rotated rope ], scaled
                rows        [ latent | rope ] -> [ normalised latent | rotated rope ]
    absorb      query heads [ nope | rope ] -> [ nope K_h | rope ]         K_h (nope_dim, rank) of the head's ``up``
    release     means of latents -> means of values: mean V_h^T            V_h (value_dim, rank), the rest of ``up``

The elements of a rotated pair are neighbours (``is_interleaved``) or half of rope_dim apart; they stay where they are,
because scores are sums over pairs.
"""

import torch

from tp_engine.kernels.attention.heads import Rotation, apply_rotary
from tp_engine.kernels.kv_cache.layer_kv import LayerKv
from tp_engine.kernels.layer_ops import NormRule, norm

# Heads that one product of ``LatentMaps.up_project`` has.
HEADS_TOGETHER = 4


def prepare_latents(
    query: torch.Tensor,
    rows: torch.Tensor,
    rule: NormRule,
    rotation: Rotation | None,
    is_interleaved: bool,
    kv: LayerKv | None,
    slot_mapping: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``query`` (N, heads, query_dim) and ``rows`` (N, row_dim) -> both prepared; rows as (N, 1, row_dim).

    ``rule`` is that of the latents' norm; without a ``rotation`` nothing turns.  This twin leaves the store to the
    attention backend; others may store the rows at the slots ``slot_mapping`` (N,) int64 of ``kv``, if there is one,
    and then return None for them.
    """
    rank = len(rule.weight)
    if rotation is None:
        return query, torch.cat((norm(rows[:, :rank], rule), rows[:, rank:]), 1).unsqueeze(1)
    size = rotation.rotary_dim
    nope = query.shape[2] - size
    rotated = rotate(query[..., nope:], rotation, is_interleaved)
    query = torch.cat((query[..., :nope], rotated), -1)
    if rotation.query_scale is not None:
        scale = rotation.query_scale.index_select(0, rotation.positions).view(-1, 1, 1)
        query = (query * scale).to(query.dtype)
    key = rotate(rows[:, rank:].unsqueeze(1), rotation, is_interleaved)
    return query, torch.cat((norm(rows[:, :rank], rule).unsqueeze(1), key), -1)


def rotate(heads: torch.Tensor, rotation: Rotation, is_interleaved: bool) -> torch.Tensor:
    """``heads`` (N, heads, rope_dim), rotated."""
    if not is_interleaved:
        return apply_rotary(heads, *rotation.cos_sin())
    cos, sin = rotation.table.index_select(0, rotation.positions).unsqueeze(1).chunk(2, -1)
    first, second = heads.view(*heads.shape[:-1], -1, 2).unbind(-1)
    return torch.stack((first * cos - second * sin, second * cos + first * sin), -1).flatten(-2)


def absorb_w_uk(query: torch.Tensor, up: torch.Tensor, nope_dim: int) -> torch.Tensor:
    """``query`` (n, heads, nope_dim + rope_dim), ``up`` (heads, nope_dim + value_dim, rank) -> (n, heads, row_dim)."""
    size, rank = query.shape[2] - nope_dim, up.shape[2]
    out = query.new_empty(*query.shape[:2], rank + size)
    # Into its place: a product of its own would be copied.
    torch.bmm(query[..., :nope_dim].transpose(0, 1), up[:, :nope_dim], out=out[..., :rank].transpose(0, 1))
    out[..., rank:] = query[..., nope_dim:]
    return out


def project_w_uv(attended: torch.Tensor, up: torch.Tensor, nope_dim: int) -> torch.Tensor:
    """``attended`` (n, heads, rank), ``up`` as above -> (n, heads, value_dim), contiguous."""
    out = attended.new_empty(*attended.shape[:2], up.shape[1] - nope_dim)
    torch.bmm(attended.transpose(0, 1), up[:, nope_dim:].transpose(1, 2), out=out.transpose(0, 1))
    return out
