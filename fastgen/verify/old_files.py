"""Writes files of weights as older versions of transformers did: other tensor names, and tensors that are not weights.

transformers reads a model's file with and without the prefix of its base model, and ignores tensors that are not
weights: buffers that it once saved, and those that a class lists as ignored.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file

# Names of buffers in old files: tables of angles.
_ONCE_SAVED: Final = ("inv_freq", "embed_positions")


def make_old(file: Path, model: Any, *, bare: bool, known: Collection[str] = ()) -> frozenset[str]:
    """Rewrites ``file``, the weights of a transformers ``model``, as an old file.

    If ``bare``, the prefix of the base model is removed. ``known`` are names of more tensors in such files, with
    ``{layer}`` for each layer. Returns the names of the tensors that are not weights.
    """
    prefix = f"{model.base_model_prefix}." if bare else ""
    layers = [str(layer) for layer in range(model.config.num_hidden_layers)]
    ignored = _ignored(model) | {name.replace("{layer}", layer) for name in known for layer in layers}
    tensors = load_file(file) | dict.fromkeys(ignored, torch.zeros(1))
    tensors = {name.removeprefix(prefix): tensor.clone() for name, tensor in tensors.items()}
    save_file(tensors, file, metadata={"format": "pt"})
    return frozenset(name.removeprefix(prefix) for name in ignored)


def _ignored(model: Any) -> set[str]:
    names = {name for name, _ in model.named_buffers() if name.rpartition(".")[2] in _ONCE_SAVED}
    modules = [name for name, _ in model.named_modules()]
    for pattern in getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ():
        stem, _, leaf = re.sub(r"\\(.)", r"\1", pattern).replace(".*", ".weight").strip("^$").rpartition(".")
        if stem.startswith(f"{model.base_model_prefix}."):
            names.add(f"{stem}.{leaf}")
        else:  # the pattern matches the end of a name
            names |= {f"{name}.{leaf}" for name in modules if name == stem or name.endswith(f".{stem}")}
    return names
