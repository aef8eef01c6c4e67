"""Recipe files: read into the schema with the position of every node, and merged over the recipes they extend."""

from __future__ import annotations

import json
import random
import statistics
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fastgen.errors import RecipeError
from fastgen.models.recipe.recipe import Recipe, load_recipe
from fastgen.models.recipe.schema import json_schema
from fastgen.models.recipe.yaml_reader import parse_recipe_yaml

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
BUILT_IN = {file.stem: file.read_text("utf-8") for file in sorted(RECIPES.glob("*.yaml"))}


def load(tmp_path: Path, text: str, name: str = "mine.yaml") -> Recipe:
    file = tmp_path / name
    file.write_text(text, "utf-8", newline="")
    return load_recipe(file)


def wrong(tmp_path: Path, text: str, match: str | None = None) -> RecipeError:
    with pytest.raises(RecipeError, match=match) as caught:
        load(tmp_path, text)
    assert caught.value.file == str(tmp_path / "mine.yaml")
    return caught.value


@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in_recipes(name: str) -> None:
    recipe = load_recipe(RECIPES / f"{name}.yaml")
    assert recipe.name == name
    assert recipe.text == BUILT_IN[name]
    assert len(recipe.text.splitlines()) <= 120
    assert max(map(len, recipe.text.splitlines())) <= 120


def test_half_of_the_built_in_recipes_fit_in_forty_lines() -> None:
    assert statistics.median(len(text.splitlines()) for text in BUILT_IN.values()) <= 40


# ------------------------------------------------------------------------------------------------------- YAML


def place(text: str) -> Any:
    """Returns the data in ``text``, and the line of every path."""
    root = parse_recipe_yaml(text, "f.yaml")
    lines: dict[str, int] = {}

    def visit(tree: Any, path: tuple[str, ...]) -> None:
        lines[".".join(path)] = tree.line
        value = tree.value
        children = value.items() if hasattr(value, "items") else enumerate(value) if isinstance(value, tuple) else ()
        for key, child in children:
            visit(child, (*path, str(key)))

    visit(root, ())
    return root.plain(), lines


def test_data_and_lines() -> None:
    data, lines = place("# comment\na: 1\nb:\n  c: [x,\n      y]\n  d:\n    {e: null,\n     f: 1.5}\ng: |\n  text\n")
    assert data == {"a": 1, "b": {"c": ("x", "y"), "d": {"e": None, "f": 1.5}}, "g": "text\n"}
    assert lines == {"": 2, "a": 2, "b": 3, "b.c": 4, "b.c.0": 4, "b.c.1": 5, "b.d": 6, "b.d.e": 7, "b.d.f": 8, "g": 9}


def test_scalars_mean_what_they_look_like() -> None:
    scalars = {
        **{"1": 1, "-3": -3, "+3": 3, "1.5": 1.5, "1e-5": 1e-5, ".5": 0.5, "1.": 1.0, "010": 10},
        **{"true": True, "False": False, "~": None, "null": None, "": None},
        **{
            text: text for text in ("yes", "no", "on", "off", "y", "1:30", "0x10", "1_000", "2024-01-01", ".inf", "nan")
        },
        **{"'1'": "1", '"true"': "true", "'null'": "null", "first(x)": "first(x)", "<<": "<<"},
    }
    for text, value in scalars.items():
        ((_, found),) = place(f"key: {text}\n")[0].items()
        assert (found, type(found)) == (value, type(value)), text


def test_an_alias_is_the_same_data_again() -> None:
    assert place("a: &x {b: 1}\nc: *x\n")[0] == {"a": {"b": 1}, "c": {"b": 1}}


