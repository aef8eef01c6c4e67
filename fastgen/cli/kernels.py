"""``fastgen kernels``: lists, shows, builds and measures the generated kernels of a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.table import Table

from fastgen.cli import options
from fastgen.cli.command import App
from fastgen.cli.options import usage_error
from fastgen.options import LoadOptions

if TYPE_CHECKING:
    from fastgen.compile.build.cache import Entry
    from fastgen.compile.build.loader import KernelLoader
    from fastgen.compile.spec import KernelSpec

app = App(help="List, show, build and measure a model's generated kernels.")

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Target = Annotated[
    str | None,
    typer.Option(
        metavar="ARCH",
        help="sm_80, sm_86, sm_89, sm_90, sm_100, gfx942; amx, avx512bf16, avx512vnni, avx512, avx2, portable. "
        "Default: this machine.",
    ),
]
Gpu = Annotated[
    str | None,
    typer.Option(
        "--device",
        metavar="NAME",
        help='Take the choices tuned for this GPU, such as "NVIDIA H200". It need not be here. Needs --target.',
    ),
]
_LOAD = options.only(options.LOAD_ARGUMENTS, "recipe", "dtype", "quantize", "revision", "allow_config_keys")
_SIZED = [*_LOAD, *options.only(options.LOAD_ARGUMENTS, "block_size", "max_num_seqs")]


@app.command("list")
@options.with_flags(load=_LOAD)
def list_command(
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="List the kernels that this model needs.")
    ] = None,
    target: Target = None,
    *,
    load: options.Given,
    as_json: AsJson = False,
) -> None:
    """List the kernels that are built; with MODEL, the kernels that it needs, and whether they are built."""
    from fastgen.compile.build.cache import KernelCache

    if model is None:
        rows = [_entry_facts(entry) for entry in KernelCache().entries()]
    else:
        loader, specs, _ = _needed(LoadOptions(model, **load), target)
        rows = [{**_spec_facts(spec), "built": loader.find(spec) is not None} for spec in specs]
    _print(rows, as_json, ("name", "arch", "size_bytes") if model is None else ("name", "built", "needed_by"))


@app.command("show")
@options.with_flags(load=_LOAD)
def show_command(
    model: options.Model,
    name: Annotated[str | None, typer.Argument(metavar="KERNEL", help="Name of a kernel. Default: all.")] = None,
    target: Target = None,
    *,
    load: options.Given,
    as_json: AsJson = False,
) -> None:
    """Print the source of a kernel as it is rendered for MODEL. Builds nothing."""
    from fastgen.compile.render import render

    _, specs, _ = _needed(LoadOptions(model, **load), target)
    chosen = [spec for spec in specs if name in (None, spec.name)]
    if not chosen:
        usage_error(f"{model} needs no kernel {name}; it needs {', '.join(spec.name for spec in specs)}")
    if as_json:
        print(json.dumps([{**_spec_facts(spec), "source": render(spec)} for spec in chosen]))
    else:
        print("\n\n".join(render(spec) for spec in chosen), end="")


@app.command("build")
@options.with_flags(load=_SIZED)
def build_command(
    model: options.Model,
    target: Target = None,
    device: Gpu = None,
    *,
    load: options.Given,
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Write them to this directory as a sealed bundle, which other machines run from."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Build all kernels of MODEL into the cache. Kernels for a GPU are built without one."""
    from fastgen.compile.build.bundle import write_bundle
    from fastgen.runtime.progress import progress_bar

    if device is not None and target is None:
        usage_error("--device: --target must name its architecture, such as sm_90")
    loader, specs, about = _needed(LoadOptions(model, **load), target, device)
    with progress_bar(f"building {len(specs)} kernels for {loader.builder.arch}") as update:
        if output is None:
            entries = loader.build(specs, update)
        else:
            bundle = write_bundle(loader, specs, output.resolve(), about=about, progress=update)
            entries = list(bundle.entries.values())
    _print([_entry_facts(entry) for entry in entries], as_json, ("name", "directory"))
    if output is not None and not as_json:
        print(f"sealed {len(entries)} kernels for {bundle.arch}, {bundle.size_bytes / 2**20:.1f} MiB, in {output}")


@app.command("report")
@options.with_flags(load=_LOAD)
def report_command(
    model: options.Model,
    target: Target = None,
    *,
    load: options.Given,
    as_json: AsJson = False,
) -> None:
    """Build all kernels of MODEL and report what each costs: registers, spills, shared memory, occupancy."""
    from fastgen.runtime.progress import progress_bar

    loader, specs, _ = _needed(LoadOptions(model, **load), target)
    with progress_bar(f"building {len(specs)} kernels for {loader.builder.arch}") as update:
        entries = loader.build(specs, update)
    rows = [{**_entry_facts(entry), **entry.report} for entry in entries]
    shown = dict.fromkeys(key for row in rows for key in row if key not in _NOT_IN_A_TABLE)
    _print(rows, as_json, tuple(shown))


