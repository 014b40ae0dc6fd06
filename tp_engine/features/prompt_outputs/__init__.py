"""What requests ask for of their prompts: log-probabilities, vectors and scores."""
