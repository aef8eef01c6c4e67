"""A server's memory after large blocks were used by many threads."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

# Many threads free blocks of 24 MiB. Each raises the size from which glibc takes memory of its own for a block. Later
# blocks then come from heaps, and what is kept behind them holds their memory there.
_PROGRAM = """
import sys
from pathlib import Path
from threading import Barrier, Thread
from fastgen.serving.heap import return_what_is_freed

def resident_mib():
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS:")]
    return int(line.split()[1]) >> 10

if sys.argv[1] == "returned":
    return_what_is_freed()
all_have_one = Barrier(16)
before, kept = resident_mib(), []

def work():
    for _ in range(3):
        large = bytearray(24 << 20)
        all_have_one.wait()
        kept.append(bytes(1000))
        del large

threads = [Thread(target=work) for _ in range(16)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(resident_mib() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="about glibc")
def test_freed_memory_goes_back_to_the_system() -> None:
    def grown_mib(how: str) -> int:
        done = subprocess.run([sys.executable, "-c", _PROGRAM, how], stdout=subprocess.PIPE, text=True, check=True)
        return int(done.stdout)

    assert grown_mib("kept") > 100
    assert grown_mib("returned") < 40
