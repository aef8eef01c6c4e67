"""A loaded Triton kernel: interpreted, or on a GPU launched without the just-in-time compiler.

That compiler takes longer to look at the arguments of a launch than the GPU takes for a small kernel. Here the
arguments are only compared with those that the spec declares.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import triton
from torch import Tensor

from fastgen.compile.build.builder import BuiltKernel
from fastgen.compile.build.reproduce import launch_error, made_up, script
from fastgen.compile.spec import KernelSpec, torch_dtype
from fastgen.errors import KernelError

NOT_BUILT_FOR = "it was not built for such arguments (other dtypes, or an address not aligned to 16)"
_ALIGNMENT = 16  # bytes
_I32 = range(-(1 << 31), 1 << 31)


class TritonKernel(BuiltKernel):
    """Launches a function of a rendered module on tensors whose addresses are multiples of 16 bytes.

    ``compiled`` is what Triton loaded onto the current GPU. Without it the function is interpreted.
    """

    def __init__(
        self, spec: KernelSpec, source: Path, function: Any, options: Mapping[str, Any], compiled: Any | None = None
    ):
        super().__init__(spec, source)
        self._function, self._options, self._compiled = function, options, compiled
        self._is_interpreted = compiled is None
        # The dtype of each address; for a number its short name.
        self._expected = [torch_dtype(each.dtype) if each.is_pointer else each.dtype for each in spec.arguments]
        if compiled is not None:
            self._run, self._handle, self._metadata = compiled.run, compiled.function, compiled.packed_metadata
            self._device = triton.runtime.driver.active.get_current_device()

    def launch(self, grid: tuple[int, ...], *arguments: Any) -> None:
        if 0 in grid:
            return
        try:
            self._addresses(arguments)  # the interpreter would accept others
            if self._is_interpreted:
                self._function[grid](*arguments, **self._options)
            else:
                self._launch_compiled(grid, arguments)
        except Exception as error:
            raise self._launch_error(error, grid, arguments) from error

    def launch_noted(self, grid: tuple[int, ...], arguments: tuple[Any, ...]) -> Callable[[], None]:
        """Launches it on the current stream of a GPU. Returns the same launch to be made again, which takes addresses,
        so it keeps no tensor alive. Triton does not see whether a tensor is on this GPU.
        """
        try:
            values = self._addresses(arguments)
            stream = triton.runtime.driver.active.get_current_stream(self._device)
            x, y, z = (*grid, 1, 1)[:3]
            again = partial(self._run, x, y, z, stream, self._handle, self._metadata, None, None, None, *values)
            again()
        except Exception as error:
            raise self._launch_error(error, grid, arguments) from error
        return again

    def _addresses(self, arguments: tuple[Any, ...]) -> list[int | float]:
        """Returns the arguments with the addresses of tensors. Raises ``RuntimeError`` where the kernel is not built
        for them."""
        values = []
        for expected, value in zip(self._expected, arguments, strict=False):  # Triton counts them
            if expected == "i32":
                takes = type(value) is int and value in _I32
            elif expected == "fp32":
                takes = type(value) is float
            elif takes := isinstance(value, Tensor) and value.dtype == expected:
                value = value.data_ptr()
                takes = not value % _ALIGNMENT
            if not takes:
                raise RuntimeError(NOT_BUILT_FOR)
            values.append(value)
        return values

    def _launch_error(self, error: Exception, grid: tuple[int, ...], arguments: tuple[Any, ...]) -> KernelError:
        context: dict[str, Any] = {"grid": grid, "arguments": made_up(arguments), "options": self._options}
        context["interpreted"] = self._is_interpreted
        text = script("launch_triton", self.spec, self.source, **context)
        cause = _of_numpy(error) if self._is_interpreted else error
        return launch_error(self.spec, self.source, arguments, cause, text)

    def _launch_compiled(self, grid: tuple[int, ...], arguments: tuple[Any, ...]) -> None:
        if len(arguments) != len(self._expected):
            raise RuntimeError(NOT_BUILT_FOR)
        driver = triton.runtime.driver.active
        device = driver.get_current_device()
        if device != self._device:
            raise RuntimeError(f"it was loaded onto GPU {self._device}, and GPU {device} is the current one")
        stream, x, y, z = driver.get_current_stream(device), *(*grid, 1, 1)[:3]
        hooks = [_hook(triton.knobs.runtime.launch_enter_hook), _hook(triton.knobs.runtime.launch_exit_hook)]
        assert self._compiled is not None
        metadata = None if hooks == [None, None] else self._compiled.launch_metadata(grid, stream, *arguments)
        self._run(x, y, z, stream, self._handle, self._metadata, metadata, *hooks, *arguments)


def _hook(chain: Any) -> Any:
    """Returns the hook that profilers added to ``chain``; ``None`` if there is none."""
    return chain if getattr(chain, "calls", chain) else None


def _of_numpy(error: Exception) -> Exception:
    """Returns a clear error where Triton's interpreter (3.6, maybe others) needs a feature that NumPy 2.4 removed."""
    if "only 0-dimensional arrays can be converted to Python scalars" not in str(error):
        return error
    versions = f"Triton {triton.__version__} does not work with NumPy {numpy.__version__}"
    return RuntimeError(f"the interpreter of {versions}: install a newer Triton, or numpy<2.4")
