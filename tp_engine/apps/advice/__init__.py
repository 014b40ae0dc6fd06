"""Calculates before a start what fits on a device, from config.json, memory, ranks and workload.  No torch."""
