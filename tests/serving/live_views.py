"""The live views of a server's engines, of each replica where it has several."""

from __future__ import annotations

from typing import Any

import httpx2


def live_views(address: str) -> dict[str, dict[str, Any]]:
    """Returns the view of each engine by the id of its replica; of a server without replicas by ``""``."""
    live = httpx2.get(f"{address}/live", trust_env=False).json()
    if not live.get("replicas"):
        return {"": live["engine"]}
    return {
        each["id"]: httpx2.get(f"{address}/live", params={"replica": each["id"]}, trust_env=False).json()["engine"]
        for each in live["replicas"]
    }


def is_idle(view: dict[str, Any]) -> bool:
    """Returns whether an engine has no request, and holds no block for one."""
    return bool(view["num_running"] == view["num_waiting"] == sum(view["blocks"]["held"]) == 0)
