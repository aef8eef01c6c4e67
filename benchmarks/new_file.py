"""The argument of scripts that names the file of their results."""

from __future__ import annotations

import argparse
from pathlib import Path


def new_file(name: str) -> Path:
    """Returns the path of a file that is not there yet. Raises ``argparse.ArgumentTypeError`` for one that is: earlier
    results are kept."""
    path = Path(name)
    if path.exists():
        raise argparse.ArgumentTypeError(f"{name} is there already, and earlier results are kept: name another file")
    return path
