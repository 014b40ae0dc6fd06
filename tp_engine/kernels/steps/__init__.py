"""Inputs of a step, made on the device, the end of a step, and guesses of its next tokens."""
