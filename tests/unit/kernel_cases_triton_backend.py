"""Run in a process of its own with TRITON_INTERPRET=1: the Triton backend against loops."""

from __future__ import annotations

import torch

from tests.paged_batches import make_batch
from tp_engine.attention.base import AttentionShape
from tp_engine.attention.triton_backend import TritonBackend


def main() -> None:
    backend = TritonBackend()
    for block_size, head_dim, window in ((8, 32, None), (16, 80, 20), (256, 64, None)):
        shape = AttentionShape(num_heads=4, num_kv_heads=2, head_dim=head_dim, scale=0.1, sliding_window=window)
        requests = [(1, 40), (1, 1), (1, 0), (5, 5), (7, 30), (40, 55)]
        batch = make_batch(requests, shape, block_size=block_size, padding_tokens=2)
        backend.prepare(batch.metadata)
        out = backend.forward(batch.query, batch.key, batch.value, batch.kv_cache, batch.metadata, shape)
        torch.testing.assert_close(out, batch.expected(), rtol=1e-5, atol=1e-5)
    print("all cases agree")


if __name__ == "__main__":
    main()
