"""The version of this installation."""

from importlib import metadata


def version() -> str:
    """Return the version from the package's metadata; amago may also run from a source tree that is not installed."""
    try:
        return metadata.version("amago")
    except metadata.PackageNotFoundError:
        return "(not installed)"
