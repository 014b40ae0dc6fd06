"""The version of this package; pyproject.toml reads it from here, so a checkout and its wheel have the same.

Modules of the package import it from here: its front page names the whole Python API, which imports them.
"""

from importlib import metadata

__version__ = "0.4.0.dev0"


def installed_version(package: str) -> str | None:
    """Return the version of another package; None where it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
