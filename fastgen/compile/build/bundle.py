"""A sealed bundle: the built kernels of a model in one directory, to run where nothing may be compiled.

```
<bundle>/
    bundle.json                             its purpose, its tools, every kernel and the hash of every file
    kernels/rms_norm_h4096_bf16-0a1b2c3d/   a kernel: its source and its binaries
    modules/…cuda_utils.cpython-312-…so     modules by which Triton launches them (NVIDIA)
```

It is used exactly as it was written or not at all. Each of these is refused with a sentence: a changed file, another
architecture, Triton or machine, other settings than the engine's, a missing kernel, and a kernel that this version of
fastgen renders differently.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from fastgen.compile.build.autotune import Tuning
from fastgen.compile.build.builder import INTERPRET, Builder
from fastgen.compile.build.cache import Entry, file_hash, publish, remove, sync
from fastgen.compile.build.cpp import CPP_ARCHES, CppBuilder, runnable_arches
from fastgen.compile.build.loader import KernelLoader, Progress, make_builder, target_of
from fastgen.compile.build.sources import body_hash
from fastgen.compile.host.device import Device, current
from fastgen.compile.render import SUFFIXES
from fastgen.compile.spec import KernelSpec
from fastgen.compile.weights.formats import QUANTIZED
from fastgen.errors import BundleError

_MANIFEST = "bundle.json"
_KERNELS, _MODULES = "kernels", "modules"
_FORMAT = 2
# Flags that may be repeated; their values in ``about`` are separated by spaces.
_REPEATED = ("allow_config_key",)
# The settings in ``about`` that decide which kernels a bundle has.
_DECIDING = ("dtype", "quantize", "block_size")


@dataclass(frozen=True)
class Bundle:
    """A bundle whose files were all read and found undamaged. ``about`` has the settings that it was written for."""

    directory: Path
    manifest: Mapping[str, Any]

    @classmethod
    def open(cls, directory: Path) -> Bundle:
        """Reads a bundle. Raises :class:`BundleError` for another directory, and for changed files."""
        try:
            manifest = json.loads((directory / _MANIFEST).read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise BundleError(f"{directory} is no bundle of kernels: it has no {_MANIFEST}; {_HOW}") from error
        except (OSError, ValueError, RecursionError) as error:
            raise BundleError(f"the bundle {directory} is damaged: {_MANIFEST}: {error}; {_HOW}") from error
        if not isinstance(manifest, dict) or manifest.get("format") != _FORMAT:
            raise BundleError(f"the bundle {directory} is of another version of fastgen; {_HOW}")
        if manifest.get("seal") != _seal(manifest):
            raise BundleError(f"the bundle {directory} is damaged: {_MANIFEST} was changed; {_HOW}")
        files = (file for folder in (_KERNELS, _MODULES) for file in (directory / folder).rglob("*"))
        there = {str(file.relative_to(directory)) for file in files if not file.is_dir()}
        if odd := sorted(there ^ manifest["files"].keys()):
            what = "is missing" if odd[0] not in there else "does not belong to it"
            raise BundleError(f"the bundle {directory} is damaged: {odd[0]} {what}; {_HOW}")
        for file, expected in manifest["files"].items():
            try:
                found = file_hash(directory / file)
            except OSError as error:
                raise BundleError(f"the bundle {directory} cannot be read: {file}: {error.strerror}; {_HOW}") from error
            if found != expected:
                raise BundleError(f"the bundle {directory} is damaged: {file} was changed; {_HOW}")
        return cls(directory, manifest)

    @property
    def arch(self) -> str:
        return str(self.manifest["arch"])

    @property
    def about(self) -> Mapping[str, str]:
        about: Mapping[str, str] = self.manifest["about"]
        return about

    @property
    def size_bytes(self) -> int:
        return sum((self.directory / file).stat().st_size for file in (_MANIFEST, *self.manifest["files"]))

    @cached_property
    def entries(self) -> Mapping[str, Entry]:
        """Returns the kernels by the digest of their spec."""
        return {
            digest: Entry(
                name=kernel["name"],
                arch=self.arch,
                directory=self.directory / _KERNELS / kernel["directory"],
                source=self.directory / _KERNELS / kernel["directory"] / kernel["source"],
                report=kernel["report"],
            )
            for digest, kernel in self.manifest["kernels"].items()
        }

    def how(self) -> str:
        """Returns a hint with the command that writes the same bundle."""
        return f"build it again: {_command(self.about, self.arch, self.directory)}"


def _command(about: Mapping[str, str], arch: str, directory: Path | str) -> str:
    """Returns the command that writes a bundle into ``directory``. ``about`` has the model and the flags that decide
    its kernels; the values of a repeated flag are separated by spaces.
    """
    flags = [
        f"--{key.replace('_', '-')} {shlex.quote(value)}"
        for key in about
        if key != "model"
        for value in (about[key].split() if key in _REPEATED else [about[key]])
    ]
    model = shlex.quote(about["model"]) if "model" in about else "MODEL"
    return " ".join(["fastgen kernels build", model, "--target", arch, *flags, "--output", str(directory)])


_HOW = f"build it again: {_command({}, 'ARCH', 'DIR')}"


def write_bundle(
    loader: KernelLoader,
    specs: Iterable[KernelSpec],
    directory: Path,
    *,
    about: Mapping[str, str],
    progress: Progress | None = None,
) -> Bundle:
    """Builds the kernels of ``specs`` and seals them in ``directory``, which is new, or a bundle that is replaced.

    ``about`` is kept beside them: the ``model``, and the flags of ``fastgen kernels build`` that decide the kernels.
    Nothing is written unless all are built. Raises :class:`KernelError` for a kernel that cannot be built, and
    :class:`BundleError` for a directory that holds other files, or that cannot be written.
    """
    try:
        _check_place(directory)
        wanted = list(dict.fromkeys(specs))
        entries = loader.build(wanted, progress)
        _write(loader, list(zip(wanted, entries, strict=True)), directory, about)
    except OSError as error:
        raise BundleError(f"the bundle cannot be written to {directory}: {error.strerror or error}") from error
    return Bundle.open(directory)


def _check_place(directory: Path) -> None:
    """Refuses a directory before minutes are spent on building."""
    if not directory.exists():
        above = next(each for each in directory.parents if each.exists())
        if not above.is_dir() or not os.access(above, os.W_OK):
            raise BundleError(f"the bundle cannot be written to {directory}: {above} is no directory to write to")
    elif not (directory / _MANIFEST).is_file() and (not directory.is_dir() or any(directory.iterdir())):
        raise BundleError(f"{directory} is not empty and no bundle of kernels: name a directory that is new")


def _write(
    loader: KernelLoader, built: Sequence[tuple[KernelSpec, Entry]], directory: Path, about: Mapping[str, str]
) -> None:
    """Writes the bundle beside ``directory`` first, and then moves it there."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    draft = directory.with_name(f".{directory.name}.{uuid.uuid4().hex}")
    try:
        kernels = {spec.digest: _copy(spec, entry, draft / _KERNELS) for spec, entry in built}
        loader.builder.accompany(built, draft / _MODULES)
        files = sorted(file for file in draft.rglob("*") if file.is_file())
        manifest: dict[str, Any] = {
            "format": _FORMAT,
            "about": dict(about),
            "target": loader.builder.target,
            "arch": loader.builder.arch,
            "versions": dict(loader.builder.versions()),
            "tuning": loader.tuning.chosen,
            "kernels": kernels,
            "files": {str(file.relative_to(draft)): file_hash(file) for file in files},
        }
        manifest["seal"] = _seal(manifest)
        (draft / _MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
        for file in (*files, draft / _MANIFEST):
            sync(file)
        publish(draft, directory)
    finally:
        remove(draft)


class SealedLoader(KernelLoader):
    """Loads the kernels of one bundle and builds nothing. Made by :func:`load_bundle`.

    ``how`` is a hint with the command that writes the needed bundle.
    """

    def __init__(self, bundle: Bundle, builder: Builder, how: str):
        super().__init__(builder)
        self.bundle, self._how = bundle, how
        self.tuning = Tuning(self, known=bundle.manifest["tuning"])
        self.fence.close(f"this engine runs from the sealed bundle {bundle.directory}")

    def build(self, specs: Iterable[KernelSpec], progress: Progress | None = None) -> list[Entry]:
        """Returns the bundle's entries of these specs, in order. Raises :class:`BundleError` for kernels that are
        missing or of another source.
        """
        wanted = list(specs)
        lacking = list(dict.fromkeys(spec.name for spec in wanted if spec.digest not in self.bundle.entries))
        if lacking:
            about = ", ".join(f"{key} {value}" for key, value in self.bundle.about.items())
            raise BundleError(
                f"the bundle {self.bundle.directory} ({about}) lacks {len(lacking)} of {len(set(wanted))} kernels that "
                f"are needed here ({', '.join(lacking[:3])}{' …' if len(lacking) > 3 else ''}); {self._how}"
            )
        for spec in wanted:
            if self.bundle.manifest["kernels"][spec.digest]["body"] != body_hash(spec):
                raise BundleError(
                    f"the bundle {self.bundle.directory} has kernel {spec.name} of another source than this version of "
                    f"fastgen renders; {self._how}"
                )
        return [self.bundle.entries[spec.digest] for spec in wanted]

    def find(self, spec: KernelSpec) -> Entry | None:
        return self.bundle.entries.get(spec.digest)


def bundle_beside(weights: Path, device: Device, about: Mapping[str, str]) -> Path:
    """Returns the bundle in the directory of a model's ``weights``: ``kernels-<arch>``, the best that ``device`` runs.

    Raises :class:`BundleError`, with the command that writes it, where there is none. For ``about`` see
    :func:`write_bundle`.
    """
    if found := find_beside(weights, device):
        return found
    right = _right_arch(device, about)
    place = weights.absolute() / f"kernels-{right}"
    raise BundleError(
        f"no sealed bundle lies beside the weights: there is no {place}; build it: {_command(about, right, place)}"
    )


def find_beside(weights: Path, device: Device) -> Path | None:
    """Returns the bundle of :func:`bundle_beside`, if it exists."""
    places = (weights.absolute() / f"kernels-{arch}" for arch in _arches(device))
    return next((place for place in places if place.exists()), None)


def bundle_target(directory: Path) -> tuple[str, str] | None:
    """Returns the target and the architecture of the bundle at ``directory``; ``None`` where they cannot be read, which
    :func:`load_bundle` reports.
    """
    try:
        manifest = json.loads((directory / _MANIFEST).read_text(encoding="utf-8"))
        target, arch = manifest["target"], manifest["arch"]
        return (target, arch) if target in QUANTIZED else None
    except (OSError, ValueError, RecursionError, KeyError, TypeError):
        return None


def load_bundle(
    directory: Path | str, device: Device | None = None, about: Mapping[str, str] | None = None
) -> SealedLoader:
    """Loads the bundle at ``directory`` for ``device``, by default this machine's. No compiler needs to be installed.

    ``about`` has the needed settings, see :func:`write_bundle`; the model may be another one with the same kernels.
    Raises :class:`BundleError`, with the command that builds the right one, where the bundle is damaged or is for other
    hardware, versions, dtype, format or block size.
    """
    bundle = Bundle.open(Path(directory).absolute())
    device = device or current()
    wanted = bundle.about if about is None else about
    if bundle.arch not in _arches(device):
        right = _right_arch(device, wanted)
        raise BundleError(
            f"the bundle {bundle.directory} is for {bundle.arch}, and {device.name} needs one for {right}: "
            f"{_command(wanted, right, 'DIR')}"
        )
    if differing := next((key for key in _DECIDING if wanted.get(key) != bundle.about.get(key)), None):
        there, here = (each.get(differing, "none") for each in (bundle.about, wanted))
        raise BundleError(
            f"the bundle {bundle.directory} is for {differing.replace('_', ' ')} {there}, and {here} is asked for; "
            f"build the right one: {_command(wanted, bundle.arch, 'DIR')}"
        )
    # Loading needs no compiler, so any name will do.
    builder = CppBuilder(bundle.arch, compiler="c++") if bundle.arch in CPP_ARCHES else make_builder(bundle.arch)
    if reason := builder.mismatch(bundle.manifest["versions"]):
        raise BundleError(f"the bundle {bundle.directory} cannot be used: {reason}; {bundle.how()}")
    builder.modules = bundle.directory / _MODULES
    how = bundle.how() if about is None else f"build the right one: {_command(about, bundle.arch, 'DIR')}"
    return SealedLoader(bundle, builder, how)


def _arches(device: Device) -> list[str]:
    """Returns the architectures whose kernels run here, the best first; on a CPU interpreted ones come last."""
    if device.kind != "cpu":
        return [target_of(device)]
    return [*runnable_arches(device), INTERPRET]


def _right_arch(device: Device, about: Mapping[str, str]) -> str:
    """Returns the architecture to build for on ``device``: on a CPU ``interpret`` for formats without C++ kernels."""
    can_multiply = device.kind != "cpu" or about.get("quantize") in (None, *QUANTIZED["cpp"])
    return target_of(device) if can_multiply else INTERPRET


def _copy(spec: KernelSpec, entry: Entry, kernels: Path) -> dict[str, Any]:
    """Copies an entry's files into the bundle; returns its part of the manifest."""
    place = kernels / f"{spec.name}-{spec.digest}"
    place.mkdir(parents=True)
    for file in entry.files():
        shutil.copyfile(file, place / file.name)
    return {
        "name": spec.name,
        "spec": str(spec),
        "needed_by": list(spec.needed_by),
        "directory": place.name,
        "source": f"{spec.name}{SUFFIXES[spec.target]}",
        "body": body_hash(spec),
        "report": dict(entry.report),
    }


def _seal(manifest: Mapping[str, Any]) -> str:
    """Returns a hash of the rest of the manifest."""
    rest = {key: value for key, value in manifest.items() if key != "seal"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()
