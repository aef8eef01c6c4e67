"""API keys from files and the environment, and the processes that see them."""

from __future__ import annotations

from pathlib import Path

import pytest

from fastgen.errors import InvalidArgumentError
from fastgen.serving.api_keys import API_KEY_VARIABLE, ApiKeys, bearer
from fastgen.serving.isolated.processes import _Process
from fastgen.serving.refusals import UnauthorizedError


def test_keys_are_read_whatever_an_editor_put_around_them(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_bytes(b"\xef\xbb\xbfone\r\n\r\n# two\r\n  three # of somebody\r\nfour")
    keys = ApiKeys.load(file, {API_KEY_VARIABLE: " five\r\n"})
    for key in ("one", "three", "four", "five"):
        keys.check(key)
    for key in ("two", "three # of somebody", "\ufeffone", "", None):
        with pytest.raises(UnauthorizedError):
            keys.check(key)


def test_a_client_is_told_whether_its_key_is_missing_or_wrong_and_no_key_is_shown() -> None:
    keys = ApiKeys(["one", "two"])
    with pytest.raises(UnauthorizedError, match=r"^an API key is needed: send 'Authorization: Bearer KEY'$"):
        keys.check(None)
    for key in ("three", ""):
        with pytest.raises(UnauthorizedError, match=r"^this API key is not known$"):
            keys.check(key)
    assert repr(keys) == "ApiKeys(2 keys)"


@pytest.mark.parametrize("key", ["schlüssel", "two words", "a\tb", "zero\u200bwidth", "bell\a"])
def test_a_key_that_nobody_could_send_is_refused_and_not_told(tmp_path: Path, key: str) -> None:
    file = tmp_path / "keys"
    file.write_text(f"good\n{key}\n", encoding="utf-8")
    with pytest.raises(InvalidArgumentError, match="keys:2: an API key must consist of visible ASCII") as refused:
        ApiKeys.load(file, {})
    with pytest.raises(InvalidArgumentError, match=f"^{API_KEY_VARIABLE}: an API key"):
        ApiKeys.load(None, {API_KEY_VARIABLE: key})
    assert key not in str(refused.value)


@pytest.mark.parametrize("content", ["", "\n \r\n", "# one\n"])
def test_a_file_without_a_key_is_refused(tmp_path: Path, content: str) -> None:
    file = tmp_path / "keys"
    file.write_text(content)
    with pytest.raises(InvalidArgumentError, match="has no API key"):
        ApiKeys.load(file, {})


def test_an_environment_variable_of_spaces_is_no_open_door() -> None:
    assert not ApiKeys.load(None, {API_KEY_VARIABLE: ""})
    with pytest.raises(InvalidArgumentError, match=API_KEY_VARIABLE):
        ApiKeys.load(None, {API_KEY_VARIABLE: "  "})


def test_processes_that_work_for_the_server_are_not_told_the_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(API_KEY_VARIABLE, "a-secret")
    monkeypatch.setenv("FASTGEN_SOMETHING", "else")
    process = _Process(["env"])
    seen = process._from.read()
    process.end()
    assert b"FASTGEN_SOMETHING=else" in seen
    assert b"a-secret" not in seen


@pytest.mark.parametrize(
    ("authorization", "key"),
    [
        (None, None),
        ("", None),
        ("Bearer", None),
        ("Bearer  ", None),
        ("Bearer one", "one"),
        ("bEARER  one ", "one"),
        ("Basic one", None),
        ("one", None),
    ],
)
def test_a_key_follows_the_word_bearer(authorization: str | None, key: str | None) -> None:
    assert bearer(authorization) == key


def test_keys_are_handed_on_as_their_digests() -> None:
    digests = ApiKeys(["one"]).digests
    assert digests == ["7692c3ad3540bb803c020b3aee66cd8887123234ea0c6e7143c0add73ff431ed"]
    both = ApiKeys(["two"]).with_digests(digests)
    for key in ("one", "two"):
        both.check(key)
    with pytest.raises(UnauthorizedError):
        both.check("three")
    assert (bool(both), bool(ApiKeys().with_digests([]))) == (True, False)
    ApiKeys().check(None)
