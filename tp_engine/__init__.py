"""tp_engine: a multi-GPU tensor-parallel LLM inference runtime."""
