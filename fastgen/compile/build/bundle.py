"""A sealed bundle: the built kernels of a model in one directory, to run where nothing may be compiled.

```
<bundle>/
    bundle.json                             what it is for, what built it, every kernel and the hash of every file
    kernels/rms_norm_h4096_bf16-0a1b2c3d/   a kernel: its source and what came of it
    modules/…cuda_utils.cpython-312-…so     what Triton would compile to launch them (for NVIDIA's)
```

It is taken as it was written or not at all: a file that differs, an architecture, Triton or machine that is not the one
here, settings that the engine does not have, and a kernel that it lacks or that this version of fastgen renders
differently are each refused with a sentence.
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
from fastgen.compile.build.cpp import CPP_ARCHES, CppBuilder, can_run
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
_REPEATED = ("allow_config_key",)
# What a bundle is about that makes its kernels other ones than another bundle's.
_DECIDING = ("dtype", "quantize", "block_size")


@dataclass(frozen=True)
class Bundle:
    """A bundle that was read whole and found undamaged. ``about`` is what the one who wrote it says it is for."""

    directory: Path
    manifest: Mapping[str, Any]

    @classmethod
    def open(cls, directory: Path) -> Bundle:
        """Raises :class:`BundleError` for a directory that is no bundle, or whose files are not the sealed ones."""
        try:
            manifest = json.loads((directory / _MANIFEST).read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise BundleError(f"{directory} is no bundle of kernels: it has no {_MANIFEST}; {_HOW}") from error
        except (OSError, ValueError) as error:
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
        """Kernels by the digest of their spec."""
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
        """The command that writes the like of it."""
        return f"build it again: {_command(self.about, self.arch, self.directory)}"


def _command(about: Mapping[str, str], arch: str, directory: Path | str) -> str:
    """That writes a bundle into ``directory``. ``about`` has the model and the flags that its kernels follow from; of
    one that may be given several times the values stand between spaces."""
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
    """Builds the kernels of ``specs`` and seals them in ``directory``, which is made, or replaced where it is a bundle.

    ``about`` is kept beside them: the ``model``, and the flags of ``fastgen kernels build`` that decide what is in it.
    Nothing is written unless all are built. Raises :class:`KernelError` for one that cannot be, and
    :class:`BundleError` for a directory that holds something else, or that cannot be written.
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
    """Before minutes are spent on building."""
    if not directory.exists():
        above = next(each for each in directory.parents if each.exists())
        if not above.is_dir() or not os.access(above, os.W_OK):
            raise BundleError(f"the bundle cannot be written to {directory}: {above} is no directory to write to")
    elif not (directory / _MANIFEST).is_file() and (not directory.is_dir() or any(directory.iterdir())):
        raise BundleError(f"{directory} is not empty and no bundle of kernels: name a directory that is new")


def _write(
    loader: KernelLoader, built: Sequence[tuple[KernelSpec, Entry]], directory: Path, about: Mapping[str, str]
) -> None:
    """Beside ``directory``, and then in its place."""
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

    ``how`` is the command that writes the bundle that was asked for.
    """

    def __init__(self, bundle: Bundle, builder: Builder, how: str):
        super().__init__(builder)
        self.bundle, self._how = bundle, how
        self.tuning = Tuning(self, known=bundle.manifest["tuning"])
        self.fence.close(f"this engine runs from the sealed bundle {bundle.directory}")

    def build(self, specs: Iterable[KernelSpec], progress: Progress | None = None) -> list[Entry]:
        """The bundle's entries of these specs, in order. Raises :class:`BundleError` naming those that it lacks."""
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
    """The bundle in the directory of a model's ``weights``: ``kernels-<arch>``, the best of those that ``device`` runs.

    Raises :class:`BundleError`, with the command that writes it, where there is none. ``about`` as in
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
    """That of :func:`bundle_beside`, if it is there."""
    places = (weights.absolute() / f"kernels-{arch}" for arch in _arches(device))
    return next((place for place in places if place.exists()), None)


def bundle_target(directory: Path) -> tuple[str, str] | None:
    """Whose kernels the bundle at ``directory`` has and for which architecture, as it says itself; ``None`` where
    nothing can be read there, of which :func:`load_bundle` tells."""
    try:
        manifest = json.loads((directory / _MANIFEST).read_text(encoding="utf-8"))
        target, arch = manifest["target"], manifest["arch"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return (target, arch) if target in QUANTIZED else None


def load_bundle(
    directory: Path | str, device: Device | None = None, about: Mapping[str, str] | None = None
) -> SealedLoader:
    """The bundle at ``directory`` for ``device``, by default the one here. No compiler needs to be installed.

    ``about`` is what it is wanted for, as in :func:`write_bundle`; another model of the same kernels is as good. Raises
    :class:`BundleError`, with how to build the right one, where it is damaged or for other hardware, versions, dtype,
    format or block size.
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
    # To load alone takes no compiler, so any name will do.
    builder = CppBuilder(bundle.arch, compiler="c++") if bundle.arch in CPP_ARCHES else make_builder(bundle.arch)
    if reason := builder.mismatch(bundle.manifest["versions"]):
        raise BundleError(f"the bundle {bundle.directory} cannot be used: {reason}; {bundle.how()}")
    builder.modules = bundle.directory / _MODULES
    how = bundle.how() if about is None else f"build the right one: {_command(about, bundle.arch, 'DIR')}"
    return SealedLoader(bundle, builder, how)


def _arches(device: Device) -> list[str]:
    """The architectures whose kernels run here, the best first: on a CPU those of its instructions, and interpreted."""
    if device.kind != "cpu":
        return [target_of(device)]
    return [*(arch for arch in CPP_ARCHES if can_run(arch, device)), INTERPRET]


def _right_arch(device: Device, about: Mapping[str, str]) -> str:
    """The one to build for on ``device``: on a CPU interpreted kernels where its own cannot multiply the format."""
    can_multiply = device.kind != "cpu" or about.get("quantize") in (None, *QUANTIZED["cpp"])
    return target_of(device) if can_multiply else INTERPRET


def _copy(spec: KernelSpec, entry: Entry, kernels: Path) -> dict[str, Any]:
    """Brings an entry's files into the bundle; returns what the manifest says of it."""
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
    """A hash of all else that the manifest says."""
    rest = {key: value for key, value in manifest.items() if key != "seal"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()
