"""Attention over the paged cache, and what makes queries, keys and rows of latents ready for it."""
