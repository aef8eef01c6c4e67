"""What an engine's kernels come from and what its matrices are kept in, by the arguments of a load."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from fastgen.compile.build.bundle import SealedLoader, bundle_beside, bundle_target, find_beside, load_bundle
from fastgen.compile.host.device import Device
from fastgen.compile.weights.formats import QUANTIZED, QuantizedFormat
from fastgen.errors import InvalidArgumentError


def sealed_loader(
    sealed: bool | str | Path, weights: Path, device: Device, about: Mapping[str, str]
) -> SealedLoader | None:
    """Of the bundle that ``sealed=`` asks for, of :func:`bundle_flags`: ``True`` for that in the directory of the
    ``weights``, a path for that one, ``False`` for none.

    Raises :class:`InvalidArgumentError` for anything else, and :class:`fastgen.errors.BundleError`.
    """
    if sealed is False:
        return None
    if sealed is not True and not isinstance(sealed, (str, Path)):
        raise InvalidArgumentError(f"sealed={sealed!r}: expected True, False, or the directory of a sealed bundle")
    place = bundle_beside(weights, device, about) if sealed is True else Path(sealed).expanduser()
    return load_bundle(place, device, about)


def sealed_target(name: str, sealed: bool | str | Path, weights: Path, device: Device) -> tuple[str, str | None]:
    """The target of that name; of ``"auto"`` that of the bundle which ``sealed=`` asks for, where there is one. And the
    architecture of the bundle, if it is one of that target."""
    if sealed is False or not isinstance(sealed, (bool, str, Path)):
        return name, None
    place = find_beside(weights, device) if sealed is True else Path(sealed).expanduser()
    found = bundle_target(place) if place else None
    return found if found and name in ("auto", found[0]) else (name, None)


def bundle_flags(
    model: str | Path,
    dtype: torch.dtype,
    block_size: int,
    *,
    recipe: object = None,
    quantize: str | None = None,
    max_num_seqs: int | None = None,
    revision: str | None = None,
    allow_config_keys: Iterable[str] = (),
) -> dict[str, str]:
    """What a bundle is about: the model and flags by which ``fastgen kernels build`` writes it."""
    given = {
        "model": model,
        "recipe": recipe if isinstance(recipe, (str, Path)) else None,
        "dtype": str(dtype).removeprefix("torch."),
        "quantize": quantize,
        "block_size": block_size,
        "max_num_seqs": max_num_seqs,
        "revision": revision,
        "allow_config_key": " ".join(allow_config_keys) or None,
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
