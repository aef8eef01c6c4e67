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
            if not self._takes(arguments):  # the interpreter would accept it
                raise RuntimeError(NOT_BUILT_FOR)
            if self._is_interpreted:
                self._function[grid](*arguments, **self._options)
            else:
                self._launch_compiled(grid, arguments)
        except Exception as error:
            context: dict[str, Any] = {"grid": grid, "arguments": made_up(arguments), "options": self._options}
            context["interpreted"] = self._is_interpreted
            text = script("launch_triton", self.spec, self.source, **context)
            cause = _of_numpy(error) if self._is_interpreted else error
            raise launch_error(self.spec, self.source, arguments, cause, text) from error

    def again(self, grid: tuple[int, ...], arguments: tuple[Any, ...]) -> Callable[[], None]:
        """Returns a launch on the current stream of a GPU that was made before: it is not checked again, and takes
        addresses, so it keeps no tensor alive."""
        values = [each.data_ptr() if isinstance(each, Tensor) else each for each in arguments]
        stream = triton.runtime.driver.active.get_current_stream(self._device)
        x, y, z = (*grid, 1, 1)[:3]
        return partial(self._run, x, y, z, stream, self._handle, self._metadata, None, None, None, *values)

    def _takes(self, arguments: tuple[Any, ...]) -> bool:
        """Returns whether the kernel is built for these arguments."""
        for expected, value in zip(self._expected, arguments, strict=False):  # Triton counts them
            if expected == "i32":
                if type(value) is not int or value not in _I32:
                    return False
            elif expected == "fp32":
                if type(value) is not float:
                    return False
            elif not isinstance(value, Tensor) or value.dtype != expected or value.data_ptr() % _ALIGNMENT:
                return False
        return True

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
