"""Applications on top of the engine, imported only by the command ``tp-engine``."""
