"""The questions' data without a network: the pins, a named folder, and a user's own rows."""

from __future__ import annotations

import codecs
import json
import re
import shutil
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import pytest

from harness.datasets import PINS, Network, Pin, Pins, cache_folder, load_gsm8k, read_jsonl, verify
from harness.errors import ConfigError, DataUnavailable

Edit = Callable[[bytes], bytes]
NOWHERE = Network(sources=())


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give each test an empty cache of its own and no folder named by the environment."""
    monkeypatch.delenv("ACCURACY_GATE_DATA", raising=False)
    monkeypatch.delenv("ACCURACY_GATE_DATA_URLS", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "accuracy-gate" / "gsm8k"


def jsonl(*rows: dict[str, str]) -> bytes:
    """Write rows one a line; what is not ASCII stays unescaped, as when GSM8K is dumped anew."""
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def pin_of(name: str, content: bytes) -> Pin:
    """Pin exactly this content."""
    return Pin(
        name=name,
        sha256=sha256(content).hexdigest(),
        size=len(content),
        rows=sum(1 for line in content.split(b"\n") if line),
    )


TRAIN = jsonl(*({"question": f"What is {n} + 1?", "answer": f"It is {n + 1}.\n#### {n + 1}"} for n in range(9)))
TEST = jsonl(
    {"question": "One\u2028two\u2029three\x85four?", "answer": "Four.\n#### 4"},
    {"question": "2?", "answer": "2"},
)
SMALL = Pins(train=pin_of("train.jsonl", TRAIN), test=pin_of("test.jsonl", TEST))


def fill(folder: Path, train: bytes = TRAIN, test: bytes = TEST) -> Path:
    """Write both files into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "train.jsonl").write_bytes(train)
    (folder / "test.jsonl").write_bytes(test)
    return folder


def test_the_real_files_meet_the_pins(gsm8k_dir: Path) -> None:
    """GSM8K as published holds 7473 examples and 1319 questions, in file order."""
    data = load_gsm8k(gsm8k_dir)
    assert (len(data.train), len(data.test)) == (7473, 1319)
    assert [row.line_index for row in data.test] == list(range(1319))
    assert [row.line_index for row in data.train if "\u2028" in row.question + row.answer] == [2381]
    assert [i for i, row in enumerate(data.test) if "#### -" in row.answer] == [489, 1113]


def test_the_real_rows_are_fit_for_a_users_own_file(gsm8k_dir: Path) -> None:
    """The strict reader takes GSM8K itself and reads the same rows from it."""
    assert read_jsonl(gsm8k_dir / "test.jsonl") == load_gsm8k(gsm8k_dir).test


def flip_a_byte(content: bytes) -> bytes:
    """Change one bit in the middle."""
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


REAL_DAMAGE = {
    "truncated": (lambda c: c[:-2], r"749736 bytes instead of 749738, sha256 \w{64} instead of 3730d312\w+$"),
    "half-written": (lambda c: c[:300_000], r"300000 bytes instead of 749738, \d+ rows instead of 1319"),
    "a row lost": (lambda c: c[: c.rindex(b"\n", 0, -1) + 1], r"1318 rows instead of 1319"),
    "edited": (
        lambda c: c.replace(b"#### 18", b"#### 19", 1),
        r"test\.jsonl: sha256 \w{64} instead of 3730d312\w+$",
    ),
    "one bit flipped": (flip_a_byte, r"test\.jsonl: sha256 \w{64} instead of 3730d312\w+$"),
    "CRLF": (
        lambda c: c.replace(b"\n", b"\r\n"),
        r"751057 bytes .*likely cause: .*autocrlf.* with CRLF line ends$",
    ),
    "byte order mark": (
        lambda c: codecs.BOM_UTF8 + c,
        r"749741 bytes .*likely cause: .* with a byte order mark$",
    ),
    "both": (
        lambda c: codecs.BOM_UTF8 + c.replace(b"\n", b"\r\n"),
        r"likely cause: .* with a byte order mark and CRLF line ends$",
    ),
    "UTF-16": (
        lambda c: codecs.BOM_UTF16_LE + c.decode().encode("utf-16-le"),
        r"likely cause: .* with UTF-16$",
    ),
    "a newline more": (lambda c: c + b"\n", r"749739 bytes .*likely cause: .* a newline at its end$"),
    "a newline less": (lambda c: c[:-1], r"749737 bytes .*likely cause: .* a newline at its end$"),
    "a web page": (lambda c: b"<!DOCTYPE html>", r"15 bytes .*likely cause: it is a web page$"),
    "empty": (lambda c: b"", r"0 bytes instead of 749738, 0 rows instead of 1319, sha256 e3b0c442"),
    "far too large": (lambda c: c * 4, r"2998952 bytes instead of 749738$"),
}


