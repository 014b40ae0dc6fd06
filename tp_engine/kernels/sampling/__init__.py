"""Sampling on GPUs, one launch for a kind of rows; the twins are in ``tp_engine/sampling``."""
