"""Structured output: what a grammar, banned words or lists of tokens leave (docs/structured_output.md)."""
