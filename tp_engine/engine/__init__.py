"""Schedule, publish, run, update: the loop that rank 0 turns, and the ranks it starts."""
