"""The paged KV cache: its layout, the store, and whole blocks in 8 bits."""