@pytest.mark.parametrize(
    ("text", "line", "node", "message"),
    [
        ("", 1, None, "empty"),
        ("# nothing\n", 1, None, "empty"),
        ("- a\n- b\n", 1, None, "a mapping of keys"),
        ("just text", 1, None, "a mapping of keys"),
        ("a: 1\n---\nb: 2\n", 2, None, "one YAML document"),
        ("a: 1\nb: 2\na: 3\n", 3, "a", "occurs twice, first in line 1"),
        ("m:\n  b: 2\n  c: {b: 1, b: 2}\n", 3, "m.c.b", "occurs twice"),
        ("a: 1\n'a': 3\n", 2, "a", "occurs twice"),
        ("1: x\n", 1, None, "a key must be a text"),
        ("a:\n  null: x\n", 2, "a", "a key must be a text"),
        ("? [a]\n: x\n", 1, None, "a key must be a text"),
        ("? {a: b}\n: x\n", 1, None, "a key must be a text"),
        ("a: [1, 2\nb: 3\n", 2, None, "not valid YAML"),
        ("a: 'x\n", 2, None, "not valid YAML"),
        ("a: 1\n b: 2\n", 2, None, "not valid YAML"),
        ("a: b: c\n", 1, None, "not valid YAML"),
        ("\ta: 1\n", 1, None, "not valid YAML"),
        ("a: @x\n", 1, None, "not valid YAML"),
        ("a: %x\n", 1, None, "not valid YAML"),
        ("a: \x00\n", 1, None, "not valid YAML"),
        ("a: 1\nb: \x07\n", 2, None, "not valid YAML"),
        ('a: 1\nb: "\\UFFFFFFFF"\n', 2, None, "not valid YAML"),
        ("a: *nothing\n", 1, "a", "has no anchor"),
        ("a: &a [*a]\n", 1, "a.0", "inside its own anchor"),
        ("a: &a {b: {c: *a}}\n", 1, "a.b.c", "inside its own anchor"),
        ("a: !!python/object/apply:os.system [ls]\n", 1, "a", "tag .* is not allowed"),
        ("a: !!python/name:os.system\n", 1, "a", "tag .* is not allowed"),
        ("a: !!binary aGk=\n", 1, "a", "tag .* is not allowed"),
        ("a: !!str 1\n", 1, "a", "tag .* is not allowed"),
        ("a: !x {}\n", 1, "a", "tag .* is not allowed"),
        ("!!map {a: 1}\n", 1, None, "tag .* is not allowed"),
        ("a: " + "[" * 100 + "]" * 100, 1, "a.0.0", "nested deeper"),
        ("a: " + "{a: " * 100 + "1" + "}" * 100, 1, "a.a.a", "nested deeper"),
        ("a: " + "[" * 60_000, 1, "a.0.0", "nested deeper"),
        ("a:\n" + "".join(" " * depth + "- \n" for depth in range(1, 60)), 26, "a.0.0", "nested deeper"),
        ("- " * 30_000, 1, "0.0.0", "nested deeper"),
        ("a: [" + "1," * 11_000 + "]", 1, "a", "more than 10000 nodes"),
        ("a: '" + "x" * 70_000 + "'", None, None, "is too large: 70,005 bytes, at most 65,536"),
        ("a: " + "é" * 33_000, None, None, "is too large: 66,003 bytes, at most 65,536"),
        (
            "a: &a [" + "x," * 99 + "]\n"
            + "".join(f"{chr(98 + i)}: &{chr(98 + i)} [{','.join(['*' + chr(97 + i)] * 99)}]\n" for i in range(9)),
            3, "c", "more than 10000 nodes",
        ),
    ],
)  # fmt: skip
def test_yaml_that_is_refused(text: str, line: int | None, node: str | None, message: str) -> None:
    with pytest.raises(RecipeError, match=message) as caught:
        parse_recipe_yaml(text, "f.yaml")
    assert (caught.value.file, caught.value.line, caught.value.node) == ("f.yaml", line, node)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="cannot be read"):
        load_recipe(tmp_path / "absent.yaml")
    with pytest.raises(RecipeError, match="cannot be read"):
        load_recipe(tmp_path)
    (tmp_path / "latin.yaml").write_bytes(b"name: caf\xe9\n")
    with pytest.raises(RecipeError, match=r"not UTF-8 text: .* at byte 9"):
        load_recipe(tmp_path / "latin.yaml")
    for content in (b"# " + b"x" * 10**6, b"#" + "é".encode() * 500_000 + b"x"):  # the second is cut inside an é
        (tmp_path / "long.yaml").write_bytes(content)
        with pytest.raises(RecipeError, match="is too large: 1,000,002 bytes, at most 65,536"):
            load_recipe(tmp_path / "long.yaml")


