"""OpenAI batch files: lines in, requests; results, lines out."""
