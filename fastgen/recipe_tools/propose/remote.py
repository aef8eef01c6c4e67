"""Reads the configuration and headers of a checkpoint on the Hugging Face hub, without downloading weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from huggingface_hub import constants, get_safetensors_metadata, hf_hub_download, snapshot_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    NotASafetensorsRepoError,
    RepositoryNotFoundError,
)

from fastgen.errors import ModelNotFoundError
from fastgen.models.checkpoint.checkpoint import Checkpoint
from fastgen.models.checkpoint.files import read_json_object

# The content of config.json, and the shape of every tensor.
Headers = tuple[dict[str, Any], dict[str, tuple[int, ...]]]


def read_remote(repository: str) -> Headers:
    """Returns configuration and shapes of ``repository``, ``owner/name``; without a network from the hub's cache.

    Raises :class:`ModelNotFoundError`, which says what was tried and what to do.
    """
    page = f"{constants.ENDPOINT}/{repository}"
    try:
        config = read_json_object(Path(hf_hub_download(repository, "config.json")))
        files = get_safetensors_metadata(repository).files_metadata.values()
        return config, {name: tuple(info.shape) for file in files for name, info in file.tensors.items()}
    except HFValidationError:
        raise ModelNotFoundError(
            f"{repository[:200]!r} is not a directory on this machine, not a built-in, and "
            "not a hub id of the form owner/name"
        ) from None
    except GatedRepoError as error:
        raise ModelNotFoundError(
            f"{page} is gated: accept its terms there, then log in with `hf auth login`"
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelNotFoundError(
            f"{repository!r} is neither a directory on this machine nor a built-in, and {constants.ENDPOINT} shows no "
            f"such repository. It does not exist, or it is private; in that case log in with `hf auth login`"
        ) from error
    except LocalEntryNotFoundError as error:  # a subclass of EntryNotFoundError, but the hub was not asked
        return _from_cache(repository, error)
    except (EntryNotFoundError, NotASafetensorsRepoError) as error:
        raise ModelNotFoundError(
            f"{page} has no config.json or no safetensors weights, the only format whose headers can be read remotely; "
            f"download the repository (`hf download {repository} --local-dir DIRECTORY`) and give that directory"
        ) from error
    except Exception as error:  # the HTTP client's own classes, and huggingface_hub has changed its client
        return _from_cache(repository, error)


def _from_cache(repository: str, error: Exception) -> Headers:
    """Returns the headers of the cached copy, after ``error`` prevented the hub from answering."""
    try:
        checkpoint = Checkpoint.open(snapshot_download(repository, local_files_only=True))
    except Exception:  # there is none, or it lacks files
        reason = str(error).strip().splitlines()[:1] or [type(error).__name__]
        raise ModelNotFoundError(
            f"{repository!r} is neither a directory on this machine nor a built-in; fetching its headers from "
            f"{constants.ENDPOINT} failed ({reason[0][:200]}), and the cache {constants.HF_HUB_CACHE} holds no whole "
            f"copy. Connect to the network, with HF_HUB_OFFLINE not set; or give a local directory"
        ) from error
    return checkpoint.config, {name: header.shape for name, header in checkpoint.tensors.items()}
