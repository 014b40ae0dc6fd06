"""``tp-engine chat`` and ``tp-engine complete``: a model at the terminal."""
