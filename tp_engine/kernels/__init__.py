"""Kernels, each beside its plain PyTorch twin: in Triton (this is the only door to it), and in C for CPUs."""
