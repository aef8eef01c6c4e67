"""Finding models: directories, built-ins, and the hub, which is a small server on this machine.

``huggingface_hub`` reads its environment once, when imported; so each request runs in its own process.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from fastgen.errors import InvalidArgumentError, ModelNotFoundError
from fastgen.models.checkpoint import hub
from fastgen.models.checkpoint.builtins import BUILTINS

TOKEN = "hf_the_secret"

LOCATE = """
import json, sys
from fastgen.models.checkpoint.hub import locate
models, with_weights = json.loads(sys.argv[1])
for model, revision in models:
    try:
        print(json.dumps({"path": str(locate(model, revision=revision, with_weights=with_weights))}))
    except Exception as error:
        print(json.dumps({"error": type(error).__name__, "message": str(error)}))
"""

TOKENIZER = {"tokenizer.json": b"{}", "tokenizer_config.json": b"{}", "tokenizer.model": b"sp", "merges.txt": b"a b"}
EXTRAS = {
    **{"README.md": b"read", "LICENSE": b"", "onnx/model.onnx": b"o", "model.gguf": b"g", "tf_model.h5": b"h"},
    **{"flax_model.msgpack": b"m", "original/consolidated.00.pth": b"p", "original/tokenizer.model": b"sp"},
    **{"consolidated.safetensors": b"c", "model-00009-of-00009.safetensors": b"not in the index", "x.py": b"code"},
}
SAFETENSORS = {
    "model.safetensors.index.json": json.dumps(
        {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    ).encode(),
    "model-00001-of-00002.safetensors": b"first shard",
    "model-00002-of-00002.safetensors": b"second shard",
}
CONFIG = {"config.json": b"{}", "generation_config.json": b"{}", "fastgen.yaml": b"name: x"}
TEMPLATES = {"chat_template.jinja": b"t", "additional_chat_templates/tool_use.jinja": b"t"}
NEEDED = {*CONFIG, *TOKENIZER, *TEMPLATES}

Files = dict[str, bytes]


@dataclass
class Hub:
    """The content of the server, and the requests that it received."""

    repositories: dict[str, dict[str, Files]]
    private: set[str] = field(default_factory=set)
    gated: set[str] = field(default_factory=set)
    broken: set[str] = field(default_factory=set)
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)
    url: str = ""

    def sha(self, repository: str, revision: str) -> str:
        return hashlib.sha1(f"{repository}@{revision}".encode()).hexdigest()

    def tokens_seen(self) -> set[str | None]:
        """Returns the authorization of requests about repositories."""
        return {token for _, path, token in self.requests if any(name in path for name in self.repositories)}

    def answer(self, path: str, token: str | None) -> tuple[int, dict[str, str], bytes]:
        parts = [unquote(part) for part in urlsplit(path).path.strip("/").split("/")]
        if parts[:2] == ["api", "models"]:
            repository, what = "/".join(parts[2:4]), parts[4:] or ["revision", "main"]
        else:
            repository, what = "/".join(parts[:2]), parts[2:]
        if repository in self.broken:
            return 503, {}, b""
        if repository not in self.repositories or (repository in self.private and token != f"Bearer {TOKEN}"):
            # As the hub does: without a login it does not say whether a repository exists.
            return (404 if token else 401), {"X-Error-Code": "RepoNotFound" if token else ""}, b""
        if repository in self.gated:
            return 403, {"X-Error-Code": "GatedRepo"}, b""
        kind, revision, *rest = what
        revisions = self.repositories[repository]
        branch = next((name for name in revisions if revision in (name, self.sha(repository, name))), None)
        if branch is None:
            return 404, {"X-Error-Code": "RevisionNotFound"}, b""
        files, sha = revisions[branch], self.sha(repository, branch)
        if kind == "revision":
            siblings = [{"rfilename": name} for name in files]
            return 200, {}, json.dumps({"id": repository, "sha": sha, "siblings": siblings}).encode()
        if kind == "tree":
            entries = [{"type": "file", "path": n, "size": len(data), "oid": "0" * 40} for n, data in files.items()]
            return 200, {}, json.dumps(entries).encode()
        content = files.get("/".join(rest))
        if kind != "resolve" or content is None:
            return 404, {"X-Error-Code": "EntryNotFound"}, b""
        return 200, {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": sha}, content


@pytest.fixture(scope="module")
def server() -> Iterator[Hub]:
    sharded = {**CONFIG, **TOKENIZER, **TEMPLATES, **EXTRAS, **SAFETENSORS, "pytorch_model.bin": b"never fetched"}
    only_bin = {**CONFIG, "vocab.json": b"{}", "merges.txt": b"", "pytorch_model.bin": b"weights", "tf_model.h5": b""}
    held = Hub(
        {
            "big/model": {"main": sharded, "v2": {**CONFIG, "model.safetensors": b"of v2"}},
            "old/opt": {"main": only_bin},
            "me/private": {"main": {**CONFIG, "model.safetensors": b"secret"}},
            "meta/gated": {"main": {**CONFIG, "model.safetensors": b"gated"}},
            "some/dataset": {"main": {"data.csv": b""}},
            "some/gguf": {"main": {**CONFIG, "model.gguf": b""}},
            "evil/index": {
                "main": {**CONFIG, "model.safetensors.index.json": b'{"weight_map": {"a": "../../x.safetensors"}}'}
            },
        },
        private={"me/private"},
        gated={"meta/gated"},
        broken={"is/down"},
    )

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            held.requests.append((self.command, self.path, self.headers["Authorization"]))
            status, headers, body = held.answer(self.path, self.headers["Authorization"])
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET  # noqa: N815

        def log_message(self, *args: object) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    held.url = f"http://127.0.0.1:{http.server_port}"
    threading.Thread(target=http.serve_forever, daemon=True).start()
    yield held
    http.shutdown()
    http.server_close()


def locate_each(
    home: Path,
    *models: str | tuple[str, str],
    endpoint: str,
    log: list[str] | None = None,
    with_weights: bool = True,
    **environment: str,
) -> list[dict[str, str]]:
    """Calls ``locate`` for each model in a fresh process: ``{"path": …}`` or ``{"error": …, "message": …}``.

    Its output on stderr is added to ``log``.
    """
    wanted = [(model, None) if isinstance(model, str) else model for model in models]
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING", "TRANSFORMERS"))
    }
    environment = {
        **kept,
        "HF_HOME": str(home),
        "HF_ENDPOINT": endpoint,
        "NO_PROXY": "*",
        "no_proxy": "*",
        **environment,
    }
    environment |= dict.fromkeys(("HF_HUB_ETAG_TIMEOUT", "HF_HUB_DOWNLOAD_TIMEOUT"), "600")  # the server may be slow
    done = subprocess.run(
        [sys.executable, "-c", LOCATE, json.dumps([wanted, with_weights])],
        env=environment,
        cwd=home,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    if log is not None:
        log.append(done.stderr)
    return [json.loads(line) for line in done.stdout.splitlines()]


def files_in(directory: str) -> set[str]:
    root = Path(directory)
    return {str(file.relative_to(root)) for file in root.rglob("*") if file.is_file()}


def test_download_refusals_and_the_cache_afterwards(server: Hub, tmp_path: Path) -> None:
    server.requests.clear()
    sharded, v2, old, *refused = locate_each(
        tmp_path,
        *("big/model", ("big/model", "v2"), "old/opt", "no/such", "me/private", "meta/gated"),
        *(("big/model", "v9"), "some/dataset", "some/gguf", "is/down", "evil/index"),
        endpoint=server.url,
    )
    assert files_in(sharded["path"]) == NEEDED | set(SAFETENSORS)
    assert files_in(v2["path"]) == {*CONFIG, "model.safetensors"}
    assert Path(v2["path"], "model.safetensors").read_bytes() == b"of v2"
    assert files_in(old["path"]) == {*CONFIG, "vocab.json", "merges.txt", "pytorch_model.bin"}
    assert server.tokens_seen() == {None}

    missing, private, gated, revision, no_config, no_weights, down, evil = refused
    assert all(answer["error"] == "ModelNotFoundError" for answer in refused[:-1])
    for answer in (missing, private):
        assert "no such repository" in answer["message"]
        assert "hf auth login" in answer["message"]
    assert f"{server.url}/meta/gated is gated" in gated["message"]
    assert "HF_TOKEN" in gated["message"]
    assert "no revision 'v9'" in revision["message"]
    assert "no config.json" in no_config["message"]
    assert "has no weights" in no_weights["message"]
    assert "503" in down["message"]
    assert str(tmp_path / "hub") in down["message"]
    assert evil["error"] == "CheckpointError"
    assert "is outside the" in evil["message"]
    assert not list(tmp_path.rglob("x.safetensors"))

    asked = len(server.requests)
    nowhere = "http://127.0.0.1:1"
    for environment in ({"HF_HUB_OFFLINE": "1", "endpoint": server.url}, {"endpoint": nowhere}):
        again, v2_again, never, other_revision = locate_each(
            tmp_path, "big/model", ("big/model", "v2"), "never/seen", ("old/opt", "v2"), **environment
        )
        assert (again, v2_again) == (sharded, v2)
        assert never["error"] == other_revision["error"] == "ModelNotFoundError"
        assert "'never/seen' is neither a directory on this machine nor a built-in" in never["message"]
        for said in (environment["endpoint"], str(tmp_path / "hub"), "holds no copy", "HF_HUB_OFFLINE"):
            assert said in never["message"]
        assert "at revision 'v2'" in other_revision["message"]
    assert len(server.requests) == asked, "the network was used although it is switched off"

    log: list[str] = []
    locate_each(tmp_path, "big/model", endpoint=server.url, HF_HUB_OFFLINE="1", log=log)
    locate_each(tmp_path, "big/model", endpoint=nowhere, log=log)
    assert "cache" not in log[0], "what was asked for is reported as a failure"
    assert "using the copy in the cache" in log[1]

    Path(sharded["path"], "model-00002-of-00002.safetensors").unlink()
    (partial,) = locate_each(tmp_path, "big/model", endpoint=nowhere)
    assert "incomplete" in partial["message"]
    assert "lacks model-00002-of-00002.safetensors" in partial["message"]
    assert locate_each(tmp_path, "big/model", endpoint=server.url) == [sharded]
    assert files_in(sharded["path"]) == NEEDED | set(SAFETENSORS)


def test_without_weights_only_the_small_files_are_downloaded_and_needed(server: Hub, tmp_path: Path) -> None:
    (found,) = locate_each(tmp_path, "big/model", endpoint=server.url, with_weights=False)
    assert files_in(found["path"]) == NEEDED
    nowhere = "http://127.0.0.1:1"
    assert locate_each(tmp_path, "big/model", endpoint=nowhere, with_weights=False) == [found]
    (refused,) = locate_each(tmp_path, "big/model", endpoint=nowhere)
    assert "lacks the weights" in refused["message"]


def test_a_private_repository_with_the_users_token(server: Hub, tmp_path: Path) -> None:
    homes = {name: tmp_path / name for name in ("environment", "login")}
    for home in homes.values():
        home.mkdir()
    (homes["login"] / "token").write_text(TOKEN)
    for name, environment in (("environment", {"HF_TOKEN": TOKEN}), ("login", {})):
        server.requests.clear()
        private, missing = locate_each(homes[name], "me/private", "no/such", endpoint=server.url, **environment)
        assert Path(private["path"], "model.safetensors").read_bytes() == b"secret"
        assert server.tokens_seen() == {f"Bearer {TOKEN}"}
        assert "no such repository" in missing["message"]

    (homes["login"] / "token").unlink()
    (refused,) = locate_each(homes["login"], "me/private", endpoint=server.url)
    assert refused["error"] == "ModelNotFoundError"
    assert f"HF_HUB_OFFLINE=1 uses it ({private['path']})" in refused["message"]


# On this machine


@pytest.fixture
def builtin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path / "shipped" / "tiny-llama"
    directory.mkdir(parents=True)
    (directory / "config.json").write_text("{}")
    monkeypatch.setattr(hub, "BUILTINS", {"tiny-llama": directory})
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    return directory


def test_builtins_are_the_directories_with_a_config() -> None:
    shipped = Path(hub.__file__).parents[1] / "builtin"
    assert set(BUILTINS.values()) == {config.parent for config in shipped.glob("*/config.json")}
    assert all(hub.locate(name) == path == shipped / name for name, path in BUILTINS.items())


def test_a_directory_comes_before_a_builtin_of_its_name(builtin: Path) -> None:
    assert hub.locate("tiny-llama") == builtin
    Path("tiny-llama").mkdir()
    with pytest.raises(ModelNotFoundError, match=r"has no config\.json.*hides the built-in 'tiny-llama'"):
        hub.locate("tiny-llama")
    Path("tiny-llama/config.json").write_text("{}")
    for spelling in ("tiny-llama", "./tiny-llama", "tiny-llama/", Path("tiny-llama"), Path("tiny-llama").absolute()):
        assert hub.locate(spelling).samefile("tiny-llama")


def test_home_is_expanded(builtin: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(builtin.parent))
    assert hub.locate("~/tiny-llama") == builtin


def test_a_revision_belongs_to_the_hub(builtin: Path) -> None:
    for model in ("tiny-llama", builtin):
        with pytest.raises(InvalidArgumentError, match="revision='v1'"):
            hub.locate(model, revision="v1")


@pytest.mark.parametrize(
    "model",
    ["./x", "../x", "/no/such/x", "~/x", "a/b/c", "x/", "", "\0", "https://h.co/a/b", "x" * 5000, "a\\b", "a b"],
)
def test_a_path_that_is_not_there(builtin: Path, model: str) -> None:
    with pytest.raises(
        ModelNotFoundError, match=r"not a directory on this machine.* not a hub id of the form"
    ) as caught:
        hub.locate(model)
    assert "tiny-llama" in str(caught.value)
    assert len(str(caught.value)) < 700


def test_a_file_is_no_model(builtin: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelNotFoundError, match="it is one file of a model; give the directory"):
        hub.locate(builtin / "config.json")
    (builtin / "notes").touch()
    monkeypatch.chdir(builtin.parent)
    for path in (str(builtin / "notes"), f"{builtin.name}/notes"):  # the second could be a hub id
        with pytest.raises(ModelNotFoundError, match=r"/notes: It is a file; give the directory it is in$"):
            hub.locate(path)


@pytest.mark.parametrize("typed", ["tiny-lama", "tiny_llama", "Tiny-Llama", "tinyllama"])
def test_a_mistyped_builtin(builtin: Path, monkeypatch: pytest.MonkeyPatch, typed: str) -> None:
    def no_network(*args: object, **kwargs: object) -> None:
        raise ConnectionError("no network")

    monkeypatch.setattr(hub.HfApi, "model_info", no_network)
    with pytest.raises(ModelNotFoundError, match="Did you mean 'tiny-llama'"):
        hub.locate(typed)


def test_a_builtin_written_as_a_path(builtin: Path) -> None:
    for typed in ("./tiny-llama", "tiny-llama/"):
        with pytest.raises(ModelNotFoundError, match="Did you mean 'tiny-llama'"):
            hub.locate(typed)


def test_an_unlike_name_gets_no_suggestion(builtin: Path) -> None:
    with pytest.raises(ModelNotFoundError) as caught:
        hub.locate("./mixtral")
    assert "Did you mean" not in str(caught.value)
