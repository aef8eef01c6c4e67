"""What an engine's kernels come from and what its matrices are kept in, by the arguments of a load."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from fastgen.compile.build.bundle import SealedLoader, bundle_beside, bundle_target, find_beside, load_bundle
from fastgen.compile.host.device import Device
from fastgen.compile.weights.formats import QUANTIZED, QuantizedFormat
from fastgen.errors import InvalidArgumentError
from fastgen.options import LoadOptions


def sealed_loader(
    sealed: bool | str | Path, weights: Path, device: Device, about: Mapping[str, str]
) -> SealedLoader | None:
    """Returns a loader of the bundle that ``sealed=`` names: ``True`` names the one in the directory of the
    ``weights``, a path that one, ``False`` none. It must be ``about`` the same model and flags.

    Raises :class:`fastgen.errors.BundleError`.
    """
    if sealed is False:
        return None
    place = bundle_beside(weights, device, about) if sealed is True else Path(sealed).expanduser()
    return load_bundle(place, device, about)


def sealed_target(name: str, sealed: bool | str | Path, weights: Path, device: Device) -> tuple[str, str | None]:
    """The target of that name; of ``"auto"`` that of the bundle which ``sealed=`` asks for, where there is one. And the
    architecture of the bundle, if it is one of that target."""
    if sealed is False:
        return name, None
    place = find_beside(weights, device) if sealed is True else Path(sealed).expanduser()
    found = bundle_target(place) if place else None
    return found if found and name in ("auto", found[0]) else (name, None)


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
    """The format that ``quantize=`` asks for, ``None`` for the model's dtype.

    Raises :class:`InvalidArgumentError` for one that the ``target`` cannot multiply.
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
