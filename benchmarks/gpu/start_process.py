"""Starts an engine and runs it up to its first token; prints the seconds of each stage as JSON. See :mod:`…start`."""

import time

BEGIN = time.perf_counter()  # before anything is imported

import json  # noqa: E402
import sys  # noqa: E402

from benchmarks.gpu.llama import LLAMA_2_7B, TOY, llama_engine, submit  # noqa: E402
from benchmarks.gpu.measuring import clocked  # noqa: E402
from fastgen.compile.backends.backend import Backend  # noqa: E402
from fastgen.compile.host import device as devices  # noqa: E402
from fastgen.runtime.ranks import part  # noqa: E402
from fastgen.runtime.step.forward import CapturedForward  # noqa: E402


def main(*, toy: bool) -> dict[str, float]:
    seconds = {"import": time.perf_counter() - BEGIN}
    shape, device = (TOY, devices.current("cpu")) if toy else (LLAMA_2_7B, devices.current("cuda"))
    kv_tokens, max_num_seqs, token_budget = (200, 2, 4) if toy else (40_000, 256, 2048)
    start = time.perf_counter()
    with (
        clocked(Backend, "build", seconds),
        clocked(part, "load_weights", seconds),
        clocked(CapturedForward, "capture", seconds),
    ):
        engine = llama_engine(shape, device, kv_tokens=kv_tokens, max_num_seqs=max_num_seqs, token_budget=token_budget)
    seconds["engine"] = time.perf_counter() - start
    start = time.perf_counter()
    (generation,) = submit(engine, [(5, 1)], seed=0)
    while not generation.finished:
        engine.step()
    seconds["first_token"] = time.perf_counter() - start
    return seconds


if __name__ == "__main__":
    print(json.dumps(main(toy="--toy" in sys.argv[1:])))
