"""Modules of the benchmarks; the commands are the files ``bench_*.py`` beside this folder."""
