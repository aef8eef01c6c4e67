"""Versions of fastgen and of other packages. fastgen's own is known if it runs from its source too."""

__version__ = "0.1.0"
# The name for pip, as in pyproject.toml. The distribution ``fastgen`` is another project.
DISTRIBUTION = "fastgen-llm"


def installed_version(package: str) -> str | None:
    """Returns the version of a package, ``None`` if it is not installed."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return None


def install_command(extra: str) -> str:
    """Returns the command that installs the packages of the ``extra`` of this name."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"
