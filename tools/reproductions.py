"""Writes docs/reproductions.md and its pictures from the newest result of each reproduction.

``python -m tools.reproductions`` after ``fastgen bench paper NAME --out benchmarks/results/lab_NAME_DATE.json``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastgen.lab.paper.registry import REPRODUCTIONS
from fastgen.lab.paper.reproduction import Reproduction, read_result, write_pictures

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "reproductions.md"
IMAGES = ROOT / "docs" / "images"
RESULTS = ROOT / "benchmarks" / "results"
INTRODUCTION = """# Reproductions

This page repeats what others have published about batching: the [FastGen paper](https://arxiv.org/abs/2401.08671), a
post by AWS on Falcon-40B, and a post on the blocks of vLLM. Each section is one command, `fastgen bench paper NAME`.
It is rendered from the file that the command wrote (`python -m tools.reproductions`), unfavourable figures included.

Where the devices are not at hand, the scheduler, the block pool and the policies are fastgen's own, and the device is a
cost by its datasheet ([roofline](lab.md)). So the differences *between policies* are decided by the same code that
serves requests. The absolute times are those of a device whose kernels reach the stated shares of its rates. Figures
have 95 % intervals in the files, from the scatter over requests; the error of the roofline itself is not in them.
"""


def page() -> str:
    """Returns the page as the newest results make it."""
    parts = [INTRODUCTION.rstrip()]
    for reproduction in REPRODUCTIONS.values():
        path = newest(reproduction)
        found = read_result(path)
        command = f"fastgen bench paper {reproduction.name}"
        if reproduction.name in ("insights", "policies"):
            command += " --model MODELS/llama-110m"
        facts = f"`{command}`, [{path.name}](../benchmarks/results/{path.name}), {_where(found)}."
        images = [f"![{name}](images/lab_{name}.png)" for name in reproduction.pictures(found["result"])]
        parts += [f"## {reproduction.title}", facts, reproduction.section(found["result"]), *images]
    return "\n\n".join(parts) + "\n"


def newest(reproduction: Reproduction) -> Path:
    """Returns the newest result of a reproduction; names of files end with their dates."""
    return max(RESULTS.glob(f"lab_{reproduction.name}_*.json"))


def _where(found: dict[str, Any]) -> str:
    machine = found["machine"]
    return f"{found['date']}, {machine['processor']}, {machine['cores']} cores, fastgen {machine['fastgen']}"


def main() -> None:
    PAGE.write_text(page())
    for reproduction in REPRODUCTIONS.values():
        write_pictures(reproduction, read_result(newest(reproduction))["result"], IMAGES)


if __name__ == "__main__":
    main()
