"""Kernels prove and measure themselves on the user's device, and the fastest right ones are taken (docs/tuning.md)."""
