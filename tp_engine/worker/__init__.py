"""How to run a plan: memory, KV cache, batch state and the model runner, on every rank."""
