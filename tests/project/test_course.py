"""docs/recipes.md does what it says, and docs/recipe-language.md names every key: both are checked from their text."""

from __future__ import annotations

import difflib
import re
from pathlib import Path

import pytest

from tests.pages import anchor
from tests.project.course import PAGE, TextError, alike, followed
from tests.project.reference_tables import own_keys, sections

REFERENCE = PAGE.parent / "recipe-language.md"


@pytest.mark.slow  # test_planning_page follows a shorter page in the same way
def test_all_that_the_course_says_happens(tmp_path: Path) -> None:
    text = PAGE.read_text("utf-8")
    lines = text.splitlines(), followed(text, tmp_path).splitlines()
    difference = "\n".join(difflib.unified_diff(*lines, "shown in the page", "what happens", lineterm=""))
    assert not difference, f"\n{difference}\n`python -m tests.project.course` puts what is printed now into the page"


def test_nothing_in_the_course_is_left_undone() -> None:
    """Every fenced block is one of the kinds that are executed, and the page has enough of each to be a course."""
    openings = re.findall(r"^```(\S+)(.*)$", PAGE.read_text("utf-8"), re.MULTILINE)
    assert all(language == "console" or words.strip() for language, words in openings), openings
    kinds = [words.split()[0] if words.strip().startswith("from") else language for language, words in openings]
    for kind, least in {"console": 20, "from": 20, "yaml": 9, "diff": 3, "python": 4}.items():
        assert kinds.count(kind) >= least, kind


RECIPE = (PAGE.parents[1] / "recipes" / "mistral.yaml").read_text("utf-8")
STORY = f"""
```yaml mine.yaml
{RECIPE.replace("name: mistral", "name: mine").replace("4096", "100")}```

```diff mine.yaml
-architectures: [MistralForCausalLM]
+architectures: [MineForCausalLM]
```

```yaml mine.yaml +
aliases: {{model: [transformer]}}
```

```python counts.py
print(1)
print("3.5e-03")
```

```console
$ fastgen recipe show mine.yaml
{RECIPE.splitlines()[0]}
⋮
        attention:
⋮
aliases: {{model: [transformer]}}
$ fastgen recipe show nothing.yaml   # exit status 1
⋮
$ python counts.py
1
2.5e-03
$ fastgen recipe show mine.yaml --json
{{"name": "mine"}}
```
"""
RIGHT, LAST = STORY.split("$ fastgen recipe show mine.yaml --json")
RIGHT += "```\n"


def test_what_is_printed_stands_in_the_place_of_what_is_shown(tmp_path: Path) -> None:
    found = followed(STORY, tmp_path)
    assert (tmp_path / "mine.yaml").read_text().endswith("\naliases: {model: [transformer]}\n")
    assert "architectures: [MineForCausalLM]\n" in (tmp_path / "mine.yaml").read_text()
    assert found.startswith(STORY.removesuffix(LAST))
    assert found != STORY, "what is shown last is not all that is printed"
    assert followed(found, tmp_path) == found


@pytest.mark.parametrize(
    ("shown", "instead"),
    [
        ("$ fastgen recipe show mine.yaml\n", "$ fastgen recipe show mine.yaml   # exit status 1\n"),
        ("   # exit status 1", ""),
        ("exit status 1", "exit status 2"),
        ("        attention:\n", "        latent_attention:\n"),
        ("        attention:\n", "       attention:\n"),
        ("⋮\naliases", "aliases"),
        ("\n1\n", "\n2\n"),
        ("\n1\n", "\n1\n1\n"),
        ("\n1\n", "\n"),
        ("2.5e-03", "4.5e-02"),
    ],
)
def test_what_is_not_so_is_found(tmp_path: Path, shown: str, instead: str) -> None:
    assert followed(RIGHT, tmp_path) == RIGHT
    wrong = RIGHT.replace(shown, instead, 1)
    assert wrong != RIGHT
    assert followed(wrong, tmp_path) != wrong


def test_an_edit_or_a_quotation_that_does_not_fit_names_its_line(tmp_path: Path) -> None:
    with pytest.raises(TextError, match=r"line 5: a.yaml has these lines 0 times"):
        followed("```yaml a.yaml\nx: 1\n```\n\n```diff a.yaml\n-x: 2\n+x: 3\n```\n", tmp_path)
    with pytest.raises(TextError, match=r"a.yaml has these lines 2 times"):
        followed("```yaml a.yaml\nx: 1\nx: 1\n```\n```diff a.yaml\n-x: 1\n+x: 3\n```\n", tmp_path)
    with pytest.raises(TextError, match=r"line 2: recipes/llama.yaml does not say"):
        followed("\n```yaml from llama\nnorm: {kind: layer}\n```\n", tmp_path)
    quoted = "```yaml from mistral\nattend:\n  attention:\n    rotary: {trained_positions: null}\n```\n"
    assert followed(quoted, tmp_path) == quoted
    with pytest.raises(TextError, match="what is meant by 'twice'"):
        followed("```yaml a.yaml twice\nx: 1\n```\n", tmp_path)


