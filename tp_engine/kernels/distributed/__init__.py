"""Kernels of several ranks that meet in memory which their GPUs share."""
