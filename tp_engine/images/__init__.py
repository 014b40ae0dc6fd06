"""Images of requests: loading them within limits, the sizes that each family of models takes, and their places in
prompts.  No torch."""
