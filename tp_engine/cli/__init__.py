"""The ``tp-engine`` command, and the jobs that ``tp_engine.serve`` and ``tp_engine.batch`` start."""
