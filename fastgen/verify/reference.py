"""The reference of a verification: a model that is known to be correct, traced module by module.

A reference is traced by hooks on its named modules. It is the model of transformers if transformers knows the
architecture; otherwise any ``torch.nn.Module`` that maps ``input_ids [1, T]`` to logits, or recorded activations.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from fastgen.errors import InvalidArgumentError

Prompts = Sequence[Sequence[int]]


@dataclass
class Trace:
    """The activations of a model for some prompts, whose tokens are concatenated: every tensor is ``[T, ...]``.

    ``inputs`` and ``outputs`` are keyed by module name, as in the checkpoint; ``order`` is the order in which modules
    finished. ``keys`` and ``values`` hold the cache of each attention: ``[tokens, K, D]`` for every prompt, of which
    the reference may have kept only the last tokens. ``logits [T, V]`` may be missing.
    """

    inputs: dict[str, Tensor] = field(default_factory=dict)
    outputs: dict[str, Tensor] = field(default_factory=dict)
    order: dict[str, int] = field(default_factory=dict)
    keys: list[list[Tensor]] = field(default_factory=list)
    values: list[list[Tensor]] = field(default_factory=list)
    logits: Tensor | None = None


class Reference(Protocol):
    """A model that a recipe is compared with."""

    @property
    def prompts(self) -> Prompts | None:
        """The only prompts that it can run; ``None`` if it can run any."""
        ...

    def trace(self, prompts: Prompts) -> Trace: ...

    def probe(self, module: str, x: Tensor) -> Tensor | None:
        """Runs the named module alone on ``x [T, ...]``; returns ``None`` if that is not possible."""
        ...

    def attribute(self, module: str, name: str) -> Any:
        """Returns an attribute of the named module; ``None`` if it has none."""
        ...


class ModuleReference:
    """A ``torch.nn.Module`` that takes ``input_ids [1, T]`` and returns logits, or an object or mapping with
    ``logits``.

    If the result has ``past_key_values`` with ``layers`` of ``keys`` and ``values``, they are compared too.
    """

    prompts: Prompts | None = None

    def __init__(self, module: nn.Module):
        self.module = module.eval()
        self._modules = dict(module.named_modules())

    @torch.no_grad()
    def trace(self, prompts: Prompts) -> Trace:
        pieces = [self._one(prompt) for prompt in prompts]
        trace = Trace(order=pieces[0].order)
        for side in ("inputs", "outputs"):
            for name in getattr(pieces[0], side):
                parts = [getattr(piece, side).get(name) for piece in pieces]
                if all(part is not None and part.shape[1:] == parts[0].shape[1:] for part in parts):
                    getattr(trace, side)[name] = torch.cat(parts)
        trace.keys = [[one for part in layer for one in part] for layer in _columns([p.keys for p in pieces])]
        trace.values = [[one for part in layer for one in part] for layer in _columns([p.values for p in pieces])]
        if all(piece.logits is not None for piece in pieces):
            trace.logits = torch.cat([piece.logits for piece in pieces if piece.logits is not None])
        return trace

    def _one(self, prompt: Sequence[int]) -> Trace:
        trace = Trace()
        with self._hooks(trace, len(prompt)):
            try:
                answer = self.module(torch.tensor([list(prompt)]))
            except Exception as error:  # the module is foreign code and may raise any error
                problem = f"{type(error).__name__}: {error}"
                raise InvalidArgumentError(f"the reference fails for {len(prompt)} tokens: {problem}") from error
        logits = _get(answer, "logits") if not isinstance(answer, Tensor) else answer
        if isinstance(logits, Tensor):
            trace.logits = logits.reshape(len(prompt), -1).float()
        for layer in getattr(_get(answer, "past_key_values"), "layers", ()):
            keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
            if isinstance(keys, Tensor) and isinstance(values, Tensor) and keys.ndim == values.ndim == 4:
                trace.keys.append([keys[0].transpose(0, 1).clone()])
                trace.values.append([values[0].transpose(0, 1).clone()])
        return trace

    @contextmanager
    def _hooks(self, trace: Trace, num_tokens: int) -> Iterator[None]:
        calls: defaultdict[str, int] = defaultdict(int)

        def record(name: str) -> Any:
            def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
                calls[name] += 1
                if calls[name] > 1:
                    return
                trace.order[name] = len(trace.order)
                given = next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)), None)
                made = output if isinstance(output, Tensor) else next(iter(_tensors(output)), None)
                for side, x in ((trace.inputs, given), (trace.outputs, made)):
                    rows = None if x is None else _by_token(x, num_tokens)
                    if rows is not None:
                        side[name] = rows.float().clone()

            return hook

        handles = [
            module.register_forward_hook(record(name), with_kwargs=True)
            for name, module in self._modules.items()
            if name
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @torch.no_grad()
    def probe(self, module: str, x: Tensor) -> Tensor | None:
        if module not in self._modules:
            return None
        try:
            answer = self._modules[module](x.unsqueeze(0))
        except Exception:  # foreign code; the module may need more than one input
            return None
        return answer.squeeze(0) if isinstance(answer, Tensor) else None

    def attribute(self, module: str, name: str) -> Any:
        return getattr(self._modules.get(module), name, None)


class RecordedReference:
    """Activations recorded in a safetensors file.

    The file holds ``input_ids [T]`` of one prompt; the output of a module under its name and its input under
    ``<name>.input``, each ``[T, ...]``; and ``logits [T, V]``. Everything except the ids may be left out.
    """

    def __init__(self, file: str | Path):
        try:
            tensors = load_file(file)
        except (SafetensorError, OSError) as error:
            raise InvalidArgumentError(f"{file}: cannot be read as recorded activations: {error}") from None
        if "input_ids" not in tensors or tensors["input_ids"].is_floating_point():
            raise InvalidArgumentError(f"{file}: recorded activations need an integer tensor input_ids")
        prompt = tensors.pop("input_ids").flatten().tolist()
        self.prompts: Prompts | None = [prompt]
        self._trace = Trace()
        for name, x in tensors.items():
            rows = _by_token(x, len(prompt))
            if rows is None:
                raise InvalidArgumentError(f"{file}: {name} is {list(x.shape)}, but there are {len(prompt)} tokens")
            if name == "logits":
                self._trace.logits = rows.float()
            elif name.endswith(".input"):
                self._trace.inputs[name.removesuffix(".input")] = rows.float()
            else:
                self._trace.outputs[name] = rows.float()

    def trace(self, prompts: Prompts) -> Trace:
        return self._trace

    def probe(self, module: str, x: Tensor) -> Tensor | None:
        return None

    def attribute(self, module: str, name: str) -> Any:
        return None


def _by_token(x: Tensor, num_tokens: int) -> Tensor | None:
    """Returns ``x`` as ``[T, ...]``: without batch axis, tokens before heads; ``None`` if no axis has ``T`` entries."""
    while x.ndim > 1 and x.shape[0] == 1 != num_tokens:
        x = x[0]
    if x.ndim and x.shape[0] == num_tokens:
        return x
    return x.transpose(0, 1) if x.ndim == 3 and x.shape[1] == num_tokens else None


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from (item for item in value.values() if isinstance(item, Tensor))
    elif isinstance(value, list | tuple):
        yield from (item for item in value if isinstance(item, Tensor))


def _get(answer: Any, name: str) -> Any:
    return answer.get(name) if isinstance(answer, Mapping) else getattr(answer, name, None)


def _columns(rows: list[list[list[Tensor]]]) -> list[tuple[list[Tensor], ...]]:
    return list(zip(*rows, strict=True)) if len({len(row) for row in rows}) == 1 else []
