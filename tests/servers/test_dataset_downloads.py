"""Fetching the questions' data from real loopback servers: kind ones, rude ones and dead ones."""

from __future__ import annotations

import gzip
import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from harness.datasets import Network, Pin, Pins, fetch, load_gsm8k, verify
from harness.errors import DataUnavailable

DEADLINE = 60.0
"""Seconds until a test gives up on something that must happen; far beyond what a busy machine takes."""


def rows(count: int) -> bytes:
    """Write that many questions, one a line."""
    lines = (json.dumps({"question": f"What is {n} + 1?", "answer": f"#### {n + 1}"}) for n in range(count))
    return "".join(f"{line}\n" for line in lines).encode()


def pin_of(name: str, content: bytes) -> Pin:
    """Pin exactly this content."""
    return Pin(name=name, sha256=sha256(content).hexdigest(), size=len(content), rows=content.count(b"\n"))


TRAIN, TEST = rows(90), rows(30)
PINS = Pins(train=pin_of("train.jsonl", TRAIN), test=pin_of("test.jsonl", TEST))
CONTENTS = {"train.jsonl": TRAIN, "test.jsonl": TEST}


class Site(ThreadingHTTPServer):
    """A server whose manners are set by `answer`; it keeps what it was asked."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, answer: Callable[[Asked], None]) -> None:
        super().__init__(("127.0.0.1", 0), Asked)
        self.answer = answer
        self.gets: list[str] = []
        self.authorizations: list[str | None] = []
        self.half_sent = threading.Event()
        self.go_on = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/gsm8k"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Keep quiet about clients that hang up: here they are meant to."""


class Asked(BaseHTTPRequestHandler):
    """One request, answered as its site says."""

    server: Site

    def do_GET(self) -> None:
        self.server.gets.append(self.path)
        self.server.authorizations.append(self.headers["Authorization"])
        self.close_connection = True
        self.server.answer(self)

    def log_message(self, *args: object) -> None:
        """Leave stderr to the tests that read it."""

    @property
    def content(self) -> bytes:
        return CONTENTS[self.path.partition("?")[0].rpartition("/")[2]]

    def head(self, length: int | None = None, status: int = 200, kind: str = "text/plain") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        if length is not None:
            self.send_header("Content-Length", str(length))
        self.end_headers()


def good(asked: Asked) -> None:
    """Send the file."""
    asked.head(len(asked.content))
    asked.wfile.write(asked.content)


def good_when_told(asked: Asked) -> None:
    """Send the file once the test says so."""
    assert asked.server.go_on.wait(DEADLINE)
    good(asked)


def chunked(asked: Asked) -> None:
    """Send the file in chunks of unequal size, without a length."""
    asked.protocol_version = "HTTP/1.1"
    asked.send_response(200)
    asked.send_header("Transfer-Encoding", "chunked")
    asked.end_headers()
    for part in (asked.content[:7], asked.content[7:1000], asked.content[1000:]):
        asked.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))
    asked.wfile.write(b"0\r\n\r\n")


def gzipped(asked: Asked) -> None:
    """Send the file compressed, though it was asked for as it is."""
    packed = gzip.compress(asked.content)
    asked.send_response(200)
    asked.send_header("Content-Encoding", "gzip")
    asked.send_header("Content-Length", str(len(packed)))
    asked.end_headers()
    asked.wfile.write(packed)


