"""``fastgen verify``: exit status, and what it prints."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fastgen.cli import app
from tests.cli.conftest import Run
from tests.recipe_tools.tiny_checkpoints import make

RECIPES = Path(__file__).parents[2] / "recipes"


def test_a_right_recipe() -> None:
    result = CliRunner().invoke(app, ["verify", "llama", "--configs", "1"])
    assert result.exit_code == 0, result.output
    assert "✓ llama agrees with its reference: 1 configurations, seed 0" in result.output


def test_a_wrong_recipe_names_file_line_and_node(tmp_path: Path) -> None:
    file = tmp_path / "llama.yaml"
    text = (RECIPES / "llama.yaml").read_text()
    file.write_text(
        text.replace("gate: mlp.gate_proj", "gate: mlp.up_proj#").replace("up: mlp.up_proj\n", "up: mlp.gate_proj\n")
    )
    line = 1 + file.read_text().splitlines().index("          gate: mlp.up_proj#")
    file.write_text(file.read_text().replace("up_proj#", "up_proj"))
    result = CliRunner().invoke(app, ["verify", str(file), "--configs", "2"])
    assert result.exit_code == 1, result.output
    assert f"✗ {file}:{line}: model.layers.residual.transform.mlp.gate" in result.output
    assert "likely cause: mlp.up_proj and mlp.gate_proj are swapped" in result.output
    result = CliRunner().invoke(app, ["verify", str(file), "--configs", "2", "--json"])
    assert result.exit_code == 1
    assert json.loads(result.stdout)["finding"]["node"]["line"] == line


# A reference of one's own


GOOD = """
import transformers

def load(directory):
    assert isinstance(directory, str)
    return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype="float32")

def broken(directory):
    return load(directory + "/nowhere")["x"]

def leaves(directory):
    raise SystemExit("bye")

number = 3

def path(directory):
    return directory

def unable(directory):
    import torch
    return torch.nn.Module()
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("reference") / "qwen2"
    make("qwen2", directory)
    (directory / "good.py").write_text(GOOD)
    (directory / "bad.py").write_text("import json\n\nload = json.nothing\n")
    return directory


@pytest.mark.slow  # tests/verify/test_reference.py has other modules
def test_a_function_of_a_file_makes_the_reference(checkpoint: Path, run: Run, tmp_path: Path) -> None:
    reference = f"{checkpoint}/good.py:load"
    right = run("verify", str(checkpoint), "--reference", reference)
    assert right.status == 0, right.err
    assert "✓ qwen2 agrees with its reference\n" in right.out
    file = tmp_path / "theirs.yaml"
    file.write_text(
        "name: theirs\nextends: qwen2\n"
        "model: {layers: {residual: {transform: {mlp: {gate: mlp.up_proj, up: mlp.gate_proj}}}}}\n"
    )
    wrong = run("verify", str(checkpoint), "--recipe", str(file), "--reference", reference)
    assert wrong.status == 1
    assert f"✗ {file}:3: model.layers.residual.transform.mlp.gate" in wrong.out
    assert "configuration 0 of seed" not in wrong.out


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("gone.py:load", "there is no file"),
        ("good.py", "name the function that makes the module, as in "),
        ("good.py:", "name the function that makes the module, as in "),
        ("good.py:lood", "has no function 'lood'"),
        ("good.py:number", "has no function 'number'"),
        ("good.py:broken", "it fails in line 6: "),
        ("good.py:leaves", "it fails in line 12: SystemExit: bye"),
        ("good.py:path", "it must return a torch.nn.Module, not str"),
        ("bad.py:load", "it fails in line 3: AttributeError: module 'json' has no attribute 'nothing'"),
        ("gone.safetensors", "there is no file"),
    ],
)
def test_a_bad_reference_is_an_error(reference: str, message: str, checkpoint: Path, run: Run) -> None:
    before = list(sys.path)
    finished = run("verify", str(checkpoint), "--reference", f"{checkpoint}/{reference}")
    assert (finished.status, finished.out) == (1, "")
    assert f"fastgen: --reference {checkpoint}/{reference}: " in finished.err
    assert message in finished.err
    assert "Traceback" not in finished.err
    assert sys.path == before


def test_damaged_activations_are_told(checkpoint: Path, run: Run, tmp_path: Path) -> None:
    (tmp_path / "cut.safetensors").write_bytes(b"\x10\x00\x00\x00\x00\x00\x00\x00{")
    finished = run("verify", str(checkpoint), "--reference", str(tmp_path / "cut.safetensors"))
    assert (finished.status, finished.out) == (1, "")
    assert "cut.safetensors: cannot be read as recorded activations: " in finished.err
    assert "Traceback" not in finished.err


