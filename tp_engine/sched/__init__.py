"""What to run: requests, blocks and the schedule.  Rank 0 only; no torch."""
