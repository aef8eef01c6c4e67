"""Models are loaded in several threads at once, before anything else has imported the libraries."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

SCRIPT = """
import json, threading
import fastgen

found = []

def load():
    try:
        with fastgen.load("tiny-llama", kv_cache_memory="8MiB") as llm:
            found.append(llm.generate("Once", max_new_tokens=3, temperature=0).text)
    except Exception as error:
        found.append(repr(error))

threads = [threading.Thread(target=load) for _ in range(3)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(json.dumps(found))
"""


@pytest.mark.slow
def test_three_threads_load_a_model_in_a_fresh_process() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True, timeout=300)
    found = json.loads(done.stdout)
    assert len(found) == 3
    assert len(set(found)) == 1, found
    assert "Error" not in found[0]
