"""Kernels that overlap: one starts while the ones before it on the stream end, and waits for what it needs of them.

NVIDIA calls it programmatic dependent launch; GPUs have it from Hopper on. A kernel's programs wait
(``griddepcontrol.wait``) until the kernels before have ended and all that they wrote can be seen. Then they let the
next kernel start (``griddepcontrol.launch_dependents``): a linear layer's when they have read its weights, others at
once. When all of them have done so, programs of the next kernel take what room there is, and wait in turn. So only two
kernels are under way at once. Programs that start long before they can run take the room of others unevenly, which
costs more than a launch.

What lies before the wait may read nothing that other kernels of a step write. Norms read their weights there, and
linear layers what they finish their sums with: bias, scales, positions, sines and cosines, places in the KV cache.
Their weights they do not: on an H200 a step was 1 % slower where they brought a part of these to the cache before the
wait, and up to 9 % where each brought those of the next.

Since each kernel waits before it ends, the end of one is the end of all before it. A kernel without the option, or a
library's, starts when all before it have ended.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace

from fastgen.compile.render import can_wait
from fastgen.compile.spec import KernelSpec

_FIRST = 90  # compute capability 9.0


def overlapped(spec: KernelSpec, arch: str) -> KernelSpec:
    """Returns the kernel as it is launched on ``arch``: overlapping, if that GPU and the kernel's template can.

    ``FASTGEN_OVERLAP=0`` in the environment turns it off.
    """
    capability = re.fullmatch(r"sm_(\d+)", arch)
    if capability is None or int(capability[1]) < _FIRST or os.environ.get("FASTGEN_OVERLAP") == "0":
        return spec
    return replace(spec, options={**spec.options, "launch_pdl": True}) if can_wait(spec) else spec
