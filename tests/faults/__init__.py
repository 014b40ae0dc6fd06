"""The fault matrix: every phase, every way to fail, every kind of job; and signals at random moments."""
