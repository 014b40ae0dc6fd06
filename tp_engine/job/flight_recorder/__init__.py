"""What a job was doing when it ended abnormally: a JSON file, and ``python -m tp_engine.job.flight_recorder FILE``."""
