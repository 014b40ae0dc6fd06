"""Parts of scripts/gpu_check: sections, how one is run, and what the table shows of it."""
