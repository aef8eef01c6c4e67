"""Help and wrong usage: whole sentences, defaults, and hints for people who come from other servers."""

from __future__ import annotations

import re
from typing import Any

import pytest
import typer

from fastgen.cli import app, options
from fastgen.other_servers import HINTS, hint, named_flags


def commands() -> dict[str, Any]:
    """Returns all commands, by what users type."""
    found: dict[str, Any] = {}
    top = typer.main.get_command(app)
    for name, command in top.commands.items():  # type: ignore[attr-defined]
        inner = getattr(command, "commands", None)
        found |= {name: command} if inner is None else {f"{name} {each}": inner[each] for each in inner}
    return found


def test_summaries_are_whole_sentences(run) -> None:
    for group in ((), ("recipe",), ("kernels",), ("bench",)):
        _, _, listed = run(*group, "--help").out.partition("Commands:\n")
        summaries = re.split(r"^  (?=\w)", listed, flags=re.MULTILINE)[1:]
        assert len(summaries) > 3
        for summary in summaries:
            assert re.fullmatch(r"\w+ +[A-Z].*\.", " ".join(summary.split())), summary
            assert "..." not in summary


@pytest.mark.parametrize("name", ["generate", "chat", "serve", "info"])
def test_every_flag_has_its_default_in_the_help(run, name: str) -> None:
    _, _, listed = run(name, "--help").out.partition("Options:\n")
    shown = [" ".join(each.split()) for each in re.split(r"^  (?=-)", listed, flags=re.MULTILINE)[1:]]
    own = [parameter for parameter in commands()[name].params if parameter.param_type_name == "option"]
    assert len(shown) == len(own) + 1, "--help is the other one"
    for text in shown[:-1]:
        assert re.search(r"\. Default: \S.*\.$", text), text
        assert text.count("Default:") == 1, text


def test_defaults_are_those_of_the_arguments(run) -> None:
    shown = re.sub(r"\s+", " ", run("generate", "--help").out)
    assert "Longest answer, in tokens. Default: 128." in shown
    assert "0 takes the likeliest token. Default: the model's, or 0." in shown
    assert "Print the prompt before its answer. Default: off." in shown
    assert "triton" in shown.partition("--target")[2].partition("Default:")[0]


@pytest.mark.parametrize(
    ("flag", "instead"),
    [
        ("--gpu-memory-utilization=0.9", "--kv-cache-memory sets"),
        ("--tensor-parallel-size", "Use --tensor-parallel."),
        ("-tp", "Use --tensor-parallel."),
        ("--api-key", "--api-key-file FILE"),
        ("--served-model-name", "Use --name."),
        ("--max-input-tokens", "Use --max-prompt-tokens."),
        ("--seed", "Each request may have a `seed`"),
        ("--rope-scaling", "config.json is taken as it is"),
        ("-fa", "no other flag is needed"),
        ("--n-predict", "`max_tokens`"),
        ("--task", "no flag is needed"),
    ],
)
def test_a_flag_of_another_server_is_answered_with_what_stands_for_it(run, flag: str, instead: str) -> None:
    done = run("serve", "tiny-llama", flag, "2")
    assert done.status == 2
    said = " ".join(done.err.split())
    assert f"there is no flag {flag.partition('=')[0]}. " in said
    assert instead in said


@pytest.mark.parametrize(
    ("flag", "instead"),
    [("--dataset-name=random", "Use --workload"), ("--result-dir", "Use --output."), ("--backend", "--base-url names")],
)
def test_a_flag_of_vllm_bench_is_answered_with_what_stands_for_it(run, flag: str, instead: str) -> None:
    done = run("bench", "serve", "tiny-llama", flag, "2")
    assert done.status == 2
    assert instead in " ".join(done.err.split())
    assert "--workload" not in run("serve", "tiny-llama", "--dataset-name", "random").err, "serve has no such flag"


def test_hints_name_flags_that_there_are() -> None:
    own = {argument.flag for argument in (*options.LOAD_ARGUMENTS, *options.SERVE_ARGUMENTS)} | {"--no-prefix-caching"}
    assert not own & HINTS.keys()
    for name, command in commands().items():
        if name.startswith("bench "):
            own |= {flag for parameter in command.params for flag in parameter.opts if flag.startswith("--")}
    for flag, advice in HINTS.items():
        assert set(named_flags(advice)) <= own, flag
        assert hint(flag, own) == advice
        assert advice.endswith(".")
    assert "--tensor-parallel." in str(hint("--tensor-parallel-size", own))
    assert "--replicas." in str(hint("--data-parallel-size", own))
    for flag in ("--generation-config", "--task", "--max-best-of", "--max-logprobs"):
        assert hint(flag, own), flag
    assert hint("--served-model-name", {"--device"}) is None, "a command without --name"
    assert hint("--device", own) is None


def test_a_flag_that_no_server_has_is_answered_by_its_neighbours(run) -> None:
    done = run("serve", "tiny-llama", "--max-nun-seqs", "2")
    assert done.status == 2
    assert "--max-num-seqs" in done.err


def test_text_after_two_dashes_is_no_flag(run, stub) -> None:
    done = run("generate", "tiny-llama", "--", "--api-key")
    assert (done.status, done.out) == (0, "yek-ipa--\n")
    assert run("generate", "tiny-llama", "a", "--stop", "-c").status == 0
