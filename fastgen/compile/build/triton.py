"""The ``triton`` target: kernels built ahead of time by worker processes, for a GPU that need not be present.

A worker (:mod:`fastgen.compile.build.triton_worker`) makes exactly what Triton's just-in-time compiler would make of
the declared arguments, and keys it the same way; loading on a GPU hands these files to the just-in-time compiler, which
then has nothing to compile. Launches go around it (:mod:`fastgen.compile.build.triton_kernel`): one with other
arguments than a kernel was built for is an error, at any time. The architecture ``interpret`` runs kernels in Python on
a CPU instead.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import IO, Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.errors import TritonError

from fastgen.compile.build.builder import INTERPRET, BuildFailure
from fastgen.compile.build.cache import Entry
from fastgen.compile.build.reproduce import script
from fastgen.compile.build.triton_kernel import NOT_BUILT_FOR, TritonKernel
from fastgen.compile.build.triton_modules import modules_from
from fastgen.compile.build.triton_worker import FlatCache, parse_arch, stand_in
from fastgen.compile.host.device import Device
from fastgen.compile.spec import KernelSpec, Target, torch_dtype
from fastgen.errors import KernelError

TRITON_ARCHES = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "gfx942")
_PACKAGE = "fastgen_kernels"
# Given with every kernel, since Triton's default differs by version.
_OPTIONS: dict[str, Any] = {"enable_fp_fusion": True}
_loading = threading.Lock()
_log = logging.getLogger(__name__)


def triton_arch(device: Device) -> str:
    """Returns ``sm_90`` for an NVIDIA GPU of capability 9.0; on a CPU ``interpret``."""
    return INTERPRET if device.capability is None else "sm_{}{}".format(*device.capability)


class TritonBuilder:
    """Builds for ``arch``: one of :data:`TRITON_ARCHES` or the like, or ``interpret``.

    Raises :class:`KernelError` for ``interpret`` in a process that was started without ``TRITON_INTERPRET=1``, which
    Triton reads when it is imported, and ``ValueError`` for a name that is no architecture, or none that Triton knows.
    """

    target: Target = "triton"
    launches_natively = False

    def __init__(self, arch: str):
        self.arch = arch
        self.modules: Path | None = None
        self._gpu = None if arch == INTERPRET else parse_arch(arch)
        self.is_for_gpu = self._gpu is not None
        if self._gpu is not None and arch not in TRITON_ARCHES and arch not in _others(self._gpu):
            raise ValueError(f"architecture {arch!r}: Triton {triton.__version__} does not know it")
        self._workers = _Workers(arch)
        if self._gpu is None and not triton.knobs.runtime.interpret:
            raise KernelError(
                "Triton kernels need a GPU; to interpret them on a CPU, set TRITON_INTERPRET=1 at the start"
            )

    def versions(self) -> Mapping[str, str]:
        versions = {"triton": triton.__version__}
        if self._gpu is not None:
            from triton._C.libtriton import get_cache_invalidating_env_vars
            from triton.compiler.compiler import make_backend

            versions["backend"] = make_backend(self._gpu).hash()  # includes the assembler's version
            versions["environment"] = json.dumps(get_cache_invalidating_env_vars(), sort_keys=True)
        return versions

    def built_by(self) -> Mapping[str, str]:
        if self._gpu is None:
            return self.versions()
        from triton.runtime.cache import triton_key

        # A hash of Triton's files. It includes a library that differs between the wheels of two versions of Python.
        return {**self.versions(), "installation": hashlib.sha256(triton_key().encode()).hexdigest()[:16]}

    def mismatch(self, versions: Mapping[str, str]) -> str | None:
        here = self.versions()
        if versions.get("triton") != here["triton"]:  # launches pass arguments in the way of the version that built
            return f"it was built by Triton {versions.get('triton')}, and Triton {here['triton']} is installed here"
        differing = next((name for name in here if versions.get(name) != here[name]), None)
        if differing is None:
            return None
        there, now = (" ".join(str(each.get(differing)).split()) for each in (versions, here))
        return f"Triton's {differing} was {there} where it was built, and is {now} here"

    def build(self, spec: KernelSpec, source: Path) -> Mapping[str, Any]:
        if self._gpu is None:
            try:
                compile(source.read_text(encoding="utf-8"), source.name, "exec")
            except SyntaxError as error:
                raise BuildFailure(str(error), str(error), script("build_python", spec, source)) from error
            return {}
        answer = self._workers.ask(self._question(spec, source))
        if "error" in answer:
            raise BuildFailure(answer["error"], answer["log"], self._script(spec, source))
        report: Mapping[str, Any] = answer["report"]
        return report

    def end_builds(self) -> None:
        self._workers.close()

    def accompany(self, built: Sequence[tuple[KernelSpec, Entry]], directory: Path) -> None:
        if self._gpu is None or self._gpu.backend != "cuda":
            return
        directory.mkdir()
        kernels = [
            {
                **self._question(spec, entry.source),
                "digest": spec.digest,
                "triton_key": entry.report["triton_key"],
            }
            for spec, entry in built
        ]
        answer = self._workers.ask({"modules": str(directory), "kernels": kernels})
        self._workers.close()
        if "error" in answer:
            shutil.rmtree(directory)
            _log.warning("Triton's launcher cannot be built, so the bundle needs a C compiler: %s", answer["error"])

    def load(self, spec: KernelSpec, entry: Entry) -> TritonKernel:
        if self._gpu is not None and triton.knobs.runtime.interpret:
            raise RuntimeError("this process interprets Triton kernels: it was started with TRITON_INTERPRET=1")
        function, compiled = getattr(_import(entry), spec.name), None
        if self._gpu is None:
            _omit_unread_checks()
        else:
            with _loading, modules_from(self.modules, spec.digest):
                here = triton.runtime.driver.active.get_current_target()
                if (here.backend, here.arch) != (self._gpu.backend, self._gpu.arch):
                    raise RuntimeError(f"it is for {self.arch}, and the GPU here is {here.backend} {here.arch}")
                # A bundle's versions and sources were compared, and Triton's own key also holds the installation.
                key = None if self.modules is not None else entry.report["triton_key"]
                files = FlatCache.of_built(entry.directory, key)
                compiled = _load_binary(function, spec, _options(spec, self._gpu), files)
        return TritonKernel(spec, entry.source, function, _options(spec, self._gpu), compiled)

    def _question(self, spec: KernelSpec, source: Path) -> dict[str, Any]:
        return {
            "source": str(source),
            "name": spec.name,
            "arguments": [[each.dtype, each.is_pointer] for each in spec.arguments],
            "options": _options(spec, self._gpu),
        }

    def _script(self, spec: KernelSpec, source: Path) -> str:
        stand_ins = (
            f'MockTensor("{str(torch_dtype(each.dtype)).removeprefix("torch.")}")'
            if each.is_pointer
            else repr(stand_in(each.dtype, is_pointer=False))
            for each in spec.arguments
        )
        context = {"gpu": repr(self._gpu), "arguments": ", ".join(stand_ins), "options": _options(spec, self._gpu)}
        return script("build_triton", spec, source, **context)


def _others(gpu: GPUTarget) -> set[str]:
    """Returns the architectures of the installed Triton beside :data:`TRITON_ARCHES`; NVIDIA's are the assembler's."""
    if gpu.backend != "cuda":
        return {"gfx906", "gfx908", "gfx90a", "gfx950"}
    from triton.backends.nvidia.compiler import get_ptxas

    said = subprocess.run([get_ptxas(gpu.arch).path, "--help"], capture_output=True, text=True, check=True).stdout
    return set(re.findall(r"'(sm_\d+)'", said))


def _options(spec: KernelSpec, gpu: GPUTarget | None) -> dict[str, Any]:
    """Returns the compiler's options. A spec counts warps of 32 threads; with 64 threads a warp, half as
    many are used. Only NVIDIA's compiler takes a limit of registers.
    """
    options = {**_OPTIONS, **spec.options}
    if gpu is not None and gpu.backend != "cuda":
        options.pop("maxnreg", None)
    if gpu is not None and gpu.warp_size == 64 and "num_warps" in options:
        options["num_warps"] = max(1, options["num_warps"] // 2)
    return options


def _import(entry: Entry) -> ModuleType:
    """Imports the rendered module under a name that marks fastgen's kernels; writes no bytecode beside it."""
    module = ModuleType(f"{_PACKAGE}.{entry.directory.name}")
    exec(compile(entry.source.read_text(encoding="utf-8"), str(entry.source), "exec"), module.__dict__)
    return module