@pytest.mark.parametrize(("damage", "message"), REAL_DAMAGE.values(), ids=REAL_DAMAGE)
def test_a_damaged_file_in_a_named_folder_is_refused(
    gsm8k_dir: Path, tmp_path: Path, cache: Path, damage: Edit, message: str
) -> None:
    """The error names the file, what differs, the likely cause and the remedy; nothing is fetched instead."""
    folder = tmp_path / "data"
    folder.mkdir()
    shutil.copy(gsm8k_dir / "train.jsonl", folder)
    (folder / "test.jsonl").write_bytes(damage((gsm8k_dir / "test.jsonl").read_bytes()))
    with pytest.raises(DataUnavailable) as caught:
        load_gsm8k(folder, network=NOWHERE)
    fault, remedy = str(caught.value).split("\n")
    assert fault.startswith(f"{folder / 'test.jsonl'}: ")
    assert re.search(message, fault), fault
    assert "accuracy-gate data fetch" in remedy
    assert not cache.exists()


@pytest.mark.parametrize("missing", ["train.jsonl", "test.jsonl"])
def test_a_file_missing_from_a_named_folder_is_named(tmp_path: Path, missing: str) -> None:
    """A folder the user named must hold both files."""
    folder = fill(tmp_path / "data")
    (folder / missing).unlink()
    with pytest.raises(DataUnavailable) as caught:
        load_gsm8k(folder, pins=SMALL, network=NOWHERE)
    assert str(caught.value).startswith(f"{folder / missing}: is missing\n")


def test_a_folder_in_place_of_a_file_is_named(tmp_path: Path) -> None:
    """What cannot be read is refused with the system's reason."""
    folder = fill(tmp_path / "data")
    (folder / "test.jsonl").unlink()
    (folder / "test.jsonl").mkdir()
    with pytest.raises(DataUnavailable, match=r"test\.jsonl: cannot be read: Is a directory"):
        load_gsm8k(folder, pins=SMALL)


def test_line_separators_inside_a_row_do_not_cut_it(tmp_path: Path) -> None:
    """U+2028, U+2029 and U+0085 standing unescaped in a question belong to it."""
    data = load_gsm8k(fill(tmp_path / "data"), pins=SMALL)
    assert [row.question for row in data.test] == ["One\u2028two\u2029three\x85four?", "2?"]
    assert [row.line_index for row in data.train] == list(range(9))


def test_the_argument_comes_before_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """--data-dir wins over ACCURACY_GATE_DATA, which wins over the cache."""
    given = fill(tmp_path / "given")
    monkeypatch.setenv("ACCURACY_GATE_DATA", str(tmp_path / "absent"))
    assert len(load_gsm8k(given, pins=SMALL, network=NOWHERE).train) == 9
    with pytest.raises(DataUnavailable, match=re.escape(f"{tmp_path / 'absent' / 'train.jsonl'}: is missing")):
        load_gsm8k(pins=SMALL, network=NOWHERE)


def test_the_environment_names_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    """ACCURACY_GATE_DATA is used with `~` resolved, and the cache is not even made."""
    fill(tmp_path / "mine")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("ACCURACY_GATE_DATA", "~/mine")
    assert len(load_gsm8k(pins=SMALL, network=NOWHERE).test) == 2
    assert not cache.exists()


def test_a_right_cache_needs_neither_network_nor_lock(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    """With both files cached nothing is written: a read-only cache works. An empty variable is unset."""
    fill(cache)
    monkeypatch.setenv("ACCURACY_GATE_DATA", "")
    assert len(load_gsm8k(pins=SMALL, network=NOWHERE).train) == 9
    assert sorted(path.name for path in cache.iterdir()) == ["test.jsonl", "train.jsonl"]


@pytest.mark.parametrize(
    ("xdg", "below"), [("/var/tmp/xdg", "/var/tmp/xdg"), ("", "HOME/.cache"), ("relative", "HOME/.cache")]
)
def test_the_cache_lies_where_xdg_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, xdg: str, below: str) -> None:
    """XDG_CACHE_HOME counts when it is absolute; otherwise the cache is below the home folder."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", xdg)
    assert cache_folder() == Path(below.replace("HOME", str(tmp_path))) / "accuracy-gate" / "gsm8k"


def test_no_home_folder_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user without a home folder is told to set XDG_CACHE_HOME."""

    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", no_home)
    with pytest.raises(DataUnavailable, match="set XDG_CACHE_HOME"):
        load_gsm8k(network=NOWHERE)


