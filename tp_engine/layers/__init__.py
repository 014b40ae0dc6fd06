"""Tensor-parallel layers: they get their rank and communicator as arguments."""
