"""What drafts the next tokens of a step's rows on the ranks."""
