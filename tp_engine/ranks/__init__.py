"""Who is there: ranks, process groups and collectives.  The only door to torch.distributed."""
