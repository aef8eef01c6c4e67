"""``fastgen kernels``: list, show, build, report and clean, without a GPU."""

from __future__ import annotations

import ast
import json
import shutil
from pathlib import Path

import pytest
import torch

from fastgen.compile.build.bundle import Bundle, load_bundle
from fastgen.compile.build.cache import KernelCache
from fastgen.compile.build.loader import KernelLoader, make_builder
from fastgen.compile.host.device import current
from fastgen.compile.host.thread_pool import load_thread_pool
from fastgen.compile.render import render
from fastgen.compile.spec import KernelSpec, dtype_name
from fastgen.models import kernels
from fastgen.models.checkpoint.builtins import BUILTINS
from fastgen.models.spec import ModelSpec
from tests.compile.norms import norm_spec


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FASTGEN_CACHE", str(tmp_path / "kernels"))
    return tmp_path / "kernels"


def needed(target: str, recipe: str = "llama", dtype: str = "bf16") -> list[KernelSpec]:
    """Returns two norms, which differ in the node that needs them; all kernels of a model would take long to build."""
    return [
        norm_spec(target, "rms", 64, dtype, 1e-5, needed_by=(f"{recipe}: model.layers.residual.attend.norm",)),
        norm_spec(target, "rms", 64, dtype, 1e-5, residual=True, needed_by=(f"{recipe}: model.final_norm",)),
    ]


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    def kernel_specs(
        model: ModelSpec,
        loader: KernelLoader,
        dtype: torch.dtype,
        *,
        weight_format: object,
        block_size: object,
        max_num_seqs: object,
    ) -> list[KernelSpec]:
        usual = 64 if loader.builder.is_for_gpu else 16
        assert (weight_format, block_size, max_num_seqs) in ((None, usual, None), ("int8", 32, 8))
        return needed(loader.builder.target, model.recipe, dtype_name(dtype))

    monkeypatch.setattr(kernels, "kernel_specs", kernel_specs)


def test_build_then_list_then_clean(run, directory: Path) -> None:
    names = [spec.name for spec in needed("cpp")]
    before = json.loads(run("kernels", "list", "tiny-opt", "--target", "portable", "--json").out)
    assert [(each["name"], each["built"]) for each in before] == [(name, False) for name in names]
    assert json.loads(run("kernels", "list", "--json").out) == []

    built = json.loads(run("kernels", "build", "tiny-opt", "--target", "portable", "--json").out)
    assert [(each["name"], each["arch"]) for each in built] == [(name, "portable") for name in names]
    assert all(Path(each["directory"]).parent == directory for each in built)

    assert json.loads(run("kernels", "list", "--json").out) == built
    after = json.loads(run("kernels", "list", "tiny-opt", "--target", "portable", "--json").out)
    assert after == [{**each, "built": True} for each in before]

    freed = json.loads(run("kernels", "clean", "--json").out)
    assert freed == {
        "kernels": len(names),
        "size_bytes": sum(each["size_bytes"] for each in built),
        "directory": str(directory),
    }
    assert KernelCache().entries() == []
    assert run("kernels", "clean").out == f"removed 0 kernels, 0.0 MiB, from {directory}\n"


def test_a_sealed_bundle_is_written_and_loads(run, tmp_path: Path) -> None:
    output = tmp_path / "bundles" / "avx2"
    flags = ("--target", "portable", "--quantize", "int8", "--block-size", "32", "--max-num-seqs", "8")
    arguments = ("kernels", "build", "tiny-opt", *flags)
    built = json.loads(run(*arguments, "--output", str(output), "--json").out)
    assert [each["name"] for each in built] == [spec.name for spec in needed("cpp")]
    assert all(Path(each["directory"]).is_relative_to(output) for each in built)
    loader = load_bundle(output, current("cpu"))
    load_thread_pool(KernelLoader(make_builder("portable")))
    about = {"model": "tiny-opt", "dtype": "bfloat16", "quantize": "int8", "block_size": "32", "max_num_seqs": "8"}
    assert loader.bundle.about == about
    assert (
        f"fastgen {' '.join(arguments)}".replace(" --quantize", " --dtype bfloat16 --quantize") in loader.bundle.how()
    )
    for spec in needed("cpp"):
        assert loader.load(spec).spec == spec
    out = run(*arguments, "--output", str(output)).out
    assert f"sealed 2 kernels for portable, 0.0 MiB, in {output}" in out


