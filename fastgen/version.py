"""The version; it is known whether the package is installed or runs from its source."""

__version__ = "0.1.0"
