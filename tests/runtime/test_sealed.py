"""An engine that runs from a sealed bundle: the same answer, nothing compiled, and refused where the bundle is not the
right one."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import fastgen
from fastgen.cli import app
from fastgen.compile.build import cpp as build_cpp
from fastgen.compile.build.cpp import CppBuilder, cpp_arch
from fastgen.compile.build.triton import TritonBuilder
from fastgen.compile.host.device import current
from fastgen.errors import BundleError, InvalidArgumentError
from fastgen.models.checkpoint import hub
from fastgen.models.checkpoint.builtins import BUILTINS
from fastgen.models.registry.registry import find_recipe
from fastgen.options import LoadOptions
from fastgen.runtime.targets import bundle_flags, parse_quantize
from tests.runtime.checkpoints import save_checkpoint

MODEL = "tiny-llama"
HERE = cpp_arch(current("cpu"))
PROMPT = "Once upon a time"
SAMPLING: dict[str, Any] = {"max_new_tokens": 12, "ignore_eos": True, "temperature": 0.7, "seed": 1, "logprobs": 2}
BuildBundle = Callable[..., Path]


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> BuildBundle:
    """Writes a bundle by the command line, once for each target."""
    written: dict[str, Path] = {}

    def build(target: str, model: str | Path = MODEL, *flags: str) -> Path:
        if target not in written:
            written[target] = tmp_path_factory.mktemp("bundles") / target
            arguments = ["kernels", "build", str(model), "--target", target, "--output", str(written[target]), *flags]
            done = CliRunner().invoke(app, arguments)
            assert done.exit_code == 0, done.output
        return written[target]

    return build


def forbid_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise AssertionError("something is compiled, or a compiler is looked for")

    monkeypatch.setattr(build_cpp, "find_compiler", fail)
    monkeypatch.setattr(CppBuilder, "build", fail)
    monkeypatch.setattr(TritonBuilder, "build", fail)


@pytest.fixture(scope="module")
def expected() -> tuple[list[int], str]:
    """Returns the answer of an engine that builds its kernels itself."""
    with fastgen.load(MODEL, target="cpp") as llm:
        output = llm.generate(PROMPT, **SAMPLING)
    return output.token_ids, output.text


# ---- it runs


@pytest.mark.parametrize(
    "target", [HERE, *(pytest.param(target, marks=pytest.mark.slow) for target in {"portable"} - {HERE})]
)
def test_a_process_without_compiler_cache_and_home_gives_the_same_answer(
    target: str, bundles: BuildBundle, expected: tuple[list[int], str], tmp_path: Path
) -> None:
    code = f"""
import json
import fastgen
with fastgen.load({MODEL!r}, sealed={str(bundles(target))!r}, max_model_len=64) as llm:
    output = llm.generate({PROMPT!r}, **{SAMPLING!r})
print(json.dumps([output.token_ids, output.text]))
"""
    (tmp_path / "home").mkdir()
    environment = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PATH": str(tmp_path / "nothing")}
    environment |= {"CXX": "/nonexistent", "HOME": str(tmp_path / "home"), "FASTGEN_CACHE": str(tmp_path / "cache")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert tuple(json.loads(done.stdout)) == expected
    assert not (tmp_path / "cache").exists()


@pytest.mark.slow
def test_beside_the_weights(
    bundles: BuildBundle, expected: tuple[list[int], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "model"
    shutil.copytree(BUILTINS[MODEL], model)
    with pytest.raises(BundleError, match="no sealed bundle lies beside the weights") as caught:
        fastgen.load(model, sealed=True, max_num_seqs=4)
    place = model / f"kernels-{HERE}"
    command = f"fastgen kernels build {model} --target {HERE} --dtype bfloat16 --block-size 16 --max-num-seqs 4"
    assert str(caught.value).endswith(f"there is no {place}; build it: {command} --output {place}")
    shutil.copytree(bundles("portable"), model / "kernels-portable")
    forbid_compiling(monkeypatch)
    with fastgen.load(model, sealed=True) as llm:
        output = llm.generate(PROMPT, **SAMPLING)
        rows = {row.name: row.of for row in llm.ledger.rows}
    assert (output.token_ids, output.text) == expected
    assert rows["matrices"] == "bf16"  # as that bundle's kernels read them, whatever this CPU could
    assert "kernels' workspaces" not in rows


def answer_on_triton(model: Path, **options: Any) -> list[int]:
    """Answers with interpreted kernels in place of a GPU's. All steps of that engine are captured at the start."""
    with fastgen.load(model, token_budget=2, max_num_seqs=2, device="cpu", **options) as llm:
        return llm.generate([5, 17, 99], max_new_tokens=3, temperature=0, ignore_eos=True).token_ids


