"""Steps that are captured once and replayed: CUDA graphs on GPUs, tapes on CPUs."""
