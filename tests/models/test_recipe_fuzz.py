"""Hostile recipes and configurations are refused quickly, with a short RecipeError that has a location, and in little
memory; they cause no other traceback, no hang, and run no code."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any

import pytest
import yaml

from fastgen.errors import RecipeError
from fastgen.models.recipe.recipe import load_recipe
from fastgen.models.resolve.resolve import resolve
from tests.fast import cases
from tests.models import test_recipe_published, test_recipe_published_families
from tests.recipe_tools.published import recipe_name
from tests.shuffled import RECIPES, shipped_texts

# Processor time, since wall time depends on the load of the machine.
HANG_S = 20
MAX_MESSAGE = 2500

TEXTS = shipped_texts()
PUBLISHED = test_recipe_published.PUBLISHED | test_recipe_published_families.PUBLISHED


def small_configs() -> dict[str, dict[str, Any]]:
    """Returns the smallest published configuration of each recipe, cut to two layers and few experts."""
    found: dict[str, tuple[int, dict[str, Any]]] = {}
    for config, count in PUBLISHED.values():
        name = recipe_name(config)
        if name not in found or count < found[name][0]:
            found[name] = (count, config)
    cut = {"num_hidden_layers": 2, "n_layer": 2, "n_routed_experts": 16, "num_experts": 16, "num_local_experts": 16}
    return {
        name: {key: min(value, cut[key]) if key in cut else value for key, value in config.items()}
        for name, (_, config) in found.items()
    }


CONFIGS = small_configs()


@contextlib.contextmanager
def watchdog() -> Iterator[None]:
    """Turns a hang into an error."""

    def bark(signum: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"still busy after {HANG_S} s")

    before = signal.signal(signal.SIGPROF, bark)
    signal.setitimer(signal.ITIMER_PROF, HANG_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def is_placed(error: RecipeError) -> bool:
    """Returns whether an error has a location: a line of the recipe file, or the config.json."""
    if error.file == "config.json":
        return error.line is None
    assert error.file is not None
    lines = Path(error.file).read_text("utf-8").splitlines() or [""]
    return error.line is not None and 1 <= error.line <= len(lines)


def outcome(file: Path, config: dict[str, Any]) -> RecipeError | None:
    """Returns the outcome of loading and resolving a recipe."""
    with watchdog():
        try:
            resolve(load_recipe(file), config)
            return None
        except RecipeError as error:
            refused = error
    assert is_placed(refused), refused
    assert len(str(refused)) <= MAX_MESSAGE, f"{len(str(refused))} characters: {str(refused)[:300]}"
    str(refused).encode()  # printable: no half characters
    return refused


# ------------------------------------------------------------------------------------------------------ every node

# Replacements for a node: values of the wrong kind, out of bounds, or meant to run code.
HOSTILE: list[Any] = [
    *(None, True, False, 0, -1, 1, 10**18, 2**31, 1e308, -1e308, 1e-320, float("inf"), float("nan"), 10**400),
    *([], {}, [None], [1, 2], {"a": 1}, {"when": "1"}, [[["x"]]], "", " ", "x", "none", "'text'", "[]", "layer"),
    *("1/0", "1 // 0", "1 % 0", "1e308 * 10", "9223372036854775807 + 1", "sqrt(-1)", "log(0)", "int(1e300)"),
    *("hidden_size * 99999999999", "-hidden_size", "hidden_size / 7", "hidden_size == hidden_size", "[1] in [[1]]"),
    *("hidden_act", "rope_parameters | default(none)", "architectures", "first('x.y')", "first('architectures')"),
    *("2 ** 99", "9 ** 9 ** 9", "'x' * 10", "[0] * 9", "range(9)", "'%1000000000d' % 1", "'{:>99}'.format(1)"),
    *("''.__class__.__mro__", "hidden_size.__class__", "self", "lipsum.__globals__", "cycler.__init__", "config"),
    *("(" * 13 + "1" + ")" * 13, "-" * 300 + "1", "not " * 100 + "true", "1 if " * 60 + "true", "a" * 999, "1" * 999),
    *("{{ 1 }}", "{% if 1 %}", "{# #}", "1 # x", "x | attr('y')", "x | map('y')", "x[1:2]", "lambda: 1", "f'{x}'"),
    *(
        "{layer}",
        "{layer}{layer}",
        "{expert}",
        "{layer!r}",
        "{layer.__class__}",
        "{0}",
        "{",
        "a..b",
        ".a",
        "a.",
        "../x",
    ),
    *("/etc/passwd", "a\x00b", "a\nb", "\u2028", "é", "\u202e", "\ufeff", "%s", "$(id)", "`id`", "~", "*", "a" * 5000),
    *("in", "in in", "part in", "(part", "part) in", "() in", "(in)", "((part) in)", "... in", "1 in", "in -> in"),
    *("(num_heads head_dim", "(a b c d e f g h) in", "(part part) in", "in_ out_", "(part head_dim) in " * 9),
]


def paths(tree: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    children = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, child in children:
        yield (*at, key)
        yield from paths(child, (*at, key))


def put(tree: Any, path: tuple[Any, ...], value: Any) -> None:
    for key in path[:-1]:
        tree = tree[key]
    tree[path[-1]] = value


def written(value: Any) -> str:
    """Returns YAML with numbers as Python writes them, so that ``inf`` and ``nan`` are texts."""
    return yaml.safe_dump(value, allow_unicode=True, width=100_000, sort_keys=False)


@cache
def as_json(name: str) -> str:
    return json.dumps(yaml.safe_load(TEXTS[name]))


def plain(name: str) -> dict[str, Any]:
    """Returns the recipe's data with aliases expanded."""
    data: dict[str, Any] = json.loads(as_json(name))
    return data


