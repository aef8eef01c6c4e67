"""The sealed bundle that a load runs from, and the format that it quantizes matrices to."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from fastgen.compile.build.bundle import SealedLoader, bundle_beside, bundle_target, find_beside, load_bundle
from fastgen.compile.host.device import Device
from fastgen.compile.weights.formats import QUANTIZED, QuantizedFormat
from fastgen.errors import InvalidArgumentError
from fastgen.options import LoadOptions


def sealed_target(options: LoadOptions, weights: Path, device: Device) -> tuple[str, str | None]:
    """Returns the name of the target, and the architecture of the sealed bundle where that is for this target.

    The target ``"auto"`` becomes the target of the bundle, where there is one. ``weights`` is the model's directory.
    """
    if options.sealed is False:
        return options.target, None
    place = find_beside(weights, device) if options.sealed is True else Path(options.sealed).expanduser()
    found = bundle_target(place) if place else None
    return found if found and options.target in ("auto", found[0]) else (options.target, None)


def sealed_loader(options: LoadOptions, weights: Path, device: Device, about: Mapping[str, str]) -> SealedLoader | None:
    """Returns a loader of the sealed bundle: the one beside the ``weights``, or the directory that ``options`` name.

    The bundle must be ``about`` the same flags. Raises :class:`fastgen.errors.BundleError`.
    """
    if options.sealed is False:
        return None
    place = bundle_beside(weights, device, about) if options.sealed is True else Path(options.sealed).expanduser()
    return load_bundle(place, device, about)


def bundle_flags(
    options: LoadOptions, dtype: torch.dtype, *, block_size: int, max_num_seqs: int | None
) -> dict[str, str]:
    """Returns what a bundle is about: the model and the flags by which ``fastgen kernels build`` writes it, with the
    ``dtype`` and the sizes that ``options`` came to."""
    given = {
        "model": options.model,
        "recipe": options.recipe if isinstance(options.recipe, (str, Path)) else None,
        "dtype": str(dtype).removeprefix("torch."),
        "quantize": options.quantize,
        "block_size": block_size,
        "max_num_seqs": max_num_seqs,
        "revision": options.revision,
        "allow_config_key": " ".join(options.allow_config_keys) or None,
    }
    return {key: str(value) for key, value in given.items() if value is not None}


def parse_quantize(quantize: str | None, target: str) -> QuantizedFormat | None:
    """Returns the format of this name; ``None`` stands for the model's dtype.

    Raises :class:`InvalidArgumentError` for a format that the ``target`` cannot multiply.
    """
    if quantize is None:
        return None
    for known in QUANTIZED[target]:
        if known == quantize:
            return known
    others = [
        f"target={name!r} knows {', '.join(map(repr, known))}" for name, known in QUANTIZED.items() if name != target
    ]
    raise InvalidArgumentError(
        f"quantize={quantize!r}: target={target!r} knows {', '.join(map(repr, QUANTIZED[target]))} "
        f"({'; '.join(others)})"
    )
