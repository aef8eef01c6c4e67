"""The source that is built for a spec here: rendered, or edited by hand."""

from __future__ import annotations

import hashlib
import os
import warnings
from pathlib import Path

from fastgen.compile.render import SUFFIXES, render_body, render_heading
from fastgen.compile.spec import KernelSpec


def source_of(spec: KernelSpec) -> tuple[str, str]:
    """Returns heading and body: rendered, or the text of a file in the folder ``$FASTGEN_KERNEL_SOURCES``."""
    if folder := os.environ.get("FASTGEN_KERNEL_SOURCES"):
        file = Path(folder) / f"{spec.name}{SUFFIXES[spec.target]}"
        if file.is_file():
            warnings.warn(f"kernel {spec.name} is taken from {file} instead of being rendered", stacklevel=2)
            return "", file.read_text(encoding="utf-8")
    return render_heading(spec), render_body(spec)


def body_hash(spec: KernelSpec) -> str:
    """Returns a hash of the source without its heading, which names what needs the kernel."""
    return text_hash(source_of(spec)[1])


def text_hash(text: str) -> str:
    """Returns the SHA-256 of a text, in hexadecimal digits."""
    return hashlib.sha256(text.encode()).hexdigest()