def test_interpreted_triton_kernels(bundles: BuildBundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = save_checkpoint("llama", tmp_path / "model")
    built = answer_on_triton(model, target="triton")
    place = bundles("interpret", model, "--max-num-seqs", "2")
    forbid_compiling(monkeypatch)
    assert answer_on_triton(model, sealed=place) == built
    with pytest.raises(BundleError, match=r"lacks 1 of \d+ kernels .*attention_plan.* --max-num-seqs 1 --output DIR"):
        fastgen.load(model, token_budget=2, max_num_seqs=1, device="cpu", sealed=place)


@pytest.mark.slow
@pytest.mark.parametrize("quantize", ["int8_weight_only", "int4_weight_only", "fp8_weight_only"])
def test_interpreted_triton_kernels_of_weights_in_few_bits(
    quantize: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, place = save_checkpoint("llama", tmp_path / "model"), tmp_path / "bundle"
    flags = ["--target", "interpret", "--quantize", quantize, "--max-num-seqs", "2", "--output", str(place)]
    done = CliRunner().invoke(app, ["kernels", "build", str(model), *flags])
    assert done.exit_code == 0, done.output
    built = answer_on_triton(model, target="triton", quantize=quantize)
    forbid_compiling(monkeypatch)
    assert answer_on_triton(model, sealed=place, quantize=quantize) == built
    with pytest.raises(BundleError, match=f"is for quantize {quantize}, and none is asked for"):
        fastgen.load(model, sealed=place, device="cpu")


def test_the_command_that_builds_it_has_what_decides_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Path(shutil.copytree(BUILTINS[MODEL], tmp_path / "model"))
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"odd": 1, "even": 2}))
    monkeypatch.setattr(hub, "locate", lambda name, *, revision: model)
    with pytest.raises(BundleError) as caught:
        fastgen.load("some/model", revision="v1", allow_config_keys=["odd", "even"], sealed=True)
    assert f"build some/model --target {HERE} " in str(caught.value)
    assert " --revision v1 --allow-config-key odd --allow-config-key even --output" in str(caught.value)


# ---- it is refused


