"""Runs every kind of kernel on a small case, once, and prints the names of the kernels: for :mod:`…sanitize`."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace


def main(*, toy: bool) -> None:
    os.environ["TRITON_INTERPRET"] = "1" if toy else "0"  # before Triton is imported

    from benchmarks.gpu import attention, elementwise, few_row_linear, moe, sampling
    from benchmarks.gpu.measuring import Bench, Limits
    from fastgen.compile.build.builder import Kernel
    from fastgen.compile.build.loader import KernelLoader
    from fastgen.compile.build.triton import TritonBuilder, triton_arch
    from fastgen.compile.host.device import current
    from fastgen.compile.ops.attention.shape import AttentionShape
    from fastgen.compile.spec import KernelSpec

    names: list[str] = []

    class Noting(KernelLoader):
        def load(self, spec: KernelSpec) -> Kernel:
            names.append(spec.name)
            return super().load(spec)

    device = current("cpu" if toy else "cuda")
    bench = Bench(device, Noting(TritonBuilder(triton_arch(device))), Limits(1.0, 1.0), toy=True)
    dtype = attention.TOY.dtype if toy else "bf16"
    for shape in (replace(attention.TOY, dtype=dtype), AttentionShape(6, 1, 16, 4, dtype, 0.25)):
        attention.check(shape, bench)
    elementwise.check(elementwise.TOY, 5, bench)
    few_row_linear.check(few_row_linear.TOY, bench)
    moe.check(moe.TOY, 9, bench)
    sampling.check(70, 5, bench)
    print(json.dumps(sorted(set(names))), flush=True)


if __name__ == "__main__":
    main(toy="--toy" in sys.argv[1:])