def test_a_bundle_is_for_a_revision_and_passes_over_keys(run, tmp_path: Path) -> None:
    """A revision is that of a hub repository, as in `fastgen generate`; a built-in model has none."""
    model = tmp_path / "model"
    shutil.copytree(BUILTINS["tiny-llama"], model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"new_one": 1, "new_two": 2}))
    given, output = ("kernels", "build", str(model), "--target", "portable"), str(tmp_path / "bundle")
    refused = run(*given, "--output", output)
    assert refused.status == 1
    assert "new_one" in refused.err
    keys = ("--allow-config-key", "new_one", "--allow-config-key", "new_two")
    run(*given, *keys, "--output", output)
    assert " ".join(keys) in Bundle.open(Path(output)).how()
    for command in ("list", "show", "report"):
        assert run("kernels", command, str(model), "--target", "portable", *keys).status == 0
        revision = run("kernels", command, "tiny-llama", "--target", "portable", "--revision", "main")
        assert revision.status == 1
        assert "tiny-llama is built in" in " ".join(revision.err.split())


@pytest.mark.slow  # tests/compile/test_bundle.py writes one
def test_a_bundle_for_a_gpu_that_is_not_here(run, tmp_path: Path) -> None:
    output = tmp_path / "sm_90"
    run("kernels", "build", "tiny-llama", "--target", "sm_90", "--output", str(output))
    bundle = Bundle.open(output)
    assert bundle.arch == "sm_90"
    for spec in needed("triton"):
        suffixes = {file.suffix for file in bundle.entries[spec.digest].files()}
        assert {".py", ".ptx", ".cubin", ".json"} <= suffixes


def test_a_build_takes_the_choices_for_a_gpu_by_name(run, caplog: pytest.LogCaptureFixture) -> None:
    refused = run("kernels", "build", "tiny-llama", "--device", "NVIDIA H200")
    assert refused.status == 2
    assert "--device: --target must name its architecture" in " ".join(refused.err.split())
    taken = run("kernels", "build", "tiny-llama", "--target", "sm_90", "--device", "NVIDIA H200")
    assert taken.status == 0
    assert "no choices are known for 'NVIDIA H200', so the defaults are taken" in caplog.text


def test_what_was_tuned_is_listed_and_exported(run, directory: Path, tmp_path: Path) -> None:
    assert json.loads(run("kernels", "tuned", "--json").out) == []
    (directory / ".tuning").mkdir(parents=True)
    key = {"device": "NVIDIA H200", "problem": "a sum"}
    kept = {"key": key, "choice": {"by": "library"}, "seconds": [[{"by": "kernel"}, 2e-5], [{"by": "library"}, 1e-5]]}
    (directory / ".tuning" / "a_sum.json").write_text(json.dumps(kept))
    out = run("kernels", "tuned", "--export", str(tmp_path / "tuned.json")).out
    assert "by library" in out
    assert f"exported 1 of NVIDIA H200 to {tmp_path / 'tuned.json'}" in out
    devices = json.loads((tmp_path / "tuned.json").read_text())["devices"]
    assert devices == {"NVIDIA H200": {"a sum": {"by": "library"}}}
    assert run("kernels", "tuned", "--export", str(tmp_path)).status == 2


def test_a_bundle_does_not_go_where_something_else_lies(run, tmp_path: Path) -> None:
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "dear.txt").write_text("you")
    done = run("kernels", "build", "tiny-llama", "--target", "portable", "--output", str(tmp_path / "letters"))
    assert (done.status, done.out) == (1, "")
    assert "is not empty and no bundle of kernels" in " ".join(done.err.split())
    assert [file.name for file in (tmp_path / "letters").iterdir()] == ["dear.txt"]


