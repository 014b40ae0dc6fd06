"""What requests ask for of their prompts: log-probabilities, vectors, scores (docs/python.md, docs/embeddings.md)."""

from tp_engine.features.registry import Feature

FEATURE = Feature(name="prompt_outputs", scheduler="tp_engine.features.prompt_outputs.scheduling:make")
