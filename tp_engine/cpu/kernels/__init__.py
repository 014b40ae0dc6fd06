"""Kernels in C for CPUs: compiled where they run, called through ctypes, each with its plain PyTorch twin."""
