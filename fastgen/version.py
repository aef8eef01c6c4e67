"""The version, and the distribution's name: known whether the package is installed or runs from its source."""

__version__ = "0.1.0"
# The name for pip, as in pyproject.toml. The distribution ``fastgen`` is another project.
DISTRIBUTION = "fastgen-llm"


def install_command(extra: str) -> str:
    """Returns the command that installs the packages of the ``extra`` of this name."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"
