"""Quantised checkpoints as their makers write them, for tests."""
