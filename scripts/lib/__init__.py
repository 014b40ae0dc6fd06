"""Code that several scripts use."""
