"""The tiers below the pool on one rank: host memory, files, and the moves of blocks between them."""
