"""What fits on a device, worked out before anything runs: from config.json, memory, ranks and workload.  No torch."""
