"""The relative error of K/V that a codec gives back, on blocks with what transformers' own model computes."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from tp_engine.kv_layout import KvKind, lay_out
from tp_engine.worker.codecs import make_codec
from tp_engine.worker.memory.kv_cache import KvBlocks, KvCacheShape

CPU = torch.device("cpu")


def blocks_of(model: str, dtype: str, prompts: Iterable[list[int]], block_size: int) -> KvBlocks:
    """The full blocks of all prompts, one after the other, of a model whose layers are all alike."""
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).eval()
    found = []
    with torch.inference_mode():
        for prompt in prompts:
            layers = loaded(torch.tensor([prompt]), use_cache=True, logits_to_keep=1).past_key_values.layers
            states = torch.stack([torch.stack((one.keys[0], one.values[0])) for one in layers])
            whole = states[..., : len(prompt) // block_size * block_size, :]  # (layers, 2, heads, tokens, head_dim)
            sizes = (*whole.shape[:3], -1, block_size, whole.shape[4])
            found.append(whole.reshape(sizes).permute(3, 0, 1, 4, 2, 5))
    states = torch.cat(found)  # (blocks, layers, 2, block_size, heads, head_dim)
    kind = KvKind(window=None, num_kv_heads=states.shape[4], head_dim=states.shape[5])
    shape = KvCacheShape(layout=lay_out([kind] * states.shape[1]), block_size=block_size, dtype=states.dtype)
    blocks = KvBlocks.allocate(shape, len(states), CPU)
    blocks.views[0].cache.copy_(states)
    return blocks


def measure_states(codec: str, blocks: KvBlocks, num_calibration: int) -> dict[str, float]:
    """Errors of the blocks behind the first ``num_calibration``, relative to the norm of a head's tokens in a block:
    the root of the mean square for K and V, the largest of all; and what ``refused`` is over several bounds."""
    shape = blocks.shape
    used = make_codec(codec, shape, 0)
    pairs = np.repeat(np.arange(len(blocks.raw), dtype=np.int32)[:, None], 2, axis=1)
    blobs, back = torch.zeros(len(blocks.raw), used.blob_bytes, dtype=torch.uint8), torch.zeros_like(blocks.raw)
    used.encode(blocks.raw, blobs, pairs[:num_calibration])
    used.encode(blocks.raw, blobs, pairs[num_calibration:])
    used.decode(blobs, back, pairs[num_calibration:])
    given, found = (shape.views_of(raw).cache[num_calibration:].float() for raw in (blocks.raw, back))
    squares = [one.square().sum(dim=(3, 5)) for one in (given - found, given)]  # (blocks, layers, 2, heads)
    errors = (squares[0] / squares[1]).nan_to_num_(0.0)
    means = errors.mean(dim=(0, 1, 3)).sqrt().tolist()
    worst = errors.flatten(1).amax(1).sqrt()  # of each block
    return {
        "blob_bytes": used.blob_bytes,
        "times": round(shape.block_bytes / used.blob_bytes, 3),
        "key_error": round(means[0], 5),
        "value_error": round(means[1], 5),
        "largest_error": round(float(worst.max()), 5),
        **{f"refused_at_{bound:g}": round(float((worst > bound).float().mean()), 4) for bound in (0.25, 0.5)},
    }
