"""The tiers below the pool, as rank 0 keeps account of them: slots in host memory and on disk."""