def test_verify_reports_each_file_and_makes_nothing(tmp_path: Path, cache: Path) -> None:
    """Verifying says per file what differs, in a named folder or in the cache, and creates no folder."""
    folder = fill(tmp_path / "data", test=TEST[:-1])
    train, test = verify(folder, pins=SMALL)
    assert (train.path, train.ok, train.difference) == (folder / "train.jsonl", True, None)
    assert (test.path, test.ok) == (folder / "test.jsonl", False)
    assert f"{len(TEST) - 1} bytes instead of {len(TEST)}" in str(test.difference)
    assert [(check.path.parent, check.difference) for check in verify(pins=PINS)] == [(cache, "is missing")] * 2
    assert not cache.exists()


@pytest.mark.parametrize(
    "addresses",
    ["ftp://host/data", "host/data", "http://", "https://good/a http://[bad", "http://host:port/a"],
)
def test_a_wrong_source_is_a_mistake_in_the_options(monkeypatch: pytest.MonkeyPatch, addresses: str) -> None:
    """ACCURACY_GATE_DATA_URLS holds http or https addresses; the entry at fault is counted, not quoted."""
    monkeypatch.setenv("ACCURACY_GATE_DATA_URLS", addresses)
    with pytest.raises(ConfigError, match=f"ACCURACY_GATE_DATA_URLS: entry {len(addresses.split())} is not"):
        load_gsm8k(pins=SMALL)


def own(tmp_path: Path, content: bytes) -> Path:
    """Write a user's file of questions."""
    path = tmp_path / "mine.jsonl"
    path.write_bytes(content)
    return path


def test_own_rows_are_read_as_they_stand(tmp_path: Path) -> None:
    """Worked answers, bare numbers and JSON numbers are taken, and other keys are ignored."""
    path = own(
        tmp_path,
        b'{"question": "  a? ", "answer": "So 1,234.\\n#### 1,234", "id": [1, {"x": null}]}\n'
        b'{"question": "b?", "answer": "-5"}\n{"question": "c?", "answer": 42}\n'
        b'{"answer": 2.50, "question": "d?"}',
    )
    rows = read_jsonl(path)
    assert [row.question for row in rows] == ["  a? ", "b?", "c?", "d?"]
    assert [row.answer for row in rows] == ["So 1,234.\n#### 1,234", "-5", "42", "2.50"]
    assert {type(row.answer) for row in rows} == {str}


@pytest.mark.parametrize("end", [b"\n", b"\r\n"], ids=["LF", "CRLF"])
@pytest.mark.parametrize("mark", [b"", codecs.BOM_UTF8], ids=["plain", "byte order mark"])
def test_windows_files_and_blank_lines_are_taken(tmp_path: Path, end: bytes, mark: bytes) -> None:
    """A byte order mark, CRLF, and blank lines anywhere change no row; blank lines count in its position."""
    rows = [b'{"question": "a?", "answer": "1"}', b"", b" \t", b'{"question": "b?", "answer": "2"}', b"", b""]
    read = read_jsonl(own(tmp_path, mark + end.join(rows)))
    assert [(row.question, row.line_index) for row in read] == [("a?", 0), ("b?", 3)]


def test_own_rows_may_hold_line_separators(tmp_path: Path) -> None:
    """Only a newline ends a row, so a raw U+2028, U+2029 or U+0085 does not."""
    assert [row.question for row in read_jsonl(own(tmp_path, TEST))] == [
        "One\u2028two\u2029three\x85four?",
        "2?",
    ]


