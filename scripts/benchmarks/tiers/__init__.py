"""The tiers of the KV cache beside an engine without them."""