def _omit_unread_checks() -> None:
    """Omits the interpreter's checks for overflow. They take half of its time, and only debug mode uses them."""
    from triton.runtime.interpreter import interpreter_builder

    options = interpreter_builder.options
    if options.sanitize_overflow and not options.debug:
        interpreter_builder.options = replace(options, sanitize_overflow=False)


def _load_binary(function: Any, spec: KernelSpec, options: Mapping[str, Any], files: type[FlatCache]) -> Any:
    """Loads the built binary onto the GPU, through the just-in-time compiler's own path. Returns Triton's kernel."""
    _forbid_compiling()
    stand_ins = [stand_in(each.dtype, each.is_pointer) for each in spec.arguments]
    with triton.knobs.cache.scope(), _loading_allowed():
        triton.knobs.cache.manager_class = files
        compiled = function.warmup(*stand_ins, grid=(1,), **options)
    try:
        compiled.run  # noqa: B018 (puts it on the GPU now; else the first launch would)
    except TritonError as error:  # it needs more of a multiprocessor than this GPU has
        raise RuntimeError(str(error)) from error
    return compiled


class _Permission(threading.local):
    given = False


_permission = _Permission()
_is_forbidden = False


@contextlib.contextmanager
def _loading_allowed() -> Iterator[None]:
    _permission.given = True
    try:
        yield
    finally:
        _permission.given = False


