"""The persistent batch of one rank, and the inputs of a step that follow from it."""
