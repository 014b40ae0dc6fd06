"""Ranks, process groups and collectives.  The only door to torch.distributed."""