def replaced_nodes(name: str, cases: list[tuple[tuple[Any, ...], Any]], directory: Path) -> int:
    """Returns how many recipes with one node replaced are refused."""
    file, num_refused, limit = directory / f"{name}.yaml", 0, sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(5000)
    try:
        for path, value in cases:
            tree = plain(name)
            put(tree, path, value)
            file.write_text(written(tree), "utf-8")
            try:
                num_refused += outcome(file, CONFIGS[name]) is not None
            except Exception as error:
                raise AssertionError(f"{name}: {'.'.join(map(str, path))} = {value!a:.300}: {error!r}") from error
    finally:
        sys.set_int_max_str_digits(limit)
    return num_refused


@pytest.mark.parametrize("name", TEXTS)
def test_some_nodes_replaced(name: str, tmp_path: Path) -> None:
    rng = Random(f"nodes of {name}")
    nodes = list(paths(plain(name)))
    cases = [(rng.choice(nodes), rng.choice(HOSTILE)) for _ in range(16)]
    assert replaced_nodes(name, cases, tmp_path) >= 8


@pytest.mark.slow
@pytest.mark.parametrize("name", TEXTS)
def test_many_nodes_replaced(name: str, tmp_path: Path) -> None:
    """Every node is replaced by several values, and every value is used somewhere."""
    rng = Random(f"all nodes of {name}")
    nodes = list(paths(plain(name)))
    cases = [(path, value) for path in nodes for value in rng.sample(HOSTILE, 4)]
    cases += [(rng.choice(nodes), value) for value in HOSTILE]
    assert replaced_nodes(name, cases, tmp_path) > len(cases) / 2


def test_a_hostile_expression_is_refused_at_its_node(tmp_path: Path) -> None:
    """All are tried at the same node, and none of them has a value."""
    text = TEXTS["llama"].replace("name: llama", "name: mine")
    (line,) = [n for n, each in enumerate(text.splitlines(), 1) if each.lstrip().startswith("vocab_size:")]
    start = HOSTILE.index("1/0")
    for value in HOSTILE[start : HOSTILE.index("in")]:
        file = tmp_path / "mine.yaml"
        old = text.splitlines()[line - 1]
        file.write_text(text.replace(old, f"  vocab_size: {json.dumps(value)}"), "utf-8")
        error = outcome(file, CONFIGS["llama"])
        if value == "hidden_size * 99999999999" or error is not None:
            assert error is not None
            assert (error.file, error.line) == (str(file), line), value
        else:
            assert value in ("hidden_size", "int(1e300)"), value


# ------------------------------------------------------------------------------------------------------- whole files

