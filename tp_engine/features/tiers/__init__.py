"""KV tiers: cached blocks go to host memory and to disk, and come back when a prompt needs them (docs/tiers.md)."""
