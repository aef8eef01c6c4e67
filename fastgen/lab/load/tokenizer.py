"""The tokenizer of a model that another process serves."""

from __future__ import annotations

from pathlib import Path

from fastgen.errors import FastgenError
from fastgen.models.checkpoint.builtins import BUILTINS
from fastgen.models.checkpoint.files import read_json_object
from fastgen.runtime.requests.sampling_params import SamplingParams
from fastgen.runtime.text.codec import TextCodec


def open_tokenizer(name: str) -> TextCodec:
    """Returns the tokenizer of a built-in, of a local directory, or of a hub repository, of which only its files are
    downloaded. No code of it is run.

    :raises FastgenError: if there is none.
    """
    directory = BUILTINS.get(name) or (Path(name) if Path(name).is_dir() else None)
    if directory is None:
        return _from_hub(name)
    file = directory / "config.json"
    codec = TextCodec.from_checkpoint(directory, read_json_object(file) if file.is_file() else {})
    if not codec.has_tokenizer:
        raise FastgenError(f"{directory} has no tokenizer")
    return codec


def _from_hub(name: str) -> TextCodec:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except Exception as error:  # of many libraries
        raise FastgenError(f"the tokenizer of {name!r} cannot be had: {str(error).splitlines()[0]}") from error
    return TextCodec(tokenizer, eos_token_ids=frozenset(), default_sampling=SamplingParams())
