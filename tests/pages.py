"""Parts of the documentation's pages, for tests that hold them true."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"


def blocks(page: Path, language: str) -> list[str]:
    """Returns the code blocks of ``language``."""
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text("utf-8"), re.MULTILINE | re.DOTALL)


def section(page: Path, title: str) -> str:
    """Returns the section below the heading ``title``."""
    (found,) = re.findall(rf"^## {title}\n(.*?)(?=^## |\Z)", page.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    return str(found)


def anchor(title: str) -> str:
    """Returns the name by which links call a heading."""
    return re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")
