"""Whole engines without HTTP: which take part, how they take turns, and the figures."""
