"""Finds a model's directory: on this machine, among the built-ins, or on the Hugging Face hub and in its cache."""

from __future__ import annotations

import difflib
import logging
import os
from collections.abc import Collection
from fnmatch import fnmatchcase
from pathlib import Path

from huggingface_hub import HfApi, constants, hf_hub_download, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from fastgen.errors import FastgenError, InvalidArgumentError, ModelNotFoundError
from fastgen.models.checkpoint.builtins import BUILTINS
from fastgen.models.checkpoint.files import WEIGHT_FILES, check_links, is_index, read_index, weights_entry
from fastgen.models.checkpoint.kinds import other_file, other_format

logger = logging.getLogger(__name__)

_SMALL_FILES = (
    *("config.json", "generation_config.json", "fastgen.yaml"),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "*.model", "*.tiktoken"),
    *("chat_template.jinja", "chat_template.json"),
)
_AUTHENTICATE = "log in with `hf auth login`, or set HF_TOKEN to a token that may read it"


def locate(model: str | Path, *, revision: str | None = None, with_weights: bool = True) -> Path:
    """Returns the directory of ``model``, with its config, tokenizer and weights.

    ``model`` is a local directory, else the name of a built-in, else a hub id (``owner/name``). From the hub only the
    files needed are downloaded, with the user's own token; without a network the copy in the hub's cache is used.
    ``revision`` is a branch, tag or commit of a hub repository, and is refused for anything else. Without
    ``with_weights`` no weights are downloaded.

    Raises :class:`ModelNotFoundError`, which says what was tried and what to do, and :class:`CheckpointError` for a
    file that is a link out of the directory.
    """
    if not isinstance(model, (str, Path)):
        raise InvalidArgumentError(f"model is a directory, a built-in name or a hub id, not {model!r:.60}")
    name = os.fspath(model)
    directory = Path(os.path.expanduser(name))
    if name and os.path.isdir(directory):
        _refuse_revision(revision, f"{directory} is a local directory")
        if not (directory / "config.json").is_file():
            hidden = f". It hides the built-in {name!r}; rename it or run elsewhere" if name in BUILTINS else ""
            found = other_format(os.listdir(directory), directory) or "so it is no model"
            raise ModelNotFoundError(f"{directory.absolute()}: the directory has no config.json; {found}{hidden}")
        check_links(directory)
        return directory
    if name in BUILTINS:
        _refuse_revision(revision, f"{name} is built in")
        return BUILTINS[name]
    if name and os.path.isfile(directory):
        kind = other_file(directory) or "It is a file; give the directory it is in"
        raise ModelNotFoundError(f"{directory.absolute()}: {kind}")
    return _from_hub(name, revision, with_weights)


def locate_tokenizer(name: str) -> Path:
    """Returns the directory of the tokenizer of ``name``: a local directory, else a built-in, else a hub id, of which
    no weights are downloaded. A repository may hold a tokenizer alone. Raises :class:`ModelNotFoundError`.
    """
    if name and os.path.isdir(name):
        return Path(name)
    if name in BUILTINS:
        return BUILTINS[name]
    try:
        return Path(snapshot_download(name, allow_patterns=[*_SMALL_FILES]))
    except Exception as error:  # of several libraries: the hub's, those it reaches the network by, the system
        reason = _refusal(name, None, error) or f"fetching it from {constants.ENDPOINT} failed ({_brief(error)})"
        raise ModelNotFoundError(f"the tokenizer of {name!r} cannot be had: {reason}") from error


def _refuse_revision(revision: str | None, reason: str) -> None:
    if revision is not None:
        raise InvalidArgumentError(f"revision={revision!r} selects a version of a hub repository, but {reason}")


def _from_hub(repository: str, revision: str | None, with_weights: bool) -> Path:
    try:
        files = _files_needed(repository, revision, with_weights)
        return Path(snapshot_download(repository, revision=revision, allow_patterns=files))
    except FastgenError:
        raise
    except Exception as error:  # the HTTP client's own classes, and huggingface_hub has changed its client
        refusal = _refusal(repository, revision, error)
        if refusal:
            raise ModelNotFoundError(refusal + _did_you_mean(repository)) from error
        return _from_cache(repository, revision, with_weights, error)