# ------------------------------------------------------------------------------------------------------ schema


def changed(old: str, new: str) -> str:
    text = BUILT_IN["llama"]
    assert text.count(old) >= 1, old
    return text.replace(old, new, 1)


def line_of(text: str, part: str) -> int:
    return next(number for number, line in enumerate(text.splitlines(), start=1) if part in line)


@pytest.mark.parametrize(
    ("old", "new", "at", "node", "message"),
    [
        ("final_norm:", "final_nrom:", "final_nrom", "model.final_nrom", "did you mean .final_norm."),
        ("rotary:\n", "sinks: self_attn.sinks\n          rotary:\n", "sinks:", "*.attend.attention.sinks",
         "the language has no attention sinks; known are norm, when, qkv, "),
        ("rotary:\n", "clip_qkv: 8\n          rotary:\n", "clip_qkv:", "*.attend.attention.clip_qkv",
         "the language has no bounds on queries"),
        ("at: model.layers", "prefix: model.layers", "prefix:", "model.layers.prefix",
         r"unknown key 'prefix'; known are at, "),
        ("rotary:\n", "state: 3\n          rotary:\n", "state: 3", "*.attend.attention.state",
         "unknown key 'state'(; did you mean .*)?[;?] [Kk]nown are "),
        ("rotary:\n", "ssm_state: 3\n          rotary:\n", "ssm_state", "*.attend.attention.ssm_state",
         "the language has no convolution or recurrent state"),
        ("rotary:\n", "sub_norm: 3\n          rotary:\n", "sub_norm", "*.attend.attention.sub_norm",
         "the language has no norm between the heads and the output of an attention"),
        ("rotary:\n", "theta: 3\n          rotary:\n", "theta: 3", "*.attend.attention.theta",
         "unknown key 'theta'; known are norm, when, qkv, .* rotary, "),
        ("norm: {kind", "norms: {kind", "norms", "*.attend.norms", "did you mean 'norm'"),
        ("kind: rms", "kind: rsm", "rsm", "*.attend.norm.kind", "must be 'rms' or 'layer', not 'rsm'"),
        ("kind: gated", "kind: plain", "mlp:", "*.transform.mlp", "a plain mlp has no `gate`"),
        ("          gate: mlp.gate_proj\n", "", "mlp:", "*.transform.mlp", "needs a `gate`"),
        ("          down: mlp.down_proj\n", "", "mlp:", "*.transform.mlp", "key 'down' is missing"),
        ("  vocab_size:    vocab_size\n", "", "config:", "config", "key 'vocab_size' is missing"),
        ("name: llama\n", "", "architectures", "", "key 'name' is missing"),
        ("name: llama\n", "name: 7\n", "name: 7", "name", "must be a text"),
        ("name: llama\n", "name: '../x'\n", "name:", "name", "not a recipe's name: letters, digits, and"),
        ("name: llama\n", f"name: {'x' * 65}\n", "name:", "name", "is too long: 65 characters, at most 64"),
        ("[LlamaForCausalLM, LLaMAForCausalLM]", "[]", "architectures", "architectures", "is empty; name at least one"),
        ("[LlamaForCausalLM, LLaMAForCausalLM]", "Llama", "architectures", "architectures", "must be a list"),
        ("[LlamaForCausalLM, LLaMAForCausalLM]", "[A, 3]", "architectures", "architectures.1", "must be a text"),
        ("at: model.layers.{layer}", "at: model.layers", "at: ", "model.layers.at", "must contain {layer}"),
        ("at: model.layers.{layer}", "at: model.{layers}", "at: ", "model.layers.at", "only placeholder"),
        ("at: model.layers.{layer}", "at: '{layer!r}.{layer}'", "at: ", "model.layers.at", "only placeholder"),
        ("weight: lm_head", "weight: ../lm_head", "lm_head", "model.head.weight", "not a module's name: "),
        ("weight: lm_head", "weight: [lm_head]", "lm_head", "model.head.weight", "must be a text"),
        ("embedding: {tokens: model.embed_tokens}", "embedding: tokens", "embedding:", "model.embedding", "a mapping"),
        ("embedding: {tokens: model.embed_tokens}", "embedding: [1]", "embedding:", "model.embedding", "not a list$"),
        ("size: intermediate_size", "size: 3 *", "size: 3", "*.transform.mlp.size", r"it ends after '\*'$"),
        ("size: intermediate_size", "size: [1]", "size: [1]", "*.transform.mlp.size", "must be an expr"),
        ("size: intermediate_size", "size: 2**9", "2**9", "*.transform.mlp.size", "powers"),
        ("size: intermediate_size", "size: x.__class__", "__class__", "*.transform.mlp.size", "not allowed as"),
        ("size: intermediate_size", "size: f(x)", "size: f", "*.transform.mlp.size", "unknown function"),
        ("size: intermediate_size", "size: 1e999", "size: 1e", "*.transform.mlp.size", "not finite"),
        ("attend:", "'attend it':", "attend it", "*.attend it", "not a name: letters, digits and _"),
        ("        mlp:", "        attention: {}\n        mlp:", "attention: {}", "*.transform.attention", "missing"),
        ("weight: model.norm, ", "", "final_norm", "model.final_norm", "needs a `weight`"),
        ("ignores:", "ignore:", "ignore:", "ignore", "did you mean 'ignores'"),
        ("  tensors:", "  tensor:", "tensor:", "ignores.tensor", "did you mean 'tensors'"),
    ],
)  # fmt: skip
def test_a_recipe_the_schema_refuses(tmp_path: Path, old: str, new: str, at: str, node: str, message: str) -> None:
    text = changed(old, new)
    error = wrong(tmp_path, text, message)
    assert (error.node or "") == node.replace("*", "model.layers.residual")
    assert error.line == line_of(text, at)


