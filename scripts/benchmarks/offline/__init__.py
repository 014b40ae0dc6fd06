"""Whole engines without HTTP: who takes part, how they take turns, and the figures."""