def half_of_a_length(asked: Asked) -> None:
    """Promise the file, send half and hang up."""
    asked.head(len(asked.content))
    asked.wfile.write(asked.content[: len(asked.content) // 2])


def half_without_a_length(asked: Asked) -> None:
    """Send half and hang up as if that were all."""
    asked.head()
    asked.wfile.write(asked.content[: len(asked.content) // 2])


def half_in_chunks(asked: Asked) -> None:
    """Send one chunk of two and hang up before the last."""
    asked.protocol_version = "HTTP/1.1"
    asked.send_response(200)
    asked.send_header("Transfer-Encoding", "chunked")
    asked.end_headers()
    part = asked.content[: len(asked.content) // 2]
    asked.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))


def hang_up(asked: Asked) -> None:
    """Say nothing at all."""
    asked.connection.shutdown(socket.SHUT_RDWR)


def stall(asked: Asked) -> None:
    """Send half and then nothing, keeping the line open."""
    asked.head(len(asked.content))
    asked.wfile.write(asked.content[: len(asked.content) // 2])
    asked.server.half_sent.set()
    asked.server.go_on.wait(DEADLINE)


def trickle(asked: Asked) -> None:
    """Send a byte now and then, each well within the read timeout."""
    asked.head(len(asked.content))
    for byte in asked.content:
        asked.wfile.write(bytes([byte]))
        if asked.server.go_on.wait(0.02):
            return


def endless(asked: Asked) -> None:
    """Send more and more."""
    asked.head()
    while not asked.server.go_on.is_set():
        asked.wfile.write(asked.content * 100)


def web_page(asked: Asked) -> None:
    """Send a login page with status 200."""
    page = b"<!DOCTYPE html><title>Sign in</title>"
    asked.head(len(page), kind="text/html; charset=utf-8")
    asked.wfile.write(page)


def web_page_without_a_length(asked: Asked) -> None:
    """Send a login page with status 200 and no length."""
    asked.head(kind="text/html")
    asked.wfile.write(b"<!DOCTYPE html><title>Sign in</title>")


def altered(asked: Asked) -> None:
    """Send a file of the right length with one answer changed."""
    asked.head(len(asked.content))
    asked.wfile.write(asked.content.replace(b"#### 7", b"#### 8"))


def status(code: int) -> Callable[[Asked], None]:
    """Send an error page."""

    def answer(asked: Asked) -> None:
        asked.head(0, status=code)

    return answer


@contextmanager
def serving(answer: Callable[[Asked], None]) -> Iterator[Site]:
    """Run a site until the block ends."""
    with Site(answer) as site:
        thread = threading.Thread(target=site.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield site
        finally:
            site.go_on.set()
            site.shutdown()
            thread.join()


@contextmanager
def refusing() -> Iterator[str]:
    """Hold an address at which connections are refused."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # bound and not listening: nobody else can take the port
        yield f"http://127.0.0.1:{held.getsockname()[1]}/gsm8k"


def network(
    *sources: str,
    read_timeout: float = DEADLINE,
    file_timeout: float = DEADLINE,
    lock_timeout: float = DEADLINE,
) -> Network:
    """Name the sources and give everything ample time."""
    return Network(sources=sources, read_timeout=read_timeout, file_timeout=file_timeout, lock_timeout=lock_timeout)


def poll(condition: Callable[[], bool]) -> None:
    """Wait for something that must come."""
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.01)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give each test an empty cache, no proxies and no folder named by the environment."""
    for name in ("ACCURACY_GATE_DATA", "ACCURACY_GATE_DATA_URLS", "CI"):
        monkeypatch.delenv(name, raising=False)
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "accuracy-gate" / "gsm8k"


def names(folder: Path) -> set[str]:
    """Name the files of a folder, the lock left out."""
    return {path.name for path in folder.iterdir()} - {".lock"}


BOTH = {"train.jsonl", "test.jsonl"}


@pytest.mark.parametrize("answer", [good, chunked, gzipped], ids=lambda answer: answer.__name__)
def test_an_empty_cache_is_filled_once(cache: Path, answer: Callable[[Asked], None]) -> None:
    """The first load downloads both files and leaves nothing else; the second asks nobody."""
    with serving(answer) as site:
        first = load_gsm8k(pins=PINS, network=network(site.url))
        second = load_gsm8k(pins=PINS, network=network(site.url))
    assert site.gets == ["/gsm8k/train.jsonl", "/gsm8k/test.jsonl"]
    assert (len(first.train), len(first.test)) == (90, 30)
    assert first == second
    assert names(cache) == BOTH
    assert (cache / "train.jsonl").read_bytes() == TRAIN


def test_the_real_files_come_from_the_sources_the_environment_names(
    gsm8k_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ACCURACY_GATE_DATA_URLS replaces the public sources, in order; the built-in pins decide."""

    def real(asked: Asked) -> None:
        content = (gsm8k_dir / asked.path.rpartition("/")[2]).read_bytes()
        asked.head(len(content))
        asked.wfile.write(content)

    with serving(status(404)) as empty, serving(real) as site:
        monkeypatch.setenv("ACCURACY_GATE_DATA_URLS", f"{empty.url}/ {site.url}")
        data = load_gsm8k()
    assert (len(data.train), len(data.test)) == (7473, 1319)
    assert empty.gets == site.gets == ["/gsm8k/train.jsonl", "/gsm8k/test.jsonl"]


DAMAGE = {
    "truncated": TEST[:-1],
    "edited": TEST.replace(b"#### 7", b"#### 8"),
    "half-written": TEST[: len(TEST) // 2],
    "CRLF": TEST.replace(b"\n", b"\r\n"),
    "empty": b"",
}


@pytest.mark.parametrize("damaged", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_cache_is_fetched_again(cache: Path, damaged: bytes) -> None:
    """A cached file that does not meet its pin is replaced, and only that one is asked for."""
    cache.mkdir(parents=True)
    (cache / "train.jsonl").write_bytes(TRAIN)
    (cache / "test.jsonl").write_bytes(damaged)
    with serving(good) as site:
        data = load_gsm8k(pins=PINS, network=network(site.url))
    assert len(data.test) == 30
    assert site.gets == ["/gsm8k/test.jsonl"]
    assert [check.ok for check in verify(pins=PINS)] == [True, True]


def test_a_damaged_cache_that_cannot_be_fetched_is_never_used(cache: Path) -> None:
    """Without a source the damage is told together with the sources that failed."""
    cache.mkdir(parents=True)
    (cache / "train.jsonl").write_bytes(TRAIN[:-2])
    (cache / "test.jsonl").write_bytes(TEST)
    with serving(status(503)) as site, pytest.raises(DataUnavailable) as caught:
        load_gsm8k(pins=PINS, network=network(site.url))
    assert f"{cache / 'train.jsonl'}: {len(TRAIN) - 2} bytes instead of {len(TRAIN)}" in str(caught.value)
    assert f"{site.url}/train.jsonl: HTTP 503 Service Unavailable" in str(caught.value)


RUDE = {
    "hangs up half-way through a length": (half_of_a_length, r"IncompleteRead.* \(\d{4} of \d{4} bytes came\)"),
    "hangs up half-way without a length": (half_without_a_length, r"\d+ bytes instead of \d+, \d+ rows instead of 90"),
    "hangs up between chunks": (half_in_chunks, r"(IncompleteRead|InvalidChunkLength|ProtocolError).* bytes came\)"),
    "hangs up at once": (hang_up, r"RemoteDisconnected: .*\(0 of \d+ bytes came\)"),
    "a web page": (web_page, r"37 bytes offered instead of \d+, Content-Type text/html; charset=utf-8"),
    "a web page without a length": (web_page_without_a_length, r"37 bytes instead .* likely cause: it is a web page"),
    "an altered file": (altered, r"sha256 \w{64} instead of \w{64}\n"),
    "404": (status(404), r"HTTP 404 Not Found"),
    "500": (status(500), r"HTTP 500 Internal Server Error"),
    "204": (status(204), r"HTTP 204 No Content"),
    "an endless answer": (endless, r"more than \d+ bytes instead of \d+"),
}


@pytest.mark.parametrize(("answer", "reason"), RUDE.values(), ids=RUDE)
def test_a_source_that_fails_gives_way_to_the_next(cache: Path, answer: Callable[[Asked], None], reason: str) -> None:
    """Whatever is wrong with a source, the next one is asked; alone, it is named with its reason."""
    with serving(answer) as rude, serving(good) as kind:
        with pytest.raises(DataUnavailable) as caught:
            load_gsm8k(pins=PINS, network=network(rude.url))
        assert re.search(re.escape(f"{rude.url}/train.jsonl: ") + reason, str(caught.value)), caught.value
        assert names(cache) == set()
        data = load_gsm8k(pins=PINS, network=network(rude.url, kind.url))
    assert len(data.train) == 90
    assert kind.gets == ["/gsm8k/train.jsonl", "/gsm8k/test.jsonl"]
    assert names(cache) == BOTH


SLOW = {
    "silent half-way": (stall, {"read_timeout": 0.5}, r"ReadTimeoutError: .*\(\d+ of \d+ bytes came\)"),
    "a trickle": (trickle, {"file_timeout": 0.5}, r"not finished in 0\.5 s \(\d+ of \d+ bytes came\)"),
}


@pytest.mark.parametrize(("answer", "limits", "reason"), SLOW.values(), ids=SLOW)
def test_a_slow_source_gives_way_to_the_next(
    answer: Callable[[Asked], None], limits: dict[str, float], reason: str
) -> None:
    """A source that stalls, or sends so slowly that the file would not come in time, is left for the next."""
    with serving(answer) as slow, refusing() as dead, pytest.raises(DataUnavailable) as caught:
        load_gsm8k(pins=PINS, network=network(slow.url, dead, **limits))
    _, first, second, _ = str(caught.value).split("\n")
    assert re.match(re.escape(f"  {slow.url}/train.jsonl: ") + reason, first), first
    assert re.match(re.escape(f"  {dead}/train.jsonl: ") + ".*Connection refused", second), second


def test_offline_every_address_is_named_with_the_remedy(cache: Path) -> None:
    """With no source reachable the error lists each address, why it failed, and what to do instead."""
    with refusing() as first, refusing() as second, refusing() as third:
        sources = (first, second, third)
        with pytest.raises(DataUnavailable) as caught:
            load_gsm8k(pins=PINS, network=network(*sources))
    head, *reasons, remedy = str(caught.value).split("\n")
    assert head == f"{cache / 'train.jsonl'}: is missing; it could not be fetched from"
    for source, reason in zip(sources, reasons, strict=True):
        assert re.match(re.escape(f"  {source}/train.jsonl: ") + ".*Connection refused", reason), reason
    for way in ("accuracy-gate data fetch", "--data-dir", "ACCURACY_GATE_DATA", "train.jsonl and test.jsonl"):
        assert way in remedy


def test_secrets_in_an_address_are_sent_and_not_shown() -> None:
    """A mirror's password and signed query reach the mirror and no message."""
    with serving(status(403)) as site, refusing() as dead:
        sources = [f"{url.replace('//', '//ci:hunter2@')}?sig=topsecret" for url in (site.url, dead)]
        with pytest.raises(DataUnavailable) as caught:
            load_gsm8k(pins=PINS, network=network(*sources))
    assert site.gets == ["/gsm8k/train.jsonl?sig=topsecret"]
    assert site.authorizations == ["Basic Y2k6aHVudGVyMg=="]
    assert f"{site.url}/train.jsonl: HTTP 403" in str(caught.value)
    assert "Connection refused" in str(caught.value)
    assert not re.search("hunter2|topsecret", str(caught.value))


def test_loopback_addresses_bypass_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy set for the job is not asked for addresses on this machine."""
    with serving(status(502)) as proxy, serving(good) as site:
        for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.server_port}")
        load_gsm8k(pins=PINS, network=network(site.url.replace("127.0.0.1", "localhost")))
        fetch(force=True, pins=PINS, network=network(site.url))
    assert proxy.gets == []
    assert len(site.gets) == 4


def test_other_addresses_go_through_the_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where only the proxy reaches the world, the download goes through it."""
    with serving(good) as proxy:
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{proxy.server_port}")
        data = load_gsm8k(pins=PINS, network=network("http://gsm8k.invalid/data"))
    assert len(data.train) == 90
    assert proxy.gets == ["http://gsm8k.invalid/data/train.jsonl", "http://gsm8k.invalid/data/test.jsonl"]


def test_fetch_leaves_right_files_alone_unless_forced(cache: Path) -> None:
    """Fetching ahead of time downloads once, and everything again when forced."""
    paths = (cache / "train.jsonl", cache / "test.jsonl")
    with serving(good) as site:
        assert fetch(pins=PINS, network=network(site.url)) == paths
        assert fetch(pins=PINS, network=network(site.url)) == paths
        assert len(site.gets) == 2
        assert fetch(force=True, pins=PINS, network=network(site.url)) == paths
        assert len(site.gets) == 4
    assert names(cache) == BOTH


def test_a_forced_fetch_that_fails_keeps_what_is_right(cache: Path) -> None:
    """A file in the cache stays until its successor has been checked."""
    with serving(good) as site:
        fetch(pins=PINS, network=network(site.url))
    with (
        serving(half_of_a_length) as rude,
        pytest.raises(DataUnavailable, match=r"train\.jsonl: is right; it could not be fetched again from"),
    ):
        fetch(force=True, pins=PINS, network=network(rude.url))
    assert [check.ok for check in verify(pins=PINS)] == [True, True]
    assert names(cache) == BOTH


def test_a_cache_that_cannot_be_made_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the cache cannot be written, the folder, the system's reason and the way round are told."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    folder = tmp_path / "file" / "accuracy-gate" / "gsm8k"
    expected = re.escape(f"{folder}: the cache cannot be written: Not a directory; point XDG_CACHE_HOME at")
    with serving(good) as site, pytest.raises(DataUnavailable, match=expected):
        load_gsm8k(pins=PINS, network=network(site.url))
    assert site.gets == []


CHILD = """
import json, resource, signal, sys
from harness.datasets import Network, Pin, Pins, load_gsm8k

signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a shell is started deaf to it
order = json.loads(sys.argv[1])
if order["file_limit"]:
    resource.setrlimit(resource.RLIMIT_FSIZE, (order["file_limit"],) * 2)
pins = Pins(**{key: Pin(**pin) for key, pin in order["pins"].items()})
network = Network(**(order["network"] | {"sources": tuple(order["network"]["sources"])}))
print("ready", flush=True)
data = load_gsm8k(pins=pins, network=network)
print(len(data.train), len(data.test), flush=True)
"""


@contextmanager
def loading(reach: Network, *, file_limit: int = 0, stderr: int = subprocess.PIPE) -> Iterator[subprocess.Popen[str]]:
    """Run `load_gsm8k` in a process of its own, which is gone when the block ends."""
    order = {"pins": asdict(PINS), "network": asdict(reach), "file_limit": file_limit}
    command = [sys.executable, "-W", "error", "-c", CHILD, json.dumps(order)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True) as child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == "ready\n"
            yield child
        finally:
            child.kill()


def test_processes_that_start_together_download_once(cache: Path) -> None:
    """Eight processes with an empty cache make one download a file between them, and all get the rows."""
    with serving(good_when_told) as site, ExitStack() as stack:
        children = [stack.enter_context(loading(network(site.url))) for _ in range(8)]
        poll(lambda: bool(site.gets))
        site.go_on.set()
        ends = [child.communicate(timeout=DEADLINE) for child in children]
    assert ends == [("90 30\n", "")] * 8
    assert site.gets == ["/gsm8k/train.jsonl", "/gsm8k/test.jsonl"]
    assert names(cache) == BOTH


def test_waiting_for_another_process_ends_and_names_it(cache: Path) -> None:
    """The wait for a process that fetches into the same cache has a deadline, and says which process it is."""
    with serving(stall) as site, loading(network(site.url)) as child:
        assert site.half_sent.wait(DEADLINE)
        with pytest.raises(DataUnavailable, match=rf"\.lock: held for over 0\.2 s by process {child.pid} on "):
            load_gsm8k(pins=PINS, network=network(site.url, lock_timeout=0.2))
        assert len(site.gets) == 1


def test_an_interrupted_download_leaves_nothing(cache: Path) -> None:
    """Ctrl-C half-way leaves neither a half file under the final name nor a temporary one."""
    with serving(stall) as site, loading(network(site.url)) as child:
        assert site.half_sent.wait(DEADLINE)
        assert "train.jsonl.part" in names(cache)
        child.send_signal(signal.SIGINT)
        assert child.wait(DEADLINE) == -signal.SIGINT
    assert names(cache) == set()


def test_a_killed_download_does_not_stand_in_the_way(cache: Path) -> None:
    """What a killed process leaves is neither used nor kept, and its lock is free."""
    with serving(stall) as site, loading(network(site.url)) as child:
        assert site.half_sent.wait(DEADLINE)
        child.kill()
        child.wait(DEADLINE)
    assert "train.jsonl" not in names(cache)
    with serving(good) as site:
        assert len(load_gsm8k(pins=PINS, network=network(site.url)).train) == 90
    assert names(cache) == BOTH


def test_a_full_disk_is_not_blamed_on_the_source(cache: Path) -> None:
    """When writing fails the cache is named, no second source is asked, and nothing half-written stays."""
    with serving(good) as site, loading(network(site.url, site.url), file_limit=1000) as child:
        _, errors = child.communicate(timeout=DEADLINE)
    assert f"DataUnavailable: {cache}: the cache cannot be written: File too large" in errors
    assert len(site.gets) == 1
    assert names(cache) == set()


@pytest.mark.parametrize(("ci", "shown"), [("", True), ("true", False)], ids=["by hand", "in CI"])
def test_progress_is_shown_to_a_person_alone(monkeypatch: pytest.MonkeyPatch, ci: str, shown: bool) -> None:
    """On a terminal each file has its bar; a CI job's log stays clean even where it has a terminal."""
    monkeypatch.setenv("CI", ci)
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 80))
    try:
        with serving(good) as site, loading(network(site.url), stderr=theirs) as child:
            assert child.communicate(timeout=DEADLINE)[0] == "90 30\n"
        os.set_blocking(ours, False)
        try:
            seen = os.read(ours, 100_000).decode()
        except BlockingIOError:
            seen = ""
    finally:
        os.close(ours)
        os.close(theirs)
    assert bool(re.search(r"train\.jsonl: +\d+%.*test\.jsonl: +\d+%", seen, re.DOTALL)) is shown
    assert bool(seen) is shown
