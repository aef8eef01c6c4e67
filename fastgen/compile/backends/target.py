"""The facts of a target on which sizes depend, known without building or loading anything."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fastgen.compile.weights.formats import QUANTIZED, QuantizedFormat


@dataclass(frozen=True)
class TargetFacts:
    """The facts of a target, which may be another machine: its ``name``; the ``arch`` that kernels are built for; the
    threads of a CPU that run them; the multiprocessors of a GPU."""

    name: str = "torch"
    arch: str = ""
    num_threads: int = 1
    num_sms: int = 0

    @property
    def has_kernels(self) -> bool:
        """Returns whether generated kernels compute; otherwise torch does."""
        return self.name != "torch"

    @property
    def quantized_formats(self) -> tuple[QuantizedFormat, ...]:
        """Returns the formats of quantized weights that the target multiplies."""
        return QUANTIZED[self.name]

    def activation_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Returns the dtype of activations in a model of ``dtype``. C++ kernels sum products in fp32 anyway, so there
        activations stay in fp32."""
        return torch.float32 if self.name == "cpp" else dtype