@pytest.mark.slow
def test_the_report_is_for_a_gpu_that_is_not_here(run) -> None:
    arguments = ("kernels", "report", "tiny-llama", "--target", "sm_90")
    rows = json.loads(run(*arguments, "--json").out)
    assert [row["name"] for row in rows] == [spec.name for spec in needed("triton")]
    for row in rows:
        assert row["arch"] == "sm_90"
        assert row["spill_bytes"] == 0
        assert row["registers"] > 0
        assert row["occupancy"] > 0
    title, *lines = run(*arguments).out.splitlines()
    assert title.split("  ")[0] == "name"
    assert "registers" in title
    assert [line.split()[0] for line in lines] == [row["name"] for row in rows]


def test_show_prints_what_would_be_built_and_builds_nothing(run, directory: Path) -> None:
    specs = needed("triton")
    every = run("kernels", "show", "tiny-llama", "--target", "gfx942").out
    assert every == "\n\n".join(render(spec) for spec in specs)
    one = run("kernels", "show", "tiny-llama", specs[1].name, "--target", "sm_80").out
    assert one == render(specs[1])
    assert ast.parse(one).body
    assert "needed by llama: model." in one
    (shown,) = json.loads(run("kernels", "show", "tiny-llama", specs[1].name, "--target", "sm_80", "--json").out)
    assert (shown["name"], shown["source"], shown["target"]) == (specs[1].name, one, "triton")
    assert not directory.exists()


def test_show_for_cpp_in_another_dtype(run) -> None:
    out = run("kernels", "show", "tiny-mistral", "--target", "avx2", "--dtype", "float32").out
    (first, *_) = needed("cpp", dtype="fp32")
    assert out.startswith(f"// {first.name}\n")
    assert f'extern "C" void {first.name}(' in out


def test_list_for_people(run) -> None:
    spec = needed("cpp")[0]
    KernelLoader(make_builder("portable")).build([spec])
    lines = run("kernels", "list", "tiny-llama", "--target", "portable").out.splitlines()
    assert lines[0].split() == ["name", "built", "needed", "by"]
    assert [line.split()[1] for line in lines[1:]] == ["yes", "no"]
    assert f"{spec.name}  portable  " in run("kernels", "list").out


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (("show", "tiny-llama", "no_such", "--target", "sm_90"), 2, "tiny-llama needs no kernel no_such"),
        (("build", "tiny-llama", "--target", "h100"), 1, "--target 'h100': expected such as sm_80"),
        (("list", "tiny-llama", "--target", "sm_77"), 1, "--target 'sm_77': expected such as sm_80"),
        (("list", "tiny-llama", "--target", ""), 1, "--target '': expected such as sm_80"),
        (("build", "tiny-llama", "--target", "sm_90", "--block-size", "0"), 1, "--block-size 0: expected an integer"),
        (("build", "tiny-llama", "--target", "sm_90", "--max-num-seqs", "0"), 1, "--max-num-seqs 0: expected an"),
        (("build", "tiny-lama", "--target", "sm_90"), 1, "tiny-lama"),
        (("report", "tiny-llama", "--target", "sm_90", "--dtype", "int7"), 1, "int7"),
        (
            ("build", "tiny-llama", "--target", "sm_90", "--quantize", "int8"),
            1,
            "--quantize 'int8': --target 'triton' knows 'int8_weight_only', 'int4_weight_only', 'fp8_weight_only'",
        ),
        (("build",), 2, "Missing argument 'MODEL'"),
    ],
)
def test_mistakes_are_told_in_a_sentence(run, arguments, status, message) -> None:
    done = run("kernels", *arguments)
    assert (done.status, done.out) == (status, "")
    assert message in " ".join(done.err.replace("│", " ").split())
    assert "Traceback" not in done.err
