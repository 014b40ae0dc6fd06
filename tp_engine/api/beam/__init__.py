"""Beam search, on top of requests of one token."""
