"""LoRA: adapters that share the model's weights (docs/adapters.md)."""
