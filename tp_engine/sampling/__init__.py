"""From logits to one token per row: processors, filters, seeded noise, log-probabilities; vectorised over the batch."""
