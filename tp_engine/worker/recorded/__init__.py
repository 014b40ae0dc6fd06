"""Steps that are recorded once and replayed: CUDA graphs on GPUs, tapes on CPUs."""
