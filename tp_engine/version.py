"""The version of this package; pyproject.toml reads it from here, so a checkout and its wheel have the same.

Modules of the package import it from here: its front page names the whole Python API, which imports them.
"""

__version__ = "0.2.0"
