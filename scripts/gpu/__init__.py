"""Modules of scripts/gpu_check: the sections, how one runs, and the table of figures."""