VARIANT = "name: mine\nextends: llama\n"
LONG = "x" * 60_000
FILES: dict[str, tuple[str, int | None]] = {  # the text, and the line of the error
    "extends a name too long for a file": (f"name: mine\nextends: {'a' * 300}\n", 2),
    "extends sixty thousand characters": (f"name: mine\nextends: {LONG}\n", 2),
    "extends a path": ("name: mine\nextends: ../../etc/passwd\n", 2),
    "extends a path on Windows": ("name: mine\nextends: '..\\llama'\n", 2),
    "extends half a character": ('name: mine\nextends: "\\ud800"\n', 2),
    "a key of half a character": (VARIANT + '"\\ud800": 1\n', 3),
    "a key with control characters": (VARIANT + '"a\\e[31mb\\n": 1\n', 3),
    "a long key": (VARIANT + f"? {'k' * 5000}\n: 1\n", 3),
    "a name of half a character": (VARIANT + 'model: {head: {weight: "\\udfff"}}\n', 3),
    "half a character in what is ignored": (VARIANT + 'ignores: {config: ["\\ud800"]}\n', 3),
    "an alias of a long name": (VARIANT + f"a: *{'x' * 3000}\n", 3),
    "a long tag": (VARIANT + f"a: !{'x' * 3000} 1\n", 3),
    "a tag that builds an object": (VARIANT + "a: !!python/object/apply:os.system [id]\n", 3),
    "a merge key": (VARIANT + "base: &b {x: 1}\nconfig: {<<: *b}\n", 3),
    "many branches": (
        VARIANT
        + "model: {layers: {residual: {"
        + ", ".join(
            f"b{i}: {{when: 1 == 2, mlp: {{kind: plain, size: 1, activation: a, up: u, down: d, bias: false}}}}"
            for i in range(500)
        )
        + "}}}\n",
        3,
    ),
    "many aliases": (VARIANT + "aliases: {" + ", ".join(f"a{i}: [b{i}]" for i in range(3000)) + "}\n", 3),
    "many spellings": (VARIANT + "aliases: {model: [" + ", ".join(f"b{i}" for i in range(9000)) + "]}\n", None),
    "a name that is a number": (f"name: {'9' * 5000}\nextends: llama\n", 1),
    "a flood of question marks": ("? " * 30_000, 1),
    "a flood of braces": ("{" * 60_000, 1),
    "a flood of anchors": (VARIANT + "".join(f"k{i}: &a{i} [*a{i - 1}]\n" for i in range(1, 2000)), 3),
    "a flood of tags": ("!" * 60_000, 1),
    "a flood of quotes": ("'" * 60_001, 1),
    "a flood of folded lines": (VARIANT + "a: >\n" + "\n" * 60_000, 3),
    "a flood of escapes": (VARIANT + 'a: "' + "\\x00" * 15_000 + '"\n', 3),
    "a flood of comments": ("#\n" * 32_000, 1),
    "tabs": (VARIANT + "config:\n\tvocab_size: 1\n", 4),
    "a control character": (VARIANT + "a: \x07\n", 3),
    "a character beyond Unicode": (VARIANT + 'a: "\\UFFFFFFFF"\n', 3),
}


@pytest.mark.parametrize("what", FILES)
def test_files(what: str, tmp_path: Path) -> None:
    text, line = FILES[what]
    file = tmp_path / "mine.yaml"
    file.write_text(text, "utf-8")
    error = outcome(file, CONFIGS["llama"] | {"num_hidden_layers": 1024})
    assert error is not None
    if line is None:  # the file is valid, but not for that many layers
        assert "tensors" in str(error)
    else:
        assert (error.file, error.line) == (str(file), line), error


@pytest.mark.parametrize("name", ["a\0b.yaml", "x" * 5000 + ".yaml", "\ud800.yaml"])
def test_paths_that_name_no_file(name: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="cannot be read"):
        load_recipe(tmp_path / name)


