"""OpenAI's files and batches, kept in a folder; the server runs them beside its other requests."""
