"""The OpenAI API, apart from HTTP: bodies in, the engine's requests; the engine's outputs, bodies out."""
