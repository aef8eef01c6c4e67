"""Arguments are stated once: Python's signatures, the command line and the tables of the docs are those statements."""

from __future__ import annotations

import inspect
from dataclasses import MISSING, fields
from pathlib import Path
from typing import get_args

import pytest
import typer

import fastgen
from fastgen.arguments import Argument, arguments_of
from fastgen.cli import app
from fastgen.errors import InvalidArgumentError
from fastgen.options import LoadOptions
from fastgen.runtime import config
from fastgen.runtime.scheduling.waiting_queue import DEFAULT_AGING_S
from fastgen.serving.arguments import check_names, sort_arguments
from fastgen.serving.options import ServeOptions
from tools.argument_tables import DOCS, TABLES, with_table

STATED = [*arguments_of(LoadOptions), *arguments_of(ServeOptions), *arguments_of(fastgen.SamplingParams)]


def test_the_signature_of_load_is_its_options() -> None:
    parameters = inspect.signature(fastgen.load).parameters
    assert list(parameters) == [field.name for field in fields(LoadOptions)]
    for field in fields(LoadOptions):
        parameter, annotation = parameters[field.name], get_args(field.type)[0]
        assert parameter.default == (inspect.Parameter.empty if field.default is MISSING else field.default)
        assert parameter.annotation == getattr(annotation, "__forward_arg__", annotation)
        assert f"``{field.name}``: " in (fastgen.load.__doc__ or "")
    assert inspect.signature(fastgen.load).return_annotation == "LLM"


def test_the_signature_of_serve_has_all_arguments() -> None:
    parameters = inspect.signature(fastgen.serve).parameters
    stated = [argument.name for kind in (LoadOptions, ServeOptions) for argument in arguments_of(kind)]
    assert sorted(parameters) == sorted([*stated, "api_key", "protocol"])
    assert next(iter(parameters)) == "model"


def test_load_refuses_an_unknown_argument_and_names_the_nearest() -> None:
    with pytest.raises(
        TypeError, match=r"load\(\) got an unexpected keyword argument 'quantise'; did you mean 'quantize'"
    ):
        fastgen.load("tiny-llama", quantise="int8")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="missing a required argument: 'model'"):
        fastgen.load()  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("gpu_memory_utilization", "`kv_cache_memory` sets the memory of the KV cache, such as 4GiB;"),
        ("trust_remote_code", "fastgen runs no code of a checkpoint; `recipe` names a description of the model."),
        ("max_tokens", "Each request says how long its answer may be:"),
        ("tensor_parallel_size", "Use `tensor_parallel`."),
        ("task", "Every model here generates text"),
    ],
)
def test_an_argument_of_another_engine_is_answered_with_what_to_use(name: str, advice: str) -> None:
    with pytest.raises(TypeError) as refused:
        fastgen.load("tiny-llama", **{name: 1})
    assert str(refused.value).startswith(f"load() got an unexpected keyword argument '{name}'. {advice}")
    with pytest.raises(InvalidArgumentError) as unknown:
        check_names({name: 1})
    assert str(unknown.value).startswith(
        f"'{name}' is neither an argument of fastgen.load nor one of serving. {advice}"
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"num_threads": 0}, "num_threads=0: expected an integer of at least 1"),
        ({"block_size": True}, "block_size=True: expected an integer of at least 1"),
        ({"max_model_len": 2.5}, r"max_model_len=2.5: expected an integer of at least 2"),
        ({"max_model_len": 1}, "max_model_len=1: expected .*: a token of a prompt and one of its answer"),
        ({"aging_s": None}, "aging_s=None: expected a number of seconds above 0"),
        ({"sealed": 3}, "sealed=3: expected True, False, or the directory of a sealed bundle"),
    ],
)
def test_options_check_themselves(given: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        LoadOptions("tiny-llama", **given)  # type: ignore[arg-type]
    assert LoadOptions("tiny-llama", num_threads=None) == LoadOptions("tiny-llama")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"port": 70000}, "port=70000: expected a port"),
        ({"max_connections": 0}, "max_connections=0: expected an integer of at least 1"),
        ({"itl_target": 0}, "itl_target=0: expected a number above 0"),
        ({"engine_timeout_s": 0}, "engine_timeout_s=0: expected a number above 0"),
        ({"quantise": "int8"}, "'quantise' is neither an argument of fastgen.load nor one of serving"),
    ],
)
def test_flat_arguments_of_serving_are_checked_where_they_belong(given: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        sort_arguments({"model": "tiny-llama", **given})


def test_defaults_in_words_are_those_of_the_engine() -> None:
    words = {argument.name: argument.default_text for argument in arguments_of(LoadOptions)}
    budget, seqs = config._DEFAULT_TOKEN_BUDGET, config._DEFAULT_MAX_NUM_SEQS
    assert words["token_budget"] == f"{budget['cpu']} on a CPU, {budget['cuda']} on a GPU"
    assert words["max_num_seqs"] == f"{seqs['cpu']} on a CPU, {seqs['cuda']} on a GPU"
    block_size = config.DEFAULT_BLOCK_SIZE
    assert words["block_size"] == f"{block_size['cpu']} on a CPU, {block_size['cuda']} on a GPU"
    assert words["num_draft_tokens"] == str(config._DEFAULT_NUM_DRAFT_TOKENS)
    assert LoadOptions("tiny-llama").aging_s == DEFAULT_AGING_S


@pytest.mark.parametrize("argument", STATED, ids=lambda argument: argument.name)
def test_every_argument_is_explained_in_one_sentence(argument: Argument) -> None:
    assert argument.option.help[-1] in ".}"
    assert len(argument.option.help) <= 110
    assert "\n" not in argument.option.help


@pytest.mark.parametrize(
    ("command", "kind"),
    [("generate", LoadOptions), ("generate", fastgen.SamplingParams), ("serve", LoadOptions), ("serve", ServeOptions)],
)
def test_the_command_line_has_every_flag_with_its_help(command: str, kind: type) -> None:
    params = typer.main.get_command(app).commands[command].params  # type: ignore[attr-defined]
    flags = {flag: param for param in params for flag in param.opts}
    for argument in arguments_of(kind):
        if not argument.is_required:
            assert flags[argument.flag].help.startswith(argument.option.help)


@pytest.mark.parametrize("name", TABLES)
def test_the_tables_of_the_docs_are_up_to_date(name: str) -> None:
    page: Path = DOCS / TABLES[name][0]
    assert with_table(page.read_text(), name) == page.read_text(), "run python tools/argument_tables.py"