def test_a_branch_has_a_part(tmp_path: Path) -> None:
    text = changed(
        "        norm: {kind: rms, weight: post_attention_layernorm, eps: eps}\n        mlp:", "        mlp:"
    )
    recipe = load(tmp_path, text)
    assert recipe.schema.model.layers.residual["transform"].norm is None
    start, end = text.index("      transform:"), text.index("  final_norm")
    error = wrong(tmp_path, text[:start] + "      transform: {norm: {kind: rms, weight: n, eps: 1}}\n" + text[end:])
    assert error.node == "model.layers.residual.transform"
    assert "at least one part" in str(error)


# ----------------------------------------------------------------------------------------------------- extends

VARIANT = "name: mine\nextends: llama\narchitectures: [MineForCausalLM]\n"


def test_a_variant_states_its_difference(tmp_path: Path) -> None:
    text = VARIANT + "model:\n  final_norm: {eps: 0.5}\n  layers: {residual: {attend: {norm: null}}}\n"
    recipe = load(tmp_path, text)
    parent = load_recipe(RECIPES / "llama.yaml")
    assert (recipe.name, recipe.architectures, recipe.extends) == ("mine", ("MineForCausalLM",), "llama")
    assert recipe.schema.config.hidden_size.text == parent.schema.config.hidden_size.text
    assert recipe.schema.model.layers.residual["attend"].norm is None
    assert list(recipe.schema.model.layers.residual) == ["attend", "transform"]
    norm = recipe.schema.model.final_norm
    assert norm is not None
    assert (norm.kind, norm.weight, norm.eps.evaluate(None)) == ("rms", "model.norm", 0.5)  # type: ignore[arg-type]
    own, inherited = (
        recipe.tree.find(("model", "final_norm", "eps")),
        recipe.tree.find(("model", "final_norm", "weight")),
    )
    assert (own.file, own.line) == (str(tmp_path / "mine.yaml"), 5)
    assert inherited.file.endswith("llama.yaml")


