"""Reading the end of a server's log, and taking the secrets out of it."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from harness.servers.server_log import CHUNK_BYTES, TAIL_BYTES, ServerLog, redact_file

SECRET = "a-very-secret-value"


def test_lines_that_say_something(tmp_path: Path) -> None:
    """The tail leaves out empty lines and terminal colours, and takes each state of a progress bar for a line."""
    path = tmp_path / "server.log"
    log = ServerLog(path, ())
    path.write_bytes(b"\x1b[31mred\x1b[0m\n\n  \nbar 1%\rbar 2%\n\xff end")
    assert log.lines(10) == ["red", "bar 1%", "bar 2%", "\ufffd end"]
    assert log.lines(1) == ["\ufffd end"]


def test_earlier_attempt(tmp_path: Path) -> None:
    """What an earlier server wrote to the same file is not taken for this one's."""
    path = tmp_path / "server.log"
    path.write_text("the first attempt\n")
    log = ServerLog(path, ())
    assert log.lines(10) == []
    assert log.quiet_seconds() is None
    with path.open("a") as file:
        file.write("the second\n")
    assert log.lines(10) == ["the second"]
    assert log.quiet_seconds() is not None


def test_no_log_yet(tmp_path: Path) -> None:
    """A file that does not exist yet is an empty log."""
    log = ServerLog(tmp_path / "server.log", ())
    assert log.text() == ""
    assert log.quiet_seconds() is None
    assert log.redact() is False


def test_how_long_it_has_been_quiet(tmp_path: Path) -> None:
    """The age of the last line is told in seconds."""
    path = tmp_path / "server.log"
    log = ServerLog(path, ())
    path.write_text("working\n")
    then = time.time() - 600
    os.utime(path, (then, then))
    quiet = log.quiet_seconds()
    assert quiet is not None
    assert 600 <= quiet < 660


@pytest.mark.parametrize("offset", range(0, len(SECRET) + 2, 3))
def test_secret_at_the_cut(tmp_path: Path, offset: int) -> None:
    """Of a large log no half of a secret is shown, wherever the tail begins."""
    path = tmp_path / "server.log"
    log = ServerLog(path, [SECRET])
    path.write_text(SECRET * 2 + "\n" + SECRET + "." * (TAIL_BYTES - offset - 1) + "\n")
    assert "secret" not in log.text()
    assert log.text().count(".") >= TAIL_BYTES // 3


def test_secrets_are_taken_out(tmp_path: Path) -> None:
    """A file with a secret is replaced by its redacted copy, in which every other byte and the mode stay."""
    path = tmp_path / "server.log"
    path.write_bytes(b"\xff\xfe raw\r\n" + SECRET.encode() + b"\r\nlast, without an end")
    path.chmod(0o640)
    assert redact_file(path, [SECRET]) is True
    assert path.read_bytes() == b"\xff\xfe raw\r\n***\r\nlast, without an end"
    assert path.stat().st_mode & 0o777 == 0o640
    assert list(tmp_path.iterdir()) == [path]


def test_file_without_secrets(tmp_path: Path) -> None:
    """A file without secrets is not touched."""
    path = tmp_path / "server.log"
    path.write_text("nothing to see\n")
    before = path.stat()
    assert redact_file(path, [SECRET]) is False
    assert path.stat() == before


@pytest.mark.parametrize("end", ["\n", "\r", " "])
@pytest.mark.parametrize("offset", range(-len(SECRET), 1, 4))
def test_secret_between_two_reads(tmp_path: Path, offset: int, end: str) -> None:
    """A secret is found wherever in a large file it lies."""
    path = tmp_path / "server.log"
    filler = ("x" * 63 + end) * (CHUNK_BYTES // 64)
    path.write_text(filler[: CHUNK_BYTES + offset - 1] + end + SECRET + end + filler)
    assert redact_file(path, [SECRET]) is True
    assert "secret" not in path.read_text()


def test_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy that cannot be finished leaves the log as it was and nothing beside it."""
    path = tmp_path / "server.log"
    path.write_text(SECRET)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="No space"):
        redact_file(path, [SECRET])
    assert list(tmp_path.iterdir()) == [path]
    assert path.read_text() == SECRET
