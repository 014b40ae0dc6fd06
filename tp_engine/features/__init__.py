"""Optional features, one folder each, and the registry that tells the core of them."""
