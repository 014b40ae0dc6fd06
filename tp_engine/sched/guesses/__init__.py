"""Speculation: where guesses of next tokens come from, and how many a step verifies."""
