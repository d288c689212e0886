"""The version of this installation."""

from importlib import metadata


def version() -> str:
    """As the package's metadata says; amago may also run from a source tree that nobody installed."""
    try:
        return metadata.version("amago")
    except metadata.PackageNotFoundError:
        return "(not installed)"