def test_an_error_points_to_the_file_the_piece_came_from(tmp_path: Path) -> None:
    error = wrong(tmp_path, VARIANT + "model:\n  final_norm: {kind: rsm}\n")
    assert (error.line, error.node) == (5, "model.final_norm.kind")
    (tmp_path / "base.yaml").write_text(changed("name: llama", "name: base").replace("kind: gated", "kind: gatd"))
    with pytest.raises(RecipeError) as caught:
        load(tmp_path, "name: mine\nextends: base\n")
    assert caught.value.file == str(tmp_path / "base.yaml")


def test_a_chain_of_variants(tmp_path: Path) -> None:
    (tmp_path / "middle.yaml").write_text("name: middle\nextends: mistral\nconfig: {max_positions: 77}\n")
    recipe = load(tmp_path, "name: mine\nextends: middle\nconfig: {num_kv_heads: 2}\n")
    assert [recipe.schema.config.max_positions.text, recipe.schema.config.num_kv_heads.text] == ["77", "2"]
    assert recipe.schema.model.layers.residual["attend"].attention is not None
    assert "4096" in recipe.schema.model.layers.residual["attend"].attention.sliding_window.text
    assert recipe.architectures == ("MistralForCausalLM",)


@pytest.mark.parametrize(
    ("text", "line", "node", "message"),
    [
        ("name: mine\nextends: nothing\n", 2, "extends", "no recipe is called 'nothing'"),
        ("name: mine\nextends: ../llama\n", 2, "extends", "no recipe is called"),
        ("name: mine\nextends: /etc/passwd\n", 2, "extends", "no recipe is called"),
        ("name: mine\nextends: ''\n", 2, "extends", "no recipe is called"),
        ('name: mine\nextends: "a\\0b"\n', 2, "extends", "no recipe is called"),
        ("name: mine\nextends: [llama]\n", 2, "extends", "must be the name of a recipe"),
        ("name: mine\nextends: null\n", 2, "extends", "must be the name of a recipe"),
        ("name: mine\nextends: mine\n", 2, "extends", "a recipe cannot extend itself: mine -> mine"),
        ("name: other\nextends: other\n", 2, "extends", "a recipe cannot extend itself: other -> other"),
        ("extends: llama\n", 1, None, "a name of its own|`name` of its own"),
        ("name: mine\nextends: llama\nname2: x\n", 3, "name2", "unknown key"),
        ("name: mine\nextends: llama\nmodel: {heads: null}\n", 3, "model.heads", "none is inherited here"),
        ("name: mine\nextends: llama\nmodel: {head: {x: {y: null}}}\n", 3, "model.head.x.y", "none is inherited here"),
        ("name: mine\nextends: llama\nconfig: {max_positions: null}\n", 3, "config", "key 'max_positions' is missing"),
        ("name: mine\nextends: llama\nmodel: {layers: {residual: null}}\n", 3, "model.layers", "'residual' is missing"),
        ("name: mine\nextends: llama\nmodel: 3\n", 3, "model", "must be a mapping"),
    ],
)
def test_a_variant_that_is_refused(tmp_path: Path, text: str, line: int, node: str | None, message: str) -> None:
    error = wrong(tmp_path, text, message)
    assert (error.line, error.node) == (line, node)


