"""All reproductions, by the names of ``fastgen bench paper``."""

from __future__ import annotations

from typing import Final

from fastgen.errors import InvalidArgumentError
from fastgen.lab.paper.chats import CHATS
from fastgen.lab.paper.falcon import FALCON
from fastgen.lab.paper.insights import INSIGHTS
from fastgen.lab.paper.llama2 import LLAMA2
from fastgen.lab.paper.policies import POLICIES
from fastgen.lab.paper.replicas import REPLICAS
from fastgen.lab.paper.reproduction import Reproduction

# In the order of the page.
REPRODUCTIONS: Final = {each.name: each for each in (INSIGHTS, LLAMA2, REPLICAS, FALCON, CHATS, POLICIES)}


def reproduction(name: str) -> Reproduction:
    """Returns the reproduction ``name``.

    :raises InvalidArgumentError: with the names that exist.
    """
    if name not in REPRODUCTIONS:
        raise InvalidArgumentError(f"reproduction {name!r}: expected one of {', '.join(REPRODUCTIONS)}")
    return REPRODUCTIONS[name]