def test_a_reference_belongs_to_weights(checkpoint: Path, run: Run) -> None:
    finished = run("verify", str(RECIPES / "qwen2.yaml"), "--reference", f"{checkpoint}/good.py:load")
    assert finished.status == 1
    assert "name the model's directory, and the recipe with --recipe" in finished.err


def test_a_cause_tells_that_only_a_key_is_left(checkpoint: Path, run: Run, tmp_path: Path) -> None:
    directory = tmp_path / "with a key"
    directory.mkdir()
    config = json.loads((checkpoint / "config.json").read_text()) | {"warp_factor": 3}
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "model.safetensors").hardlink_to(checkpoint / "model.safetensors")
    file = tmp_path / "theirs.yaml"
    file.write_text(
        "name: theirs\nextends: qwen2\n"
        "model: {layers: {residual: {transform: {mlp: {gate: mlp.up_proj, up: mlp.gate_proj}}}}}\n"
    )
    printed = run("verify", str(directory), "--recipe", str(file), "--reference", f"{checkpoint}/good.py:load").out
    assert "likely cause: mlp.up_proj and mlp.gate_proj are swapped" in printed
    assert "what remains is that warp_factor is not known to the recipe" in printed


def test_a_module_that_fails_is_told(checkpoint: Path, run: Run) -> None:
    finished = run("verify", str(checkpoint), "--reference", f"{checkpoint}/good.py:unable")
    assert finished.status == 1
    assert "the reference fails for 23 tokens: NotImplementedError: " in finished.err


# The configuration of the checkpoint at hand


def test_this_configuration_alone(checkpoint: Path, run: Run, tmp_path: Path) -> None:
    file = tmp_path / "theirs.yaml"
    file.write_text("name: theirs\nextends: qwen2\nconfig: {max_positions: max_position_embeddings | default(77)}\n")
    right = run("verify", str(checkpoint), "--recipe", str(file), "--this-config")
    assert right.status == 0, right.err
    assert "✓ theirs agrees with its reference on this checkpoint's configuration, as it is\n" in right.out
    wrong = run("verify", str(checkpoint), "--recipe", str(file), "--configs", "4")
    assert wrong.status == 1
    where = "max_positions is 77, the reference's is 32768, which is its default: this config.json states none"
    assert where in wrong.out
    assert wrong.out.endswith("  with --this-config only what this checkpoint states is tested\n")


def test_a_recipe_has_no_configuration_of_its_own(run: Run) -> None:
    refused = run("verify", "llama", "--this-config")
    assert refused.status == 1
    assert "--this-config: a recipe has no configuration of its own; give the model's directory" in refused.err


def test_a_key_that_nothing_reads_is_to_be_ignored_in_the_own_file(checkpoint: Path, run: Run, tmp_path: Path) -> None:
    """The keys that it ignores so far stand in the file of the recipe that it extends."""
    config = json.loads((checkpoint / "config.json").read_text()) | {"warp_factor": 3}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").hardlink_to(checkpoint / "model.safetensors")
    file = tmp_path / "theirs.yaml"
    file.write_text("name: theirs\nextends: qwen2\narchitectures: [Qwen2ForCausalLM]\n")
    finished = run("verify", str(tmp_path), "--recipe", str(file), "--this-config")
    assert finished.status == 1
    assert f"✗ {file}:1: ignores\n" in finished.out
    assert "- warp_factor is not known to the recipe" in finished.out
    assert "or allow it once with --allow-config-key\n" in finished.out


def test_the_drawn_configuration_is_printed_with_the_key_that_failed(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "llama.yaml"
    text = (RECIPES / "llama.yaml").read_text()
    read = "rope.rope_theta | default(rope_theta | default(10000))"
    rest = "'rope_parameters.rope_theta', 'rope_theta', 10000)"
    assert f"theta: {read}" in text
    file.write_text(text.replace(f"theta: {read}", f"theta: first({rest}"))
    finished = run("verify", str(file))
    assert finished.status == 1
    line = next(each for each in finished.out.splitlines() if "drawn by verify: " in each)
    config = json.loads(line.partition("drawn by verify: ")[2])
    theta = config["rope_scaling"]["rope_theta"]
    assert f"the reference's is {theta:.15g}, which this config.json states as rope_scaling.rope_theta" in finished.out
    assert f"likely cause: theta first({rest} -> first('rope_scaling.rope_theta', {rest}\n" in finished.out
