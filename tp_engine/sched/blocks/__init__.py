"""The KV blocks of rows and of the prefix cache, as rank 0 keeps account of them."""
