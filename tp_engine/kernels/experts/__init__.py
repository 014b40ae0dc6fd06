"""Which experts a token goes to, and products with these experts' weights."""
