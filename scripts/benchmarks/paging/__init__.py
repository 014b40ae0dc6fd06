"""Paged against contiguous allocation of the KV cache, and decoding with and without one."""