def _forbid_compiling() -> None:
    """Forbids the just-in-time compiler to compile fastgen's kernels from now on; other kernels are not affected."""
    global _is_forbidden
    if _is_forbidden:
        return
    _is_forbidden = True
    earlier = triton.knobs.runtime.jit_cache_hook

    def hook(*args: Any, **kwargs: Any) -> Any:
        if kwargs["fn"].module.startswith(f"{_PACKAGE}.") and not _permission.given:
            raise RuntimeError(NOT_BUILT_FOR)
        return earlier(*args, **kwargs) if earlier is not None else None

    triton.knobs.runtime.jit_cache_hook = hook


class _Worker(NamedTuple):
    """A process, and a file for everything that compilers print there."""

    process: subprocess.Popen[str]
    printed: IO[bytes]

    def end(self) -> None:
        self.process.communicate()
        self.printed.close()


class _Workers:
    """Worker processes for one architecture, started when needed and reused; each serves one thread at a time."""

    def __init__(self, arch: str):
        self._arch = arch
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()

    def ask(self, question: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns a worker's answer; an ``error`` comes with a ``log``, which includes the compilers' output."""
        try:
            worker = self._idle.get_nowait()
        except queue.Empty:
            worker = self._start()
        process, descriptor = worker.process, worker.printed.fileno()
        assert process.stdin is not None
        assert process.stdout is not None
        before, line = os.fstat(descriptor).st_size, ""
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(json.dumps(question) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        if line:
            answer: dict[str, Any] = json.loads(line)
        else:
            process.wait()
            said = f"the compiling process ended with status {process.returncode}"
            answer = {"error": said, "log": f"{said}\n{json.dumps(question)}"}
        if "error" in answer:
            # read at an offset, since the process writes to the same open file
            printed = os.pread(descriptor, os.fstat(descriptor).st_size - before, before).decode(errors="replace")
            answer["log"] = f"{answer['log']}\n{printed}"
        if line:
            self._idle.put(worker)
        else:
            worker.end()
        return answer

    def close(self) -> None:
        """Ends the workers; the next question starts new ones."""
        while True:
            try:
                self._idle.get_nowait().end()
            except queue.Empty:
                return

    def _start(self) -> _Worker:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(os.path.abspath(each) for each in sys.path)}
        environment.pop("TRITON_INTERPRET", None)
        # -P: a file in the working directory must not shadow a module; the path above has that directory if it has it
        # here. A new session: Ctrl-C goes to this process alone, and the worker ends when this process does.
        command = [sys.executable, "-P", "-m", "fastgen.compile.build.triton_worker", self._arch]
        pipe = subprocess.PIPE
        printed = tempfile.TemporaryFile()  # noqa: SIM115 (open as long as the process runs)
        process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=printed, text=True, env=environment, start_new_session=True
        )
        return _Worker(process, printed)
