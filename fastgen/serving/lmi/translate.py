"""``serving.properties`` of Amazon's Large Model Inference containers, and the environment variables that stand for its
keys, as arguments of :func:`fastgen.serve`.

A note for every key says what it became, why it is not needed, or that fastgen has nothing like it. A value that would
make the server differ from the file is an error, with the file and the line.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastgen.arguments import Argument, arguments_of
from fastgen.errors import InvalidArgumentError
from fastgen.options import LoadOptions
from fastgen.serving.lmi.properties import read_properties
from fastgen.serving.options import ServeOptions

_DTYPES = {
    **{"fp32": "float32", "float32": "float32", "fp16": "float16", "float16": "float16"},
    **{"bf16": "bfloat16", "bfloat16": "bfloat16", "auto": "auto"},
}
_CONTINUOUS = ("auto", "vllm", "lmi-dist", "trtllm", "scheduler", "deepspeed", "neuron")
_DEFAULT_MAX_BATCH_DELAY_MS = 100
# Environment variables and their keys; beside them ``OPTION_X`` is ``option.x``.
_VARIABLES = {
    "HF_MODEL_ID": "option.model_id",
    "HF_REVISION": "option.revision",
    "HF_TRUST_REMOTE_CODE": "option.trust_remote_code",
    "HF_MODEL_TRUST_REMOTE_CODE": "option.trust_remote_code",
    "TENSOR_PARALLEL_DEGREE": "option.tensor_parallel_degree",
    "SERVING_BATCH_SIZE": "batch_size",
    "SERVING_MAX_BATCH_DELAY": "max_batch_delay",
    "SERVING_JOB_QUEUE_SIZE": "job_queue_size",
}


@dataclass
class Translation:
    """Holds the arguments that a file stands for."""

    # The arguments of ``fastgen.serve``, by name.
    arguments: dict[str, Any] = field(default_factory=dict)
    # A sentence for each key that says what became of it.
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Given:
    """Holds the value of a key."""

    value: str
    # The file, the line and the key, or the variable.
    where: str


def translate(file: Path, environment: Mapping[str, str]) -> Translation:
    """Translates the keys of ``file``, and the variables of ``environment`` for keys that the file does not have.

    Without ``option.model_id`` the model is the directory of the file, if that has a ``config.json``.

    Raises ``InvalidArgumentError`` for a value that cannot be honoured.
    """
    given: dict[str, Given] = {}
    lines: dict[str, int] = {}
    translation = Translation()
    for prop in read_properties(file):
        if prop.key in given:
            earlier = f"{file}:{lines[prop.key]}: {prop.key}"
            translation.notes.append(f"{earlier}: replaced by line {prop.line}")
        given[prop.key] = Given(prop.value.strip(), f"{file}:{prop.line}: {prop.key}")
        lines[prop.key] = prop.line
    for variable, value in sorted(environment.items()):
        key = _key_of(variable)
        if key in given:
            translation.notes.append(f"{variable}: ignored, since {given[key].where} is given")
        elif key is not None:
            given[key] = Given(value.strip(), variable)
    for key, one in given.items():
        where = one.where
        try:
            arguments, note = KEYS.get(key, _unknown)(one.value, given)
        except InvalidArgumentError as error:
            raise InvalidArgumentError(f"{where}={one.value}: {error}") from None
        translation.arguments |= arguments
        became = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
        translation.notes.append(f"{where}: " + "; ".join(part for part in (became, note) if part))
    if "model" not in translation.arguments and (file.parent / "config.json").is_file():
        translation.arguments["model"] = str(file.parent)
        translation.notes.append(f"{file}: no option.model_id, so the model is the directory of this file")
    return translation


def _key_of(variable: str) -> str | None:
    """Returns the key that an environment variable of LMI stands for; ``None`` for other variables."""
    if variable in _VARIABLES:
        return _VARIABLES[variable]
    if variable.startswith("OPTION_"):
        return "option." + variable.removeprefix("OPTION_").lower()
    return None


_Read = tuple[dict[str, Any], str]
_Reader = Callable[[str, dict[str, Given]], _Read]


def _engine(value: str, given: dict[str, Given]) -> _Read:
    return {}, "not needed: fastgen is the engine"


def _model_id(value: str, given: dict[str, Given]) -> _Read:
    if value.startswith("s3://"):
        raise InvalidArgumentError("fastgen reads directories and hub ids; copy the model to a directory and name that")
    if not value:
        raise InvalidArgumentError("expected a hub id or a directory")
    return {"model": value}, ""


def _plain(argument: Argument) -> _Reader:
    """Returns a reader of a key whose value is the argument's: a text or a count."""

    def read(value: str, given: dict[str, Given]) -> _Read:
        return {argument.name: _integer(value, 1) if argument.flag_type is int else value}, ""

    return read


