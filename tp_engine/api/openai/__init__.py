"""The OpenAI API without HTTP: bodies become engine requests, outputs of the engine become answers."""
