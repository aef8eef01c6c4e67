"""Reads the instructions of a built kernel, to see what an assembler made of it."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import triton

_INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?);", re.MULTILINE)


def instructions(cubin: Path) -> list[tuple[int, str]]:
    """Returns the address and the text of each instruction, in order."""
    command = [triton.knobs.nvidia.cuobjdump.path, "-sass", str(cubin)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [(int(address, 16), instruction) for address, instruction in _INSTRUCTION.findall(text)]


def loops(found: list[tuple[int, str]]) -> list[list[str]]:
    """Returns the instructions of each loop without another one inside it."""
    spans = []
    for address, text in found:
        branch = re.search(r"\bBRA\S*\s+(?:\S+,\s+)?(?:`\(\S+\)|0x([0-9a-f]+))", text)
        if branch and branch[1] and (target := int(branch[1], 16)) < address:
            spans.append((target, address))
    inner = [
        (begin, end)
        for begin, end in spans
        if not any(begin <= first and last <= end and (first, last) != (begin, end) for first, last in spans)
    ]
    return [[text for address, text in found if begin <= address <= end] for begin, end in inner]


def exponentials_within_products(body: list[str]) -> int:
    """Returns how many exponentials a loop computes between the first of its products on tensor cores that are under
    way and the wait for them: the most of any wait."""
    most = since = 0
    are_under_way = False
    for text in [*body, *body]:  # a wait may stand at the head of the next iteration
        if "HGMMA" in text:
            since = since if are_under_way else 0
            are_under_way = True
        elif "MUFU.EX2" in text:
            since += are_under_way
        elif "WARPGROUP.DEPBAR" in text:
            most = max(most, since * are_under_way)
            are_under_way = False
    return most
