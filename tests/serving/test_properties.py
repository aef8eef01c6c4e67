"""Java's properties files are read as Java reads them."""

from __future__ import annotations

from pathlib import Path

import pytest

from fastgen.errors import InvalidArgumentError
from fastgen.serving.lmi.properties import read_properties

# Each as java.util.Properties documents it: a text, and the entries and lines that are in it.
CASES = {
    "separators": (
        "a=1\nb:2\nc 3\nd\t=\t4\ne : 5\n",
        [("a", "1", 1), ("b", "2", 2), ("c", "3", 3), ("d", "4", 4), ("e", "5", 5)],
    ),
    "only the first separates": ("a==1\nb=:2\nc = 3 = 4\n", [("a", "=1", 1), ("b", ":2", 2), ("c", "3 = 4", 3)]),
    "comments and blank lines": ("# a=1\n  ! b=2\n\n   \nc=3 # a comment\n", [("c", "3 # a comment", 5)]),
    "a continued line": ("a=1,\\\n    2,\\\n\t3\nb=4\n", [("a", "1,2,3", 1), ("b", "4", 4)]),
    "a comment is not continued": ("# a=1\\\nb=2\n", [("b", "2", 2)]),
    "a comment inside a continued line is text": ("a=1\\\n# 2\n", [("a", "1# 2", 1)]),
    "two backslashes are one": ("a=C:\\\\\nb=2\n", [("a", "C:\\", 1), ("b", "2", 2)]),
    "escapes": ("a\\ b\\=c\\:d = x\\ty\\nz\\q\n", [("a b=c:d", "x\ty\nzq", 1)]),
    "characters by number": ("gr\\u00fcn=\\u2713\n", [("grün", "✓", 1)]),
    "keys alone": ("a\nb=\n", [("a", "", 1), ("b", "", 2)]),
    "trailing space stays": ("a=1  \n", [("a", "1  ", 1)]),
    "other line ends": ("a=1\r\nb=2\rc=3", [("a", "1", 1), ("b", "2", 2), ("c", "3", 3)]),
    "the end within a continued line": ("a=1\\", [("a", "1", 1)]),
}


@pytest.mark.parametrize("name", CASES)
def test_is_read_as_java_reads_it(tmp_path: Path, name: str) -> None:
    text, wanted = CASES[name]
    file = tmp_path / "serving.properties"
    file.write_bytes(text.encode())
    assert [(found.key, found.value, found.line) for found in read_properties(file)] == wanted


def test_what_java_refuses_is_refused_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "serving.properties"
    file.write_text("a=1\nb=\\u12\n")
    with pytest.raises(InvalidArgumentError, match=r"serving\.properties:2: \\u12 is not a character"):
        read_properties(file)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=r"absent\.properties: cannot be read: No such file"):
        read_properties(tmp_path / "absent.properties")


def test_a_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    file = tmp_path / "serving.properties"
    file.write_bytes("gr\u00fcn=1".encode("latin-1"))
    with pytest.raises(InvalidArgumentError, match=r"serving\.properties: is not UTF-8 text"):
        read_properties(file)
