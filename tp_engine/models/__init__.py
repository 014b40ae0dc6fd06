"""One file per architecture: architecture only, no rank arithmetic."""
