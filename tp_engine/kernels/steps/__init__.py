"""Inputs of a step, made on the device, the end of a step, and draft tokens of its next tokens."""
