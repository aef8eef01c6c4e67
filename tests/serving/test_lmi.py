"""LMI's serving.properties: the argument for each key, and a note for every key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fastgen.errors import InvalidArgumentError
from fastgen.serving.arguments import sort_arguments
from fastgen.serving.lmi.translate import Translation, translate


def translated(folder: Path, *lines: str, environment: dict[str, str] | None = None) -> Translation:
    file = folder / "serving.properties"
    file.write_text("\n".join(lines) + "\n")
    return translate(file, environment or {})


def test_a_usual_file_is_translated_with_a_note_for_every_key(tmp_path: Path) -> None:
    lines = (
        "engine=Python",
        "option.model_id=mistralai/Mistral-7B-v0.1",
        "option.revision=abc123",
        "option.trust_remote_code=true",
        "option.rolling_batch=vllm",
        "option.max_rolling_batch_size=32",
        "option.max_rolling_batch_prefill_tokens=4096",
        "option.tensor_parallel_degree=1",
        "option.dtype=fp16",
        "option.paged_attention=true",
        "option.max_model_len=8192",
        "job_queue_size=500",
        "option.gpu_memory_utilization=0.9",
    )
    found = translated(tmp_path, *lines)
    assert found.arguments == {
        "model": "mistralai/Mistral-7B-v0.1",
        "revision": "abc123",
        "policy": "splitfuse",
        "max_num_seqs": 32,
        "token_budget": 4096,
        "dtype": "float16",
        "max_model_len": 8192,
        "max_queued_requests": 500,
    }
    for number, line in enumerate(lines, start=1):
        (note,) = [note for note in found.notes if note.startswith(f"{tmp_path}/serving.properties:{number}: ")]
        assert line.partition("=")[0] in note
    assert "not needed" in found.notes[3]
    assert "not translated" in found.notes[-1]


def test_the_translation_has_arguments_of_serving(tmp_path: Path) -> None:
    found = translated(tmp_path, "option.model_id=tiny-llama", "job_queue_size=7", "option.dtype=bf16")
    load_arguments, options = sort_arguments(found.arguments)
    assert load_arguments == {"model": "tiny-llama", "dtype": "bfloat16"}
    assert options.limits.max_queued_requests == 7


@pytest.mark.parametrize("rolling", [["option.rolling_batch=disable"], []])
def test_batches_of_whole_requests_are_the_dynamic_policy(tmp_path: Path, rolling: list[str]) -> None:
    found = translated(tmp_path, *rolling, "batch_size=8", "max_batch_delay=50")
    assert found.arguments == {
        "policy": {"name": "dynamic", "batch_size": 8, "max_delay_s": 0.05},
        "max_num_seqs": 8,
    }
    own_size = translated(tmp_path, *rolling, "batch_size=8", "option.max_rolling_batch_size=16")
    assert own_size.arguments["max_num_seqs"] == 16
    assert own_size.arguments["policy"]["max_delay_s"] == 0.1


@pytest.mark.parametrize("value", ["auto", "vllm", "lmi-dist", "trtllm"])
def test_with_a_rolling_batch_there_is_no_batch_to_wait_for(tmp_path: Path, value: str) -> None:
    found = translated(tmp_path, f"option.rolling_batch={value}", "batch_size=8", "max_batch_delay=50")
    assert found.arguments == {"policy": "splitfuse"}
    assert any("batch_size: not translated" in note for note in found.notes)


def test_without_a_rolling_batch_and_a_size_the_policy_is_splitfuse(tmp_path: Path) -> None:
    assert translated(tmp_path, "option.rolling_batch=disable").arguments == {"policy": "splitfuse"}


@pytest.mark.parametrize("lines", [["batch_size=1"], ["batch_size=1", "max_batch_delay=50"], ["max_batch_delay=50"]])
def test_requests_do_not_wait_for_a_batch_of_one(tmp_path: Path, lines: list[str]) -> None:
    found = translated(tmp_path, *lines)
    assert found.arguments == {}
    assert all(note.endswith(": not needed: requests do not wait for a batch") for note in found.notes)
    assert translated(tmp_path, "option.rolling_batch=disable", *lines).arguments == {"policy": "splitfuse"}


def test_a_batch_may_wait_for_no_time_and_a_limit_may_be_1(tmp_path: Path) -> None:
    found = translated(tmp_path, "batch_size=2", "max_batch_delay=0", "job_queue_size=1")
    assert found.arguments["policy"] == {"name": "dynamic", "batch_size": 2, "max_delay_s": 0.0}
    assert found.arguments["max_queued_requests"] == 1
    assert found.notes[1].endswith(": see batch_size")


@pytest.mark.parametrize(
    ("line", "note"),
    [
        ("option.paged_attention=true", "not needed: the KV cache is always paged"),
        ("option.paged_attention=False", "ignored: the KV cache is always paged"),
        ("option.tensor_parallel_degree=max", "one device is used; give a number to share the model"),
        ("option.tensor_parallel_degree=1", "not needed: one device is used"),
        ("option.tensor_parallel_degree=2", "tensor_parallel=2"),
        ("engine=MPI", "not needed: fastgen is the engine"),
    ],
)
def test_a_note_says_what_became_of_a_key(tmp_path: Path, line: str, note: str) -> None:
    assert translated(tmp_path, line).notes == [f"{tmp_path}/serving.properties:1: {line.partition('=')[0]}: {note}"]


def test_several_devices(tmp_path: Path) -> None:
    assert translated(tmp_path, "option.tensor_parallel_degree=2").arguments == {"tensor_parallel": 2}


@pytest.mark.parametrize(
    ("given", "dtype"), [("fp32", "float32"), ("FP16", "float16"), ("bf16", "bfloat16"), ("auto", "auto")]
)
def test_dtypes(tmp_path: Path, given: str, dtype: str) -> None:
    assert translated(tmp_path, f"option.dtype={given}").arguments == {"dtype": dtype}


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("option.tensor_parallel_degree=0", "an integer of at least 1"),
        ("option.max_rolling_batch_size=many", "an integer of at least 1"),
        ("option.max_rolling_batch_prefill_tokens=-1", "an integer of at least 1"),
        ("job_queue_size=0", "an integer of at least 1"),
        ("option.dtype=int8", "--quantize int8"),
        ("option.dtype=fp8", "expected one of fp32"),
        ("option.rolling_batch=maybe", "expected one of auto"),
        ("option.model_id=s3://bucket/model", "copy the model to a directory"),
        ("option.model_id=", "a hub id or a directory"),
        ("batch_size=0", "an integer of at least 1"),
        ("max_batch_delay=-1", "an integer of at least 0"),
    ],
)
def test_what_cannot_be_honoured_is_refused_with_its_line(tmp_path: Path, line: str, why: str) -> None:
    with pytest.raises(InvalidArgumentError) as refused:
        translated(tmp_path, "# a comment", line)
    assert str(refused.value).startswith(f"{tmp_path}/serving.properties:2: {line}: ")
    assert why in str(refused.value)


def test_the_last_value_of_a_key_wins_as_in_java(tmp_path: Path) -> None:
    found = translated(tmp_path, "option.dtype=fp16", "option.dtype=bf16")
    assert found.arguments == {"dtype": "bfloat16"}
    assert "serving.properties:1: option.dtype: replaced by line 2" in found.notes[0]


@pytest.mark.parametrize("has_model", [True, False])
def test_without_a_model_id_the_model_is_the_directory_of_the_file(tmp_path: Path, has_model: bool) -> None:
    if has_model:
        (tmp_path / "config.json").write_text("{}")
    wanted: dict[str, Any] = {"model": str(tmp_path)} if has_model else {}
    assert translated(tmp_path, "engine=MPI").arguments == wanted


def test_variables_stand_for_keys_that_the_file_does_not_have(tmp_path: Path) -> None:
    environment = {
        "HF_MODEL_ID": "tiny-llama",
        "OPTION_DTYPE": "bf16",
        "OPTION_MAX_ROLLING_BATCH_SIZE": "8",
        "OPTION_ENTRYPOINT": "vllm",
        "TENSOR_PARALLEL_DEGREE": "max",
        "SERVING_JOB_QUEUE_SIZE": "9",
        "OPTIONAL": "no variable of LMI's",
    }
    found = translated(tmp_path, "option.dtype=fp16", environment=environment)
    assert found.arguments == {
        "model": "tiny-llama",
        "dtype": "float16",
        "max_num_seqs": 8,
        "max_queued_requests": 9,
    }
    notes = {note.partition(":")[0]: note for note in found.notes}
    assert set(notes) - {str(tmp_path / "serving.properties")} == set(environment) - {"OPTIONAL"}
    assert "ignored, since" in notes["OPTION_DTYPE"]
    assert "not translated" in notes["OPTION_ENTRYPOINT"]
    with pytest.raises(InvalidArgumentError, match=r"^OPTION_DTYPE=int8: 8-bit weights"):
        translated(tmp_path, environment={"OPTION_DTYPE": "int8"})
