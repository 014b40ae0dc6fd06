"""Memory of one rank: what is measured at the start, the ledger, and the KV cache that follows from it."""