def test_bytes_changed(tmp_path: Path) -> None:
    """Single bytes of every recipe are overwritten, removed and inserted."""
    file = tmp_path / "mine.yaml"
    for name, text in TEXTS.items():
        rng = Random(f"bytes of {name}")
        for _ in range(12):
            content = bytearray(text.encode())
            for _ in range(rng.randint(1, 3)):
                at = rng.randrange(len(content))
                content[at : at + rng.randint(0, 2)] = rng.randbytes(rng.randint(0, 2))
            file.write_bytes(content)
            with watchdog(), contextlib.suppress(RecipeError):
                load_recipe(file)
                continue
            with pytest.raises(RecipeError) as caught:
                load_recipe(file)
            assert caught.value.line is not None, (name, bytes(content))
            assert 1 <= caught.value.line <= content.count(b"\n") + content.count(b"\r") + 1


# -------------------------------------------------------------------------------------------------------- config.json

VALUES: list[Any] = [
    *(None, True, 0, -1, 2**31, 2**63, 10**400, 1e308, -1e308, 5e-324, float("inf"), float("nan")),
    *("", "x", "\ud800", "x" * 10**5, "gelu", [], [[]], [0] * 10**5, {}, {"a": {"b": {}}}, {"rope_type": "yarn"}),
    *({"rope_type": "linear", "factor": 1e308}, {"rope_type": "x" * 10**5}, {"\ud800": 1}, {"k" * 10**5: 1}),
]


@pytest.mark.parametrize("name", TEXTS)
def test_configurations(name: str) -> None:
    """Every key of a published configuration, also inside mappings, gets drawn hostile values."""
    rng = Random(f"config of {name}")
    for path in paths(CONFIGS[name]):
        for value in rng.sample(VALUES, 3):
            config = json.loads(json.dumps(CONFIGS[name]))
            put(config, path, value)
            try:
                outcome(RECIPES / f"{name}.yaml", config)
            except Exception as error:
                raise AssertionError(f"{name}: {'.'.join(map(str, path))} = {value!a:.200}: {error!r}") from error


WORST: dict[str, tuple[str, str, str]] = {  # recipe, changes, text of the error
    "a thousand layers of thousands of experts": (
        "mixtral",
        "num_hidden_layers=1024, num_local_experts=4096",
        "4,096 experts in each of 1,024 layers",
    ),
    "a million layers": ("llama", "num_hidden_layers=10**6", "an integer from 1 to 1024"),
    "more layers than a number has digits": ("llama", "num_hidden_layers=10**4000", "an integer beyond 64 bits|from 1"),
    "a million experts": ("mixtral", "num_local_experts=10**6", "an integer from 1 to 4096"),
    "a vocabulary beyond all memory": ("llama", "vocab_size=2**40", "an integer from 1 to 2147483647"),
    "a list of a million layers": ("qwen3_moe", "mlp_only_layers=list(range(10**6))", "at most 10,000 items"),
    "a hundred thousand unknown keys": ("llama", "**{f'hidden_siz{i}': 1 for i in range(10**5)}", "and 99,980 more"),
    "an unknown key of a million characters": ("llama", "**{'k' * 10**6: 1}", "k… is not known"),
    "a file of ten million bytes": ("x: '" + "y" * 100 + "'", "", "is too large"),
}


SELDOM = {"a million layers", "a vocabulary beyond all memory", "a list of a million layers", "a million experts"}


@pytest.mark.parametrize("what", cases(WORST, fast=WORST.keys() - SELDOM))
def test_the_worst_is_refused_in_bounded_memory(what: str, tmp_path: Path) -> None:
    """It runs in a process that may use 300 MB more than after loading the modules."""
    recipe, changes, message = WORST[what]
    program = f"""
        import json, resource, sys
        from fastgen.errors import RecipeError
        from fastgen.models.recipe.recipe import load_recipe
        from fastgen.models.resolve.resolve import resolve
        sys.set_int_max_str_digits(0)
        file, config = sys.argv[1], json.loads(sys.argv[2])
        config |= dict({changes})
        pages = int(open("/proc/self/statm").read().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 300 * 2**20,) * 2)
        try:
            resolve(load_recipe(file), config)
        except RecipeError as error:
            print(str(error)[:2000])
    """
    file = RECIPES / f"{recipe}.yaml"
    if recipe not in TEXTS:
        file = tmp_path / "large.yaml"
        file.write_text("".join(f"{recipe}\n" for _ in range(10**5)))
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), str(file), json.dumps(CONFIGS.get(recipe, {}))],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert any(each in done.stdout for each in message.split("|")), done.stdout
