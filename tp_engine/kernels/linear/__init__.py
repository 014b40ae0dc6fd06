"""Products with dense weights: of few rows with what stands around them, with adapters, and as trees."""