def cut(place: Path) -> str:
    file = next(place.rglob("*attention*.so"))
    os.truncate(file, file.stat().st_size // 2)
    return f"is damaged: kernels/{file.parent.name}/{file.name} was changed"


def take_away(place: Path) -> str:
    file = next(place.rglob("thread_pool*.so"))
    file.unlink()
    return f"is damaged: kernels/{file.parent.name}/{file.name} is missing"


@pytest.mark.parametrize("spoil", [cut, take_away])
def test_a_damaged_one(spoil: Callable[[Path], str], bundles: BuildBundle, tmp_path: Path) -> None:
    place = Path(shutil.copytree(bundles("portable"), tmp_path / "bundle"))
    said = spoil(place)
    with pytest.raises(BundleError, match=re.escape(f"the bundle {place} {said}; build it again: fastgen kernels")):
        fastgen.load(MODEL, sealed=place)


@pytest.mark.parametrize(
    ("options", "differs", "flags"),
    [
        ({"dtype": "float32"}, "is for dtype bfloat16, and float32", "--dtype float32 --block-size 16"),
        ({"quantize": "int8"}, "is for quantize none, and int8", "--dtype bfloat16 --quantize int8 --block-size 16"),
        ({"block_size": 32}, "is for block size 16, and 32", "--dtype bfloat16 --block-size 32"),
    ],
)
def test_one_of_other_settings(options: Any, differs: str, flags: str, bundles: BuildBundle) -> None:
    with pytest.raises(BundleError) as caught:
        fastgen.load(MODEL, sealed=bundles("portable"), **options)
    command = f"build the right one: fastgen kernels build {MODEL} --target portable {flags}"
    assert f"{differs} is asked for; {command}" in str(caught.value)


def test_one_of_another_model(bundles: BuildBundle) -> None:
    with pytest.raises(BundleError) as caught:
        fastgen.load("tiny-opt", sealed=bundles("portable"))
    message = str(caught.value)
    assert re.search(rf"\(model {MODEL}, dtype bfloat16, .*\) lacks \d+ of \d+ kernels that are needed here", message)
    assert "build the right one: fastgen kernels build tiny-opt --target portable --dtype bfloat16" in message


def test_one_of_another_architecture(bundles: BuildBundle, monkeypatch: pytest.MonkeyPatch) -> None:
    if HERE == "portable":
        pytest.skip("this CPU has none of the instructions that a bundle may use")
    place = bundles(HERE)
    monkeypatch.setitem(build_cpp._ARCH_NEEDS, HERE, {"what no CPU has"})
    with pytest.raises(BundleError, match=rf"is for {HERE}, and .* needs one for \w+: fastgen kernels build {MODEL}"):
        fastgen.load(MODEL, sealed=place)


def test_for_another_target_or_none(bundles: BuildBundle) -> None:
    for target in ("torch", "triton"):
        with pytest.raises(InvalidArgumentError, match=f"target='{target}' is asked for, and the sealed bundle"):
            fastgen.load(MODEL, sealed=bundles("portable"), target=target)
    with pytest.raises(InvalidArgumentError, match="sealed=3: expected True, False, or the directory"):
        fastgen.load(MODEL, sealed=3)  # type: ignore[arg-type]
    with pytest.raises(BundleError, match="is no bundle of kernels"):
        fastgen.load(MODEL, sealed="no/such/directory")


def test_a_bundle_is_about_the_model_and_the_flags_that_were_given() -> None:
    options = LoadOptions(model=MODEL)
    assert bundle_flags(options, torch.bfloat16, block_size=16, max_num_seqs=None) == {
        "model": MODEL,
        "dtype": "bfloat16",
        "block_size": "16",
    }
    given: dict[str, Any] = {"quantize": "int8", "revision": "main", "allow_config_keys": ("a", "b")}
    flags = {"model": "some/model", "dtype": "float32", "quantize": "int8", "block_size": "8", "max_num_seqs": "5"}
    flags |= {"revision": "main", "allow_config_key": "a b"}
    for recipe in ("llama", Path("recipes") / "mine.yaml"):
        options = LoadOptions(model=Path("some") / "model", recipe=recipe, **given)
        found = bundle_flags(options, torch.float32, block_size=8, max_num_seqs=5)
        assert found == flags | {"recipe": str(recipe)}
    recipe = find_recipe({"architectures": ["LlamaForCausalLM"]})
    options = LoadOptions(model="some/model", recipe=recipe, **given)
    assert bundle_flags(options, torch.float32, block_size=8, max_num_seqs=5) == flags, "no flag stands for an object"


def test_formats_are_those_that_a_target_multiplies() -> None:
    assert parse_quantize(None, "triton") is None
    assert parse_quantize("int4", "cpp") == "int4"
    with pytest.raises(InvalidArgumentError) as caught:
        parse_quantize("int4", "triton")
    message = str(caught.value)
    assert message.startswith("quantize='int4': target='triton' knows 'int8_weight_only'")
    assert message.count("target='triton'") == 1
    assert "target='cpp' knows 'int8', 'int8_weight_only', 'int4'" in message
