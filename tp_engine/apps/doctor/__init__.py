"""``tp-engine doctor``: what a machine has, what is missing, and what the engine would choose on it."""