@app.command("tuned")
def tuned_command(
    export: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Add them to this file, in the form of fastgen/compile/build/tuned_devices.json."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the choices that were measured on GPUs and on this CPU, and kept in the cache."""
    from fastgen.compile.build import tuned
    from fastgen.compile.build.cache import KernelCache

    directory = KernelCache().directory
    rows = [{**each, "choice": _choice(each["choice"])} for each in tuned.kept(directory)]
    _print(rows, as_json, ("device", "problem", "choice", "seconds", "default_seconds"))
    if export is not None:
        try:
            counts = tuned.export(directory, export)
        except (OSError, ValueError, KeyError) as error:
            usage_error(f"--export {export}: {error}")
        if not as_json:
            written = ", ".join(f"{count} of {device}" for device, count in counts.items())
            print(f"exported {written or 'none'} to {export}")


def _choice(choice: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in choice.items())


@app.command("clean")
def clean_command(as_json: AsJson = False) -> None:
    """Remove every built kernel. Kernels are built again when they are needed."""
    from fastgen.compile.build.cache import KernelCache

    cache = KernelCache()
    num_kernels, size_bytes = cache.clean()
    if as_json:
        print(json.dumps({"kernels": num_kernels, "size_bytes": size_bytes, "directory": str(cache.directory)}))
    else:
        print(f"removed {num_kernels} kernels, {size_bytes / 2**20:.1f} MiB, from {cache.directory}")


_NOT_IN_A_TABLE = ("arch", "directory", "size_bytes", "triton_key", "binary_bytes")


def _needed(
    load_options: LoadOptions, target: str | None, device: str | None = None
) -> tuple[KernelLoader, list[KernelSpec], dict[str, str]]:
    """Returns a loader for ``target``, the kernels that the model needs there, and what a bundle of them is about.
    ``device`` names the GPU whose tuned choices are taken.
    """
    from fastgen.compile.backends.choose import arch_for
    from fastgen.compile.build.loader import KernelLoader, make_builder, target_of
    from fastgen.compile.build.tuned import tuning_for
    from fastgen.compile.host.device import current
    from fastgen.models.kernels import kernel_specs
    from fastgen.runtime.config import DEFAULT_BLOCK_SIZE
    from fastgen.runtime.model_source import ModelSource
    from fastgen.runtime.targets import bundle_flags, parse_quantize

    source = ModelSource.open(load_options)
    if target is None:
        here = current()
        target = arch_for(here, source.dtype) if here.kind == "cpu" else target_of(here)
    loader = KernelLoader(make_builder(target))
    if device is not None:
        loader.tuning = tuning_for(device, loader)
    weight_format = parse_quantize(load_options.quantize, loader.builder.target)
    kind: Literal["cpu", "cuda"] = "cuda" if loader.builder.is_for_gpu else "cpu"
    block_size, max_num_seqs = load_options.block_size or DEFAULT_BLOCK_SIZE[kind], load_options.max_num_seqs
    specs = kernel_specs(
        source.spec,
        loader,
        source.dtype,
        weight_format=weight_format,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
    )
    return loader, specs, bundle_flags(load_options, source.dtype, block_size=block_size, max_num_seqs=max_num_seqs)


def _spec_facts(spec: KernelSpec) -> dict[str, Any]:
    return {
        "name": spec.name,
        "op": spec.op,
        "target": spec.target,
        "parameters": dict(spec.parameters),
        "options": dict(spec.options),
        "needed_by": list(spec.needed_by),
    }


def _entry_facts(entry: Entry) -> dict[str, Any]:
    directory = str(entry.directory)
    return {"name": entry.name, "arch": entry.arch, "directory": directory, "size_bytes": entry.size_bytes}


def _print(rows: list[dict[str, Any]], as_json: bool, shown: tuple[str, ...]) -> None:
    if as_json:
        print(json.dumps(rows))
        return
    titles = (key.removesuffix("_bytes").replace("_", " ") for key in shown)
    table = Table(*titles, box=None, pad_edge=False, header_style="bold")
    for row in rows:
        table.add_row(*(_for_people(row.get(key)) for key in shown))
    console = Console(highlight=False, emoji=False, markup=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = 200
    console.print(table)


def _for_people(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return ", ".join(f"{count} {name}" for name, count in value.items())
    if isinstance(value, list):
        return ", ".join(value)
    return "" if value is None else str(value)
