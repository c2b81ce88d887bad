"""Config lists: names, ids, and errors instead of skips."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.config_lists import find_list, load_lists
from harness.errors import ConfigError

GOOD = "model_name: m\naccuracy_threshold: 0.5\n"


def folder(tmp_path: Path, *names: str) -> Path:
    for name in names:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(GOOD)
    return tmp_path


def write_list(tmp_path: Path, text: str, name: str = "list.txt") -> Path:
    path = tmp_path / name
    path.write_bytes(text.encode())
    return path


LISTS = {
    "trailing blanks": ("A.yaml  \nB.yaml\n", ["A", "B"]),
    "comments and no final newline": ("# GFX950\n# more\n\nB.yaml", ["B"]),
    "BOM, CRLF, sub-folder": ("\ufeffB.yaml\r\n\r\nsub/C.yaml  \r\n", ["B", "sub/C"]),
    "inline comment": ("B.yaml  # nightly only\n", ["B"]),
    "same stem in two folders": ("sub1/M.yaml\nsub2/M.yaml\n", ["sub1/M", "sub2/M"]),
    "dots in names": ("Q-0.6B.yaml\n", ["Q-0.6B"]),
    "order is kept": ("B.yaml\nA.yaml\n", ["B", "A"]),
    "hash inside a name": ("a#b.yaml\n", ["a#b"]),
    "the other suffix": ("D.yml\n", ["D"]),
}
NAMES = ("A.yaml", "B.yaml", "sub/C.yaml", "sub1/M.yaml", "sub2/M.yaml", "Q-0.6B.yaml", "a#b.yaml", "D.yml")


@pytest.mark.parametrize(("text", "ids"), LISTS.values(), ids=LISTS)
def test_a_list_names_configs_below_its_folder(tmp_path: Path, text: str, ids: list[str]) -> None:
    """An id is the path below the list's folder, less its suffix, however the list was edited."""
    folder(tmp_path, *NAMES)
    assert [entry.id for entry in load_lists([write_list(tmp_path, text)])] == ids


FAULTS = {
    "missing file": ("A.yaml\nZ.yaml\n", "list.txt:2:1: Z.yaml: no such file"),
    "empty": ("# nothing\n", "list.txt: this list names no config"),
    "twice": ("A.yaml\nA.yaml\n", "list.txt:2:1: the id A is taken by"),
    "not YAML": ("A.txt\n", "list.txt:1:1: A.txt is no YAML file name"),
    "outside": ("../A.yaml\n", "must be a path below the list's own folder"),
    "absolute": ("/A.yaml\n", "must be a path below the list's own folder"),
    "two suffixes, one id": ("D.yml\nD.yaml\n", "the id D is taken by"),
}


@pytest.mark.parametrize(("text", "expected"), FAULTS.values(), ids=FAULTS)
def test_a_list_with_a_fault_is_refused(tmp_path: Path, text: str, expected: str) -> None:
    """A listed config that is missing or stands twice is an error with its line, never a skip."""
    folder(tmp_path, "A.yaml", "D.yml", "D.yaml")
    with pytest.raises(ConfigError, match=r"list\.txt") as caught:
        load_lists([write_list(tmp_path, text)])
    assert expected in str(caught.value)


def test_all_faults_of_all_lists_come_at_once(tmp_path: Path) -> None:
    """A missing file, a broken YAML and a list named twice are three lines."""
    folder(tmp_path, "A.yaml")
    (tmp_path / "bad.yaml").write_text(GOOD + "x: 1\n")
    first = write_list(tmp_path, "A.yaml\nZ.yaml\nbad.yaml\n")
    with pytest.raises(ConfigError) as caught:
        load_lists([first, first])
    assert len(caught.value.faults) == 3
    assert "named twice" in caught.value.faults[2]


def test_equal_ids_in_two_lists_are_refused(tmp_path: Path) -> None:
    """Two lists of one run may not both hold an id: records would overwrite each other."""
    one, two = (write_list(folder(tmp_path / d, "A.yaml"), "A.yaml\n") for d in ("one", "two"))
    with pytest.raises(ConfigError, match=r"the id A is taken by .*one.list\.txt:1:1"):
        load_lists([one, two])


def test_a_relative_list_is_looked_for_in_three_places(tmp_path: Path) -> None:
    """The suite's root comes first, then its configs/, then the working directory."""
    root, cwd = tmp_path / "root", tmp_path / "cwd"
    for place in (cwd, root / "configs", root):
        place.mkdir(parents=True, exist_ok=True)
        (place / "l.txt").write_text("")
        assert find_list("l.txt", suite_root=root, cwd=cwd) == place / "l.txt"


def test_a_list_not_found_names_every_place(tmp_path: Path) -> None:
    """The error says where it looked."""
    with pytest.raises(ConfigError) as caught:
        find_list("l.txt", suite_root=tmp_path / "r", cwd=tmp_path / "c")
    assert all(str(tmp_path / place / "l.txt") in str(caught.value) for place in ("r", "r/configs", "c"))
