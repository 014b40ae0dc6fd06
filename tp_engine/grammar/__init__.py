"""Grammars over tokens: what an output may look like, compiled once, and which tokens may come next.  No torch."""
