"""``fastgen recipe diff`` and ``fastgen recipe explain``: for people, for pipes, and as JSON."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

CONFIG: dict[str, Any] = {
    "architectures": ["MistralForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 128,
    "max_position_embeddings": 512,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "sliding_window": 128,
    "vocab_size": 100,
}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(CONFIG))
    return file


def test_nothing_differs(run: Any, config: Path) -> None:
    for arguments in (["llama", "llama"], ["mistral", "mistral", "--config", str(config)]):
        done = run("recipe", "diff", *arguments)
        assert (done.status, done.out, done.err) == (0, "no difference\n", "")


def test_a_difference_is_told_and_is_the_exit_status(run: Any) -> None:
    done = run("recipe", "diff", "llama", "mistral")
    assert (done.status, done.err) == (1, "")
    assert done.out.startswith("--- llama ")
    assert "\nmodel.layers.residual.attend.attention.sliding_window: only in mistral\n  + mistral.yaml:14  " in done.out
    assert "\x1b" not in done.out


def test_a_terminal_gets_colours(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    plain, coloured = (
        run("recipe", "diff", "llama", "mistral"),
        run("recipe", "diff", "llama", "mistral", terminal=True),
    )
    assert "\x1b[31m" in coloured.out
    assert "\x1b[32m" in coloured.out
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured.out) == plain.out


def test_differences_as_json(run: Any, config: Path) -> None:
    done = run("recipe", "diff", "llama", "mistral", "--json")
    printed = json.loads(done.out)
    assert (done.status, printed["a"]["name"], printed["b"]["name"]) == (1, "llama", "mistral")
    assert [each["path"] for each in printed["differences"]][:2] == ["name", "architectures"]
    assert (printed["differences"][0]["a"]["value"], printed["differences"][0]["a"]["line"]) == ("llama", 2)
    models = json.loads(run("recipe", "diff", "llama", "mistral", "--json", "--config", str(config)).out)
    assert models["differences"][-1] == {
        **{"path": "attend.attention.sliding_window", "layers": [0, 1, 2]},
        **{"a": [], "b": ["128"]},
    }
    same = run("recipe", "diff", "llama", "llama", "--json")
    assert (same.status, json.loads(same.out)["differences"]) == (0, [])


@pytest.mark.parametrize(
    "arguments", [["llama", "lama"], ["absent/a.yaml", "llama"], ["llama", "mistral", "--config", "absent"], ["llama"]]
)
def test_what_cannot_be_told_is_status_2(run: Any, arguments: list[str]) -> None:
    done = run("recipe", "diff", *arguments)
    assert (done.status, done.out) == (2, "")
    assert done.err


def test_explain_in_a_pipe(run: Any, config: Path) -> None:
    for more in ([], ["--config", str(config)]):
        done = run("recipe", "explain", "mistral", *more)
        assert (done.status, done.err) == (0, "")
        assert max(map(len, done.out.splitlines())) <= 80
        assert done.out.startswith("mistral: MistralForCausalLM (")
        assert "self_attn.q_proj" in done.out
        assert ("a window of tokens: 128" in done.out) == bool(more)
        assert ("layers 0–2 of 3" in done.out) == bool(more)
        assert "\x1b" not in done.out


@pytest.mark.parametrize("columns", [40, 72, 200])
def test_explain_on_a_terminal(run: Any, monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.delenv("NO_COLOR", raising=False)
    out = run("recipe", "explain", "falcon", terminal=True).out
    assert "\x1b[" in out
    assert max(map(len, re.sub(r"\x1b\[[0-9;]*m", "", out).splitlines())) <= columns


def test_explain_as_a_picture_and_as_json(run: Any, config: Path, tmp_path: Path) -> None:
    done = run("recipe", "explain", "mistral", "--config", str(config), "--svg", str(tmp_path / "m.svg"), "--json")
    assert done.status == 0
    assert json.loads(done.out)["recipe"] == "mistral"
    texts = [element.text for element in ElementTree.parse(tmp_path / "m.svg").getroot().iter() if element.text]
    assert "self_attn.q_proj" in texts


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["lama"], "did you mean 'llama'"),
        (["llama", "--config", "absent/config.json"], "absent/config.json: cannot be read"),
        (["llama", "--svg", "absent/m.svg"], "--svg absent/m.svg: cannot be written"),
    ],
)
def test_a_mistake_of_explain_is_told_in_one_line(run: Any, arguments: list[str], message: str) -> None:
    done = run("recipe", "explain", *arguments)
    assert (done.status, done.out) == (1, "")
    assert message in done.err
    assert len(done.err.splitlines()) == 1
