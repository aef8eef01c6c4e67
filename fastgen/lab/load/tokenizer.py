"""The tokenizer of a model that another process serves."""

from __future__ import annotations

from fastgen.errors import FastgenError
from fastgen.models.checkpoint.files import read_json_object
from fastgen.models.checkpoint.hub import locate_tokenizer
from fastgen.runtime.text.codec import TextCodec


def open_tokenizer(name: str) -> TextCodec:
    """Returns the tokenizer of a built-in, of a local directory, or of a hub repository, of which no weights are
    downloaded. No code of it is run.

    :raises FastgenError: if there is none, or one that cannot be trusted with texts of strangers.
    """
    directory = locate_tokenizer(name)
    file = directory / "config.json"
    codec = TextCodec.from_checkpoint(directory, read_json_object(file) if file.is_file() else {})
    if not codec.has_tokenizer:
        raise FastgenError(f"{directory} has no tokenizer")
    return codec
