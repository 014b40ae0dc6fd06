"""Whole engines without HTTP: the contenders, the order of their runs, and the figures."""
