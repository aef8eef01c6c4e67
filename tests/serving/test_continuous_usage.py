"""``continuous_usage_stats``: every chunk of a stream reports the usage so far."""

from __future__ import annotations

import json

import httpx2
import pytest

from tests.serving.server_process import ServerProcess

BODIES = {
    "/v1/completions": {"prompt": "Once upon a time"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hello"}]},
}


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("always", [False, True])
def test_usage_grows_with_the_answer(server: ServerProcess, path: str, always: bool) -> None:
    options = {"include_usage": True, "continuous_usage_stats": always}
    fields = {"model": "tiny-llama", "stream": True, "max_tokens": 40, "ignore_eos": True, "stream_options": options}
    response = httpx2.post(f"{server.address}{path}", json=BODIES[path] | fields, trust_env=False, timeout=60)
    assert response.status_code == 200, response.text
    events = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: {")]
    *usages, last = [json.loads(event)["usage"] for event in events]
    assert last["completion_tokens"] == 40
    if not always:
        assert usages == [None] * len(usages)
        return
    counts = [usage["completion_tokens"] for usage in usages]
    assert counts == sorted(counts)
    assert counts[0] < counts[-1] == 40, "a busy server may send several tokens at once, but not all"
    assert {usage["prompt_tokens"] for usage in usages} == {last["prompt_tokens"]}
