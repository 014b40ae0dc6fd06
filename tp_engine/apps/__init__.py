"""What is used beside the engine: a storey above it, imported by the command ``tp-engine`` alone."""
