"""Images in prompts: scheduling and encoding (docs/images.md)."""
