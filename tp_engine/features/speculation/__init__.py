"""Speculation: draft tokens, of which one step verifies several (docs/speculation.md)."""
