"""The decoder, built from a ``ModelSpec``: architecture only, no rank arithmetic."""
