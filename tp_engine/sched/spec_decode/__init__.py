"""Speculation: where draft tokens of next tokens come from, and how many a step verifies."""
