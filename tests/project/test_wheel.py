"""The wheel is complete: installed where no checkout can help it, it lists its recipes and carries its models."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from zipfile import ZipFile

import pytest

from fastgen.version import DISTRIBUTION, __version__

ROOT = Path(__file__).resolve().parents[2]
BUILTINS = ("tiny-llama", "tiny-mistral", "tiny-opt")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, ROOT, cwd=folder)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with the wheel alone; its dependencies are those of the environment that runs the tests.

    They are reached by a path file, which does not follow the path files it leads to: so the editable install beside
    them stays out of reach.
    """
    folder = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder)
    python = folder / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel, cwd=folder)
    own = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).strip()
    borrowed = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    Path(own, "borrowed.pth").write_text("\n".join(sorted(borrowed)))
    return folder


def run(*command: str | Path, cwd: Path) -> str:
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "FASTGEN_RECIPES")}
    done = subprocess.run([*map(str, command)], cwd=cwd, env=clean, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    names = ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert tops == {"fastgen", f"{DISTRIBUTION.replace('-', '_')}-{__version__}.dist-info"}
    assert len(names) == len(set(names))
    assert "fastgen/py.typed" in names
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    sources = {path.relative_to(ROOT).as_posix() for path in (ROOT / "fastgen").rglob("*.py")}
    assert {name for name in names if name.endswith(".py")} == sources
    beside = {"grpc/fastgen.proto", "grpc/fastgen.protoset", "page/index.html", "monitoring/grafana/fastgen.json"}
    assert {f"fastgen/serving/{name}" for name in beside} <= set(names)
    recipes = {path.name for path in (ROOT / "recipes").glob("*.yaml")}
    assert {Path(name).name for name in names if name.startswith("fastgen/recipes/")} == recipes
    pages = {path.name for path in (ROOT / "fastgen" / "serving" / "page").iterdir()}
    assert {Path(name).name for name in names if name.startswith("fastgen/serving/page/")} == pages
    assert recipes >= {"llama.yaml", "mistral.yaml", "opt.yaml"}


@pytest.mark.parametrize("name", BUILTINS)
def test_the_wheel_holds_the_built_in_models(wheel: Path, name: str) -> None:
    folder = f"fastgen/models/builtin/{name}/"
    with ZipFile(wheel) as archive:
        sizes = {info.filename.removeprefix(folder): info.file_size for info in archive.infolist()}
        assert sizes["model.safetensors"] <= 4.5e6
        assert json.loads(archive.read(folder + "config.json"))["architectures"]
        assert {"tokenizer.json", "tokenizer_config.json"} <= set(sizes)


@pytest.mark.slow
def test_the_installed_wheel_lists_its_recipes(environment: Path) -> None:
    out = run(environment / "bin" / "fastgen", "recipe", "list", cwd=environment)
    for recipe in ("llama", "mistral", "opt"):
        assert recipe in out
    assert str(ROOT) not in out


def test_the_installed_wheel_is_what_ran(environment: Path) -> None:
    code = (
        "import fastgen, fastgen.models.checkpoint.builtins as b; "
        "print(fastgen.__file__, *b.BUILTINS.values(), sep='\\n')"
    )
    files = run(environment / "bin" / "python", "-c", code, cwd=environment).splitlines()
    assert len(files) == 1 + len(BUILTINS)
    assert all(Path(file).is_relative_to(environment) for file in files)


@pytest.mark.slow
def test_the_installed_wheel_generates(environment: Path) -> None:
    command = ("generate", "tiny-llama", "Once upon a time", "--max-new-tokens", "5", "--json")
    record = json.loads(run(environment / "bin" / "fastgen", *command, cwd=environment))
    assert 1 <= len(record["token_ids"]) <= 5
