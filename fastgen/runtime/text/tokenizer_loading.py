"""Loads a checkpoint's tokenizer."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastgen.errors import CheckpointError
from fastgen.models.checkpoint.files import read_json_object
from fastgen.runtime.text.panics import panics_as_errors
from fastgen.runtime.text.tokenizer_checks import check_tokenizer
from fastgen.runtime.text.tokenizer_files import check_tokenizer_files

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "tokenizer_config.json",
)
# Classes that read tokenizer.json as it is, and nothing else.
_GENERIC_CLASSES = ("TokenizersBackend", "PreTrainedTokenizerFast")
# What transformers asks of a model's config to choose the class of its tokenizer.
_CONFIG_KEYS = ("model_type", "model_name", "tokenizer_class")
# transformers imports its modules when they are first used, which fails in several threads at once.
_ONE_AT_A_TIME = threading.Lock()


def load_tokenizer(directory: Path, config: Mapping[str, Any], tokenizer_class: str = "") -> Any:
    """Returns the tokenizer of the checkpoint in ``directory``, whose ``config.json`` is ``config``; ``None`` if it has
    none.

    transformers chooses the class, unless ``tokenizer_class`` says what it chose in another process. No code of the
    checkpoint is run. Raises :class:`CheckpointError` for a tokenizer that cannot be loaded, or that cannot be trusted
    with texts of strangers.
    """
    if not any((directory / name).is_file() for name in _TOKENIZER_FILES):
        return None
    try:
        check_tokenizer_files(directory)
        with _ONE_AT_A_TIME, panics_as_errors():
            if tokenizer_class in _GENERIC_CLASSES:
                tokenizer = import_generic_tokenizer().from_pretrained(str(directory), local_files_only=True)
            else:
                tokenizer = _chosen(directory, config)
        check_tokenizer(tokenizer)
    except Exception as error:  # the library raises anything, from KeyError to panics
        if "trust_remote_code" in str(error):
            raise CheckpointError(
                f"{directory}: its tokenizer needs code of the checkpoint's own (auto_map in tokenizer_config.json), "
                "which is never run; a tokenizer.json that names no such code can be loaded"
            ) from None
        raise CheckpointError(f"{directory}: its tokenizer cannot be loaded: {error}") from error
    return tokenizer


def import_generic_tokenizer() -> Any:
    """Returns the class of tokenizers that are all in ``tokenizer.json``. Importing it takes less than a second, as it
    needs no torch.
    """
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast


def _chosen(directory: Path, config: Mapping[str, Any]) -> Any:
    from transformers import AutoTokenizer

    known = _known_config(directory, config)
    return AutoTokenizer.from_pretrained(str(directory), config=known, trust_remote_code=False, local_files_only=True)


def _known_config(directory: Path, config: Mapping[str, Any]) -> Any:
    """Returns the config by which transformers chooses the tokenizer's class, or ``None``: it reads one itself then.

    It would make an object of the model's own config class, whose module imports the compiler of torch, for a second
    of every start. No decision depends on that class where ``tokenizer_config.json`` names a generic tokenizer.
    """
    file = directory / "tokenizer_config.json"
    stated = read_json_object(file) if file.is_file() else {}
    is_generic = stated.get("tokenizer_class") in _GENERIC_CLASSES and "auto_map" not in stated
    if not is_generic or not (directory / "tokenizer.json").is_file():
        return None
    from transformers import PreTrainedConfig

    known = PreTrainedConfig()
    known._name_or_path = str(directory)
    for key in _CONFIG_KEYS:
        if key in config:
            setattr(known, key, config[key])
    return known