@pytest.mark.parametrize(
    ("shown", "printed", "same"),
    [
        ("a\n", "a", True),
        ("a  \nb\n", "a\nb  \n\n", True),
        ("", "", True),
        ("", "a\n", False),
        ("a\n", "", False),
        ("a\nb\n", "a\n", False),
        ("a.c\n", "abc\n", False),
        ("⋮\n", "", True),
        ("a\n⋮\nb\n", "a\nb\n", True),
        ("a\n⋮\nb\n", "a\nx\ny\nb\n", True),
        ("a\n⋮\nb\n", "a\nx\ny\n", False),
        ("a ⋮ c\n", "a b b c\n", True),
        ("a ⋮ c\n", "a b b d\n", False),
        ("a ⋮ c\n", "a b\nb c\n", False),
        ("a⋮ 2.0e-01\n", "a 3.0e-03 2.0e-01\n", True),
        ("a⋮ 2.0e-01\n", "a 2.0e-01 3.0e-03\n", False),
        ("by 2.1e+00 here\n", "by 9.9e+00 here\n", True),
        ("by 2.1e+00 here\n", "by 2.2e+01 here\n", False),
        ("by 2.1e+00 here\n", "by 2.0e-01 here\n", False),
        ("by 2.1e+00 here\n", "by 2.1 here\n", False),
        ("by 2.1 here\n", "by 2.1e+00 here\n", False),
        ("1.0e-06 2.0e-06\n⋮\n3.0e-06\n", "1.1e-06 2.2e-06\n9.0e+09\n3.3e-06\n", True),
        ("1.0e-06 2.0e-06\n⋮\n3.0e-06\n", "1.1e-06 2.2e-06\n9.0e+09\n3.3e-04\n", False),
    ],
)
def test_what_counts_as_the_same(shown: str, printed: str, same: bool) -> None:
    assert alike(shown, printed) is same


def table_problems(text: str) -> list[str]:
    """Returns where the tables of the reference and the schema differ: ``Section.key: both``."""
    titles, name, title, shown = {}, "", "", {}
    for line in text.splitlines():
        if line.startswith("#"):
            title, name = line.lstrip("# "), ""
        elif found := re.fullmatch(r"<!-- (\w+) -->", line):
            name = found[1]
            titles[name], shown[name] = title, {}
        elif name and (row := re.fullmatch(r"\| `(\w+)` \| (.+?) \| (.+?) \| (.+?) \|", line)):
            shown[name][row[1]] = (row[3], row[4])

    def link(section: str) -> str:
        return f"[{titles.get(section)}](#{anchor(titles.get(section, ''))})"

    wanted = {name: own_keys(section, link) for name, section in sections().items()}
    problems = [f"{name}: has no table" for name in wanted if name not in shown]
    problems += [f"{name}: no such section" for name in shown if name not in wanted]
    for name in wanted.keys() & shown.keys():
        keys = [*wanted[name], *(key for key in shown[name] if key not in wanted[name])]
        problems += [
            f"{name}.{key}: {shown[name].get(key)} is shown, {wanted[name].get(key)} is true"
            for key in keys
            if shown[name].get(key) != wanted[name].get(key)
        ]
    return problems


def test_the_reference_gives_every_key_its_default_and_its_values() -> None:
    assert table_problems(REFERENCE.read_text("utf-8")) == []
    assert len(sections()) >= 30
    assert sum(len(own_keys(section, str)) for section in sections().values()) >= 120


@pytest.mark.parametrize(
    ("row", "instead", "problem"),
    [
        (r"\| `softcap` \|[^\n]*\n", "", "softcap"),
        (r"(\| `theta` \| [^|]* \|) \*required\*", r"\1 `10000`", "Rotary.theta"),
        (r"`half`, `interleaved` \|", "`half` |", "Rotary.kind"),
        (r"(<!-- Alibi -->\n(?:\|.*\n){2})", r"\1| `slope` | Of the bias. | – | *expr* |\n", "Alibi.slope"),
        (r"<!-- Router -->", "", "Router: has no table"),
    ],
)
def test_a_table_that_is_wrong_is_found(row: str, instead: str, problem: str) -> None:
    text, count = re.subn(row, instead, REFERENCE.read_text("utf-8"), count=1)
    assert count == 1
    assert any(problem in each for each in table_problems(text))