def test_the_error_about_a_cycle_lists_all_of_it(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("name: a\nextends: b\n")
    (tmp_path / "b.yaml").write_text("name: b\nextends: c\n")
    (tmp_path / "c.yaml").write_text("name: c\nextends: a\n")
    with pytest.raises(RecipeError, match=r"itself: a -> b -> c -> a$") as caught:
        load_recipe(tmp_path / "a.yaml")
    assert (caught.value.file, caught.value.line) == (str(tmp_path / "c.yaml"), 2)


def test_a_chain_that_is_too_long(tmp_path: Path) -> None:
    for index in range(20):
        (tmp_path / f"r{index}.yaml").write_text(f"name: r{index}\nextends: r{index + 1}\n")
    with pytest.raises(RecipeError, match="more than 8 recipes in a row"):
        load_recipe(tmp_path / "r0.yaml")


# ------------------------------------------------------------------------------------------------- JSON Schema


def test_the_json_schema_accepts_the_built_in_recipes_and_refuses_mistakes() -> None:
    validator = jsonschema.Draft202012Validator(json_schema())
    jsonschema.Draft202012Validator.check_schema(json_schema())
    for text in BUILT_IN.values():
        validator.validate(yaml.safe_load(text))
    llama, mistral = yaml.safe_load(BUILT_IN["llama"]), yaml.safe_load(BUILT_IN["mistral"])
    mistral["model"]["head"] = None  # a variant may remove what it inherits
    validator.validate(mistral)
    for broken in (
        {key: value for key, value in llama.items() if key != "model"},
        llama | {"modle": {}},
        llama | {"name": 3},
        llama | {"config": llama["config"] | {"hidden_size": [1]}},
        mistral | {"modle": {}},
        mistral | {"model": {"layers": {"residual": {"attend": {"nrom": {}}}}}},
    ):
        assert not validator.is_valid(broken)


def test_every_key_of_the_language_is_described() -> None:
    schema = json_schema()
    for title, section in {"Recipe": schema["else"], **schema["$defs"]}.items():
        assert section["description"], title
        for key, value in section["properties"].items():
            assert value.get("description") or "$ref" in json.dumps(value), f"{title}.{key}"


# -------------------------------------------------------------------------------------------------------- fuzz

FRAGMENTS = [
    *("null", "true", "3", "-1", "1e999", "[]", "{}", "''", "'x'", "*a", "&a x", "!!python/name:os.system x", "x: y"),
    *("{layer}", "{x}", "first('a')", "2**99", "((((", "a.b.c", "x.__class__", "- a", "? b", "| ", "> ", "%", "@", "`"),
    *(
        "\t",
        "\0",
        "\ufeff",
        "\u2028",
        "é",
        "'",
        '"',
        "#",
        "extends: opt",
        "name: mine",
        "<<: *x",
        "...",
        "---",
        "\\U0011",
    ),
]


def mutated(text: str, rng: random.Random) -> str:
    lines = text.splitlines(keepends=True)
    for _ in range(rng.randint(1, 4)):
        index = rng.randrange(len(lines)) if lines else 0
        line = lines[index] if lines else ""
        at = rng.randrange(len(line) + 1)
        match rng.randrange(8):
            case 0:
                del lines[index : index + rng.randint(1, 3)]
            case 1:
                lines.insert(index, rng.choice(lines))
            case 2:
                lines[index : index + 1] = [line[:at] + rng.choice(FRAGMENTS) + line[at:]]
            case 3:
                key, _, _ = line.partition(":")
                lines[index : index + 1] = [f"{key}: {rng.choice(FRAGMENTS)}\n"]
            case 4:
                lines[index : index + 1] = [" " * rng.randint(0, 12) + line.lstrip()]
            case 5:
                lines[index : index + 1] = [line[:at] + line[at + rng.randint(1, 5) :]]
            case 6:
                lines[index : index + 1] = [
                    line[:at] + chr(rng.choice([rng.randrange(128), rng.randrange(0xD800)])) + line[at:]
                ]
            case _:
                other = rng.randrange(len(lines)) if lines else 0
                lines[index : index + 1], lines[other : other + 1] = lines[other : other + 1], lines[index : index + 1]
        lines = lines or ["\n"]
    return "".join(lines)


@settings(max_examples=400, deadline=None)
@given(name=st.sampled_from(sorted(BUILT_IN)), seed=st.integers(0, 2**32))
@example(name="llama", seed=0)
def test_a_mutated_recipe_loads_or_is_refused(tmp_path_factory: pytest.TempPathFactory, name: str, seed: int) -> None:
    text = mutated(BUILT_IN[name], random.Random(seed))
    file = tmp_path_factory.getbasetemp() / "mutated.yaml"
    file.write_bytes(text.encode("utf-8", "surrogatepass"))
    try:
        recipe = load_recipe(file)
    except RecipeError as error:
        refused = error
    else:
        assert recipe.name
        return
    assert refused.file is not None
    str(refused).encode()  # printable: no half characters from the file
