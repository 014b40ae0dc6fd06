"""Whole engines without HTTP: the contenders, their turns, and the figures."""