FAULTS = {
    "not JSON": (b'{"question": "a?", "answer": "1"', r":2: not JSON at column 33: "),
    "not an object": (b'["a?", "1"]', r":2: not a JSON object; write "),
    "a bare string": (b'"a?"', r":2: not a JSON object; write "),
    "two objects on a line": (
        b'{"question": "a?", "answer": "1"} {}',
        r":2: not JSON at column 35: Extra data",
    ),
    "nested too deeply": (b"[" * 100_000, r":2: (nested too deeply|not JSON)"),
    "no answer": (
        b'{"question": "a?", "solution": "1"}',
        r""":2: no "answer" \(keys here: 'question', 'solution'\)""",
    ),
    "no question": (b'{"answer": "1"}', r""":2: no "question" \(keys here: 'answer'\); a row needs"""),
    "empty object": (b"{}", r':2: no "question" \(keys here: none\)'),
    "empty question": (b'{"question": " \\n", "answer": "1"}', r':2: "question" is empty; fill it in'),
    "empty answer": (b'{"question": "a?", "answer": ""}', r':2: "answer" is empty; fill it in'),
    "question a number": (
        b'{"question": 3, "answer": "1"}',
        r':2: "question" is a number; write it as a string',
    ),
    "question a list": (
        b'{"question": ["a"], "answer": "1"}',
        r':2: "question" is \["a"\]; write it as a string',
    ),
    "answer null": (b'{"question": "a?", "answer": null}', r':2: "answer" is null; write it as a string'),
    "answer a boolean": (
        b'{"question": "a?", "answer": true}',
        r':2: "answer" is true; write it as a string',
    ),
    "answer NaN": (b'{"question": "a?", "answer": NaN}', r":2: NaN is not JSON"),
    "NaN in another key": (
        b'{"question": "a?", "answer": "1", "w": -Infinity}',
        r":2: -Infinity is not JSON",
    ),
    "answer twice": (
        b'{"question": "a?", "answer": "1", "answer": "2"}',
        r":2: the key 'answer' stands twice",
    ),
    "nothing to grade": (
        b'{"question": "a?", "answer": "many"}',
        r":2: .*'many'.* end it with '####",
    ),
    "nothing after ####": (
        b'{"question": "a?", "answer": "so\\n#### "}',
        r":2: .*'so\\n#### '.* end it with '####",
    ),
    "half a surrogate": (
        b'{"question": "\\ud83d?", "answer": "1"}',
        r':2: "question" holds half a surrogate pair',
    ),
}


@pytest.mark.parametrize(("line", "message"), FAULTS.values(), ids=FAULTS)
def test_a_bad_row_is_named_with_its_line(tmp_path: Path, line: bytes, message: str) -> None:
    """A row that cannot be asked or graded is an error naming file and line, and how to mend it."""
    path = own(tmp_path, b'{"question": "ok?", "answer": "7"}\n' + line + b"\n")
    with pytest.raises(ConfigError, match=re.escape(str(path)) + message) as caught:
        read_jsonl(path)
    assert len(caught.value.faults) == 1
    assert "\n" not in str(caught.value)


def test_every_bad_row_is_named_at_once(tmp_path: Path) -> None:
    """One reading tells all the faults, so that they are mended in one go."""
    with pytest.raises(ConfigError) as caught:
        read_jsonl(own(tmp_path, b'{}\n{"question": "a?", "answer": "1"}\n[]\n{"question": "a?", "answer": "2"}'))
    lines = [fault.removeprefix(f"{tmp_path / 'mine.jsonl'}:").split(":")[0] for fault in caught.value.faults]
    assert lines == ["1", "3", "4"]


def test_a_flood_of_faults_is_cut_and_counted(tmp_path: Path) -> None:
    """A file of another kind is told in a screenful."""
    with pytest.raises(ConfigError) as caught:
        read_jsonl(own(tmp_path, b"{}\n" * 1000))
    assert len(caught.value.faults) == 21
    assert caught.value.faults[-1] == f"{tmp_path / 'mine.jsonl'}: and 980 more faults"


def test_a_question_asked_twice_names_both_rows(tmp_path: Path) -> None:
    """The same question in two rows would be counted twice: both lines are named."""
    path = own(tmp_path, b'{"question": "a?", "answer": "1"}\n\n{"question": "a? ", "answer": "1"}\n')
    with pytest.raises(ConfigError, match=re.escape(f"{path}:3: asks the question of line 1 again")):
        read_jsonl(path)


UNREADABLE = {
    "empty": (b"", "mine.jsonl: holds no rows; write"),
    "blank": (b"\n\r\n \n", "mine.jsonl: holds no rows; write"),
    "only a byte order mark": (codecs.BOM_UTF8, "mine.jsonl: holds no rows; write"),
    "Latin-1": (
        '{"question": "a?", "answer": "1"}\n{"question": "é?"}'.encode("latin-1"),
        "mine.jsonl:2: byte 0xe9 is not",
    ),
    "UTF-16": (codecs.BOM_UTF16_LE + "{}".encode("utf-16-le"), "mine.jsonl:1: byte 0xff is not UTF-8"),
}


@pytest.mark.parametrize(("content", "message"), UNREADABLE.values(), ids=UNREADABLE)
def test_a_file_that_holds_no_rows_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    """A file that is empty or not UTF-8 is an error, never a run of no questions."""
    with pytest.raises(ConfigError, match=re.escape(message)):
        read_jsonl(own(tmp_path, content))


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    """A mistyped name is an error in the options."""
    with pytest.raises(ConfigError, match=r"absent\.jsonl: cannot be read: No such file or directory"):
        read_jsonl(tmp_path / "absent.jsonl")
