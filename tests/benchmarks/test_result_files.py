"""The files of results have an order, and a new one takes no name that is taken."""

from __future__ import annotations

from pathlib import Path

from benchmarks.result_files import build, files, next_file


def test_the_tenth_result_of_a_day_is_newer_than_the_second(tmp_path: Path) -> None:
    names = ["gpu_2026-11-09_3", "gpu_2026-11-27", "gpu_2026-11-27_2", "gpu_2026-11-27_9", "gpu_2026-11-27_10"]
    for name in (*reversed(names), "gpu_2026-11-27_variants", "gpu_other_2026-11-27"):
        (tmp_path / f"{name}.json").touch()
    assert [each.stem for each in files(tmp_path, "gpu")] == names


def test_a_new_result_is_the_newest_and_replaces_none(tmp_path: Path) -> None:
    (tmp_path / "gpu_2026-11-27.json").touch()
    names = []
    for _ in range(3):
        new = next_file(tmp_path, "gpu", "2026-11-28")
        assert not new.exists()
        new.touch()
        assert files(tmp_path, "gpu")[-1] == new
        names.append(new.name)
    assert names == ["gpu_2026-11-28.json", "gpu_2026-11-28_2.json", "gpu_2026-11-28_3.json"]


def test_a_result_names_its_build_or_says_that_it_does_not() -> None:
    assert build({"commit": "abc1234"}) == "commit abc1234"
    assert build({"commit": ""}) == build({}) == "commit not recorded"
