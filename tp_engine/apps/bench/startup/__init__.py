"""The parts of the start-up benchmark."""