def _trust_remote_code(value: str, given: dict[str, Given]) -> _Read:
    return {}, "not needed: a recipe says what the model is, and no code of a checkpoint is ever run"


def _paged_attention(value: str, given: dict[str, Given]) -> _Read:
    if value.lower() == "false":
        return {}, "ignored: the KV cache is always paged"
    return {}, "not needed: the KV cache is always paged"


def _dtype(value: str, given: dict[str, Given]) -> _Read:
    if value.lower() == "int8":
        raise InvalidArgumentError(
            "8-bit weights are --quantize int8_weight_only, or on a CPU int8; leave this key out"
        )
    if value.lower() not in _DTYPES:
        raise InvalidArgumentError(f"expected one of {', '.join(_DTYPES)}")
    return {"dtype": _DTYPES[value.lower()]}, ""


def _tensor_parallel_degree(value: str, given: dict[str, Given]) -> _Read:
    if value == "max":
        return {}, "one device is used; give a number to share the model"
    degree = _integer(value, 1)
    return ({"tensor_parallel": degree}, "") if degree > 1 else ({}, "not needed: one device is used")


def _rolling_batch(value: str, given: dict[str, Given]) -> _Read:
    if value == "disable":
        if _batches(given):
            return {}, "see batch_size"
        return {"policy": "splitfuse"}, "no batch_size, so requests join and leave the batch at every step"
    if value not in _CONTINUOUS:
        raise InvalidArgumentError(f"expected one of {', '.join(_CONTINUOUS)}, disable")
    return {"policy": "splitfuse"}, ""


def _batch_size(value: str, given: dict[str, Given]) -> _Read:
    batch_size = _integer(value, 1)
    if batch_size == 1:
        return {}, "not needed: requests do not wait for a batch"
    if not _batches(given):
        return {}, "not translated: with option.rolling_batch requests do not wait for a batch"
    delay_ms = _DEFAULT_MAX_BATCH_DELAY_MS
    if "max_batch_delay" in given:
        delay_ms = _integer(given["max_batch_delay"].value, 0)
    arguments: dict[str, Any] = {
        "policy": {"name": "dynamic", "batch_size": batch_size, "max_delay_s": delay_ms / 1000}
    }
    if "option.max_rolling_batch_size" not in given:
        arguments["max_num_seqs"] = batch_size
    return arguments, ""


def _max_batch_delay(value: str, given: dict[str, Given]) -> _Read:
    _integer(value, 0)
    return {}, "see batch_size" if _batches(given) else "not needed: requests do not wait for a batch"


def _unknown(value: str, given: dict[str, Given]) -> _Read:
    return {}, "not translated: fastgen has nothing like it"


def _batches(given: dict[str, Given]) -> bool:
    """Returns whether the file asks for batches of whole requests: ``batch_size`` does, without a rolling batch."""
    rolling = given["option.rolling_batch"].value if "option.rolling_batch" in given else "disable"
    return rolling == "disable" and "batch_size" in given and given["batch_size"].value != "1"


def _integer(text: str, minimum: int) -> int:
    try:
        number = int(text)
    except ValueError:
        number = minimum - 1
    if number < minimum:
        raise InvalidArgumentError(f"expected an integer of at least {minimum}")
    return number


# What reads each key: a reader of its own, or that of the argument which the key stands for.
KEYS: dict[str, _Reader] = {
    argument.option.lmi_key: _plain(argument)
    for argument in (*arguments_of(LoadOptions), *arguments_of(ServeOptions))
    if argument.option.lmi_key is not None
} | {
    "engine": _engine,
    "batch_size": _batch_size,
    "max_batch_delay": _max_batch_delay,
    "option.model_id": _model_id,
    "option.trust_remote_code": _trust_remote_code,
    "option.rolling_batch": _rolling_batch,
    "option.tensor_parallel_degree": _tensor_parallel_degree,
    "option.dtype": _dtype,
    "option.paged_attention": _paged_attention,
}
