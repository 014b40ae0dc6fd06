"""The version of this package.

Modules of the package import it from here: its front page names the whole Python API, which imports them.
"""

__version__ = "0.1.0"
