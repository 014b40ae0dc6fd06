"""The ``tp-engine`` command, and the jobs that launch/ starts under torchrun."""
