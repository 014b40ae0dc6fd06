"""Triton kernels, each beside its plain PyTorch twin.  The only door to triton."""
