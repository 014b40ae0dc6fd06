"""Batch jobs: OpenAI request lines from a file, result lines to a file."""