def _refusal(repository: str, revision: str | None, error: Exception) -> str | None:
    """Returns why the hub refuses the repository, and what to do; ``None`` if the hub did not answer."""
    nowhere_else = f"{_shown(repository)} is not a directory on this machine, not a built-in ({', '.join(BUILTINS)})"
    if isinstance(error, HFValidationError):
        return f"{nowhere_else}, and not a hub id of the form owner/name."
    page = f"{constants.ENDPOINT}/{repository}"
    if isinstance(error, RevisionNotFoundError):
        return f"{page} has no revision {revision!r}: name a branch, a tag or a full commit hash."
    if isinstance(error, GatedRepoError):
        return f"{page} is gated: accept its terms there, then {_AUTHENTICATE}.{_cache_hint(repository, revision)}"
    status = error.response.status_code if isinstance(error, HfHubHTTPError) else None
    if (
        isinstance(error, RepositoryNotFoundError) or status == 401
    ):  # the hub does not show which private repositories exist
        return (
            f"{nowhere_else}, and {constants.ENDPOINT} shows no such repository ({_brief(error)}). It does not exist, "
            f"or it is private; in that case {_AUTHENTICATE}.{_cache_hint(repository, revision)}"
        )
    if status == 403:
        return f"{page} refuses access ({_brief(error)}): {_AUTHENTICATE}.{_cache_hint(repository, revision)}"
    return None


def _from_cache(repository: str, revision: str | None, with_weights: bool, error: Exception) -> Path:
    """Returns the cached copy, after ``error`` prevented the hub from answering."""
    at = f" at revision {revision!r}" if revision else ""
    tried = f"fetching it from {constants.ENDPOINT} failed ({_brief(error)})"
    cached = _cached_snapshot(repository, revision)
    if cached is None:
        raise ModelNotFoundError(
            f"{repository!r} is neither a directory on this machine nor a built-in ({', '.join(BUILTINS)}); {tried}, "
            f"and the cache {constants.HF_HUB_CACHE} holds no copy of it{at}. Connect to the network, with "
            f"HF_HUB_OFFLINE not set; or point HF_HOME at a cache that has it; or give a local directory."
            f"{_did_you_mean(repository)}"
        ) from error
    missing = _missing_files(cached)
    if missing and with_weights:
        raise ModelNotFoundError(
            f"{repository!r}{at}: {tried}, and the copy in the cache is incomplete: {cached} lacks {missing}. "
            f"Connect to the network, with HF_HUB_OFFLINE not set; the download continues where it stopped."
        ) from error
    if not constants.HF_HUB_OFFLINE:  # otherwise the user asked for the cache
        logger.warning("%s: %s; using the copy in the cache, %s", repository, tried, cached)
    return cached


def _files_needed(repository: str, revision: str | None, with_weights: bool) -> list[str]:
    siblings = HfApi().model_info(repository, revision=revision).siblings or []
    names = {sibling.rfilename for sibling in siblings}
    page = f"{constants.ENDPOINT}/{repository}"
    if "config.json" not in names:
        found = other_format(names) or "so it is no model that fastgen reads"
        raise ModelNotFoundError(f"{page} has no config.json; {found}.")
    if not with_weights:
        return sorted(_small_files(names))
    entry = weights_entry(names)
    if entry is None:
        kind = other_format(names)
        raise ModelNotFoundError(
            f"{page} has no weights that fastgen reads ({', '.join(WEIGHT_FILES)}){f'; {kind}' if kind else ''}."
        )
    weights = {entry}
    if is_index(entry):
        weights |= set(read_index(Path(hf_hub_download(repository, entry, revision=revision))).values())
    return sorted(weights | _small_files(names))


def _small_files(names: Collection[str]) -> set[str]:
    at_root = {name for name in names if "/" not in name}
    templates = {name for name in names if fnmatchcase(name, "additional_chat_templates/*.jinja")}
    return templates | {name for name in at_root if any(fnmatchcase(name, pattern) for pattern in _SMALL_FILES)}


def _cached_snapshot(repository: str, revision: str | None) -> Path | None:
    try:
        return Path(
            snapshot_download(repository, revision=revision, local_files_only=True, allow_patterns="config.json")
        )
    except LocalEntryNotFoundError:
        return None


def _missing_files(snapshot: Path) -> str:
    """Returns which of config and weights a snapshot lacks, in words; empty if it is complete."""
    present = {file.name for file in snapshot.iterdir() if file.is_file()}
    if "config.json" not in present:
        return "config.json"
    entry = weights_entry(present)
    if entry is None:
        return "the weights"
    if not is_index(entry):
        return ""
    shards = sorted(set(read_index(snapshot / entry).values()))
    return ", ".join(shard for shard in shards if shard not in present)


def _cache_hint(repository: str, revision: str | None) -> str:
    cached = _cached_snapshot(repository, revision)
    if cached is None or _missing_files(cached):
        return ""
    return f" An earlier copy is in the cache; HF_HUB_OFFLINE=1 uses it ({cached})."


def _did_you_mean(name: str) -> str:
    close = difflib.get_close_matches(name.lower().replace("_", "-"), BUILTINS, n=1, cutoff=0.75)
    return f" Did you mean {close[0]!r}?" if close else ""


def _shown(name: str) -> str:
    return repr(name if len(name) <= 200 else f"{name[:200]}...")


def _brief(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
