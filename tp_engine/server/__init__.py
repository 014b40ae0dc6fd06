"""OpenAI-compatible HTTP in a process of its own."""
