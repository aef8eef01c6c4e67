"""A kernel spec: one specialisation of an op for one target, as plain data, before any source exists."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, get_args

if TYPE_CHECKING:
    import torch

Target = Literal["triton", "cpp"]
Value = int | float | bool | str | None

# Kernels' short names of torch's dtypes; in parameters, in the names of kernels and in templates.
DTYPES = {
    "float32": "fp32",
    "float16": "fp16",
    "bfloat16": "bf16",
    "float8_e4m3fn": "fp8e4m3",
    "float8_e5m2": "fp8e5m2",
    "int8": "i8",
    "uint8": "u8",
    "int16": "i16",
    "int32": "i32",
    "int64": "i64",
    "bool": "i1",
}
# Types of numbers that each target takes. A Python number has no width, so others could not arrive as declared.
_SCALARS = {"triton": ("i32", "fp32"), "cpp": ("i32", "i64", "fp32")}
_TARGETS = get_args(Target)
_MAX_NAME = 120
# Most registers of a thread on NVIDIA's GPUs. Without a limit their assembler chooses one that leaves room for more
# programs, and may spill some registers for that.
MAX_REGISTERS = 255


@lru_cache(maxsize=1024)  # a model has hundreds of specs, and they share few keys
def _is_identifier(key: str) -> bool:
    return re.fullmatch(r"[A-Za-z]\w*", key, re.ASCII) is not None


@dataclass(frozen=True)
class Argument:
    """A parameter of the kernel's function: an address (``in``: read only; ``out``: written too) or a scalar."""

    name: str
    dtype: str
    kind: Literal["in", "out", "scalar"]

    def __post_init__(self) -> None:
        if not self.name.isidentifier():
            raise ValueError(f"argument {self.name!r}: not an identifier")
        if self.dtype not in DTYPES.values():
            raise ValueError(f"argument {self.name}: dtype {self.dtype!r} is none of {', '.join(DTYPES.values())}")

    @property
    def is_pointer(self) -> bool:
        return self.kind != "scalar"


@dataclass(frozen=True, eq=False)
class KernelSpec:
    """Holds what distinguishes one kernel from another of the same op.

    ``parameters`` are what its template may branch on or print; ``arguments`` are the parameters of the rendered
    function, in order; ``options`` are for the compiler (Triton's ``num_warps``, ``num_stages``). ``template`` is the
    template's file without suffixes, where it is not the op's name. ``needed_by`` lists the recipe
    nodes that need it; two specs that differ in nothing else are equal.

    Raises ``TypeError`` or ``ValueError`` for values that are not plain or names that are no identifiers.
    """

    op: str
    target: Target
    parameters: Mapping[str, Value]
    arguments: tuple[Argument, ...]
    options: Mapping[str, Value] = field(default_factory=dict)
    template: str = ""
    needed_by: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.target not in _TARGETS:
            raise ValueError(f"kernel spec {self.op}: target {self.target!r} is neither 'triton' nor 'cpp'")
        for key, value in (*self.parameters.items(), *self.options.items(), (self.op, None)):
            if not _is_identifier(key):
                raise ValueError(f"kernel spec {self.op}: {key!r} is not an identifier")
            if type(value) not in (int, float, bool, str, type(None)):
                raise TypeError(f"kernel spec {self.op}: {key} is a {type(value).__name__}, not a plain value")
        for argument in self.arguments:
            if not argument.is_pointer and argument.dtype not in _SCALARS[self.target]:
                raise ValueError(f"kernel spec {self.op}: scalar {argument.name} is {argument.dtype}")
        names = [argument.name for argument in self.arguments]
        if len(set(names)) != len(names):
            raise ValueError(f"kernel spec {self.op}: an argument occurs twice in {', '.join(names)}")
        object.__setattr__(self, "parameters", MappingProxyType(dict(self.parameters)))
        object.__setattr__(self, "options", MappingProxyType(dict(self.options)))
        object.__setattr__(self, "template", self.template or self.op)

    @cached_property
    def name(self) -> str:
        """Returns the name of the rendered function, a readable identifier: ``rms_norm_h4096_bf16_residual``.

        A number comes with its key, a string alone, and a flag that is set as its key. It is not unique: see
        ``digest``.
        """
        parts = [self.op, *(part for key, value in self.parameters.items() if (part := _name_part(key, value)))]
        return re.sub(r"[^a-z0-9_]+", "_", "_".join(parts).lower())[:_MAX_NAME].rstrip("_")

    @cached_property
    def digest(self) -> str:
        """Returns twelve hexadecimal digits of a hash of everything but ``needed_by``."""
        arguments = [[each.name, each.dtype, each.kind] for each in self.arguments]
        identity = [self.op, self.target, self.template, [*self.parameters.items()], arguments, [*self.options.items()]]
        return hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:12]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, KernelSpec) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __str__(self) -> str:
        settings = {**self.parameters, **self.options}
        shown = ", ".join(f"{key}={value}" for key, value in settings.items() if value is not None)
        return f"{self.op}({shown}) for {self.target}"


def power_of_2(number: int) -> int:
    """Returns the smallest power of 2 that is at least ``number``, which is at least 1."""
    return 1 << (number - 1).bit_length()


def dtype_name(dtype: torch.dtype) -> str:
    """Returns the short name of a torch dtype: ``bf16`` for ``torch.bfloat16``. Raises ``KeyError`` where
    it has none.
    """
    return DTYPES[str(dtype).removeprefix("torch.")]


def torch_dtype(name: str) -> torch.dtype:
    """Returns the torch dtype of a short name."""
    import torch

    dtype: torch.dtype = getattr(torch, next(each for each, short in DTYPES.items() if short == name))
    return dtype


def _name_part(key: str, value: Value) -> str:
    if value is None or value is False:
        return ""
    if value is True:
        return key
    return value if isinstance(value, str) else f"{key}{value}"
