"""The cache checks against a recording server with vLLM's endpoints, counters and KV events."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from harness.config import load_config_file
from harness.config_lists import listed
from harness.errors import Position
from harness.pipeline import evaluate
from harness.records import EvalResult, RunRecord, read_samples
from harness.reports.terminal import LiveLine
from harness.servers import cache_control
from harness.servers.kv_events import DEFAULT_ENDPOINT, blocks_stored_outside, event_addresses
from harness.servers.vllm import environment
from harness.serving import RunOptions

msgspec = pytest.importorskip("msgspec")
zmq = pytest.importorskip("zmq")

SMOKE = Path(__file__).resolve().parents[2] / "harness/tasks/data/smoke.jsonl"
GOLD = {row["question"]: row["answer"] for row in map(json.loads, SMOKE.read_text().splitlines())}
TOKENS = 100
"""What the server counts for each question."""


@dataclass
class CachingServer:
    """A GPU cache, an external one that takes a block over at the step after the next, and all that was asked."""

    offloads: bool = True
    counts: bool = True
    development: bool = True
    answer: Callable[[int, str], str] = lambda visit, gold: gold
    """From how often the question was asked before, and the right answer."""
    array_events: bool = False
    publisher: Any = None
    base_url: str = ""
    log: list[str] = field(default_factory=list)
    visits: dict[str, int] = field(default_factory=dict)
    gpu: set[str] = field(default_factory=set)
    external: set[str] = field(default_factory=set)
    pending: list[str] = field(default_factory=list)
    counters: dict[str, int] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, **more: int) -> None:
        for name, value in more.items():
            self.counters[name] = self.counters.get(name, 0) + value

    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        self.step()
        self.count(request_success=1)
        if body["max_tokens"] == 1:
            self.log.append("step")
            return {"choices": [{"text": "", "finish_reason": "length"}], "usage": {"completion_tokens": 1}}
        prompt = body["prompt"]
        question = prompt.rsplit("Question: ", 1)[1].removesuffix("\nAnswer:")
        self.log.append("question")
        self.count(prefix_cache_queries=TOKENS, prefix_cache_hits=TOKENS * (question in self.gpu))
        if question not in self.gpu:
            hit = TOKENS * (question in self.external)
            self.count(external_prefix_cache_queries=TOKENS, external_prefix_cache_hits=hit)
            self.gpu.add(question)
            self.pending += [question] if self.offloads else []
        visit = self.visits[question] = self.visits.get(question, -1) + 1
        text = self.answer(visit, GOLD[question])
        return {"choices": [{"text": f" {text}", "finish_reason": "stop"}], "usage": {"completion_tokens": 3}}

    def step(self) -> None:
        """Hand the oldest block over and publish it, as the engine does at its next step."""
        if not self.pending:
            return
        self.external.add(self.pending.pop(0))
        event: Any = {"type": "BlockStored", "block_hashes": [1], "token_ids": [], "medium": "CPU"}
        if self.array_events:
            event = ["BlockStored", [1], None, [], 16, None, "CPU"]
        if self.publisher is not None:
            batch = [0.5, [{"type": "BlockStored", "block_hashes": [1], "medium": "GPU"}, event], 0]
            self.publisher.send_multipart([b"kv", bytes(8), msgspec.msgpack.encode(batch)])

    def reset(self, query: str) -> dict[str, Any]:
        asked = parse_qs(query)
        self.log.append("reset" if not self.pending else "reset refused")
        if self.pending:
            return {"success": False}
        self.gpu.clear()
        if asked.get("reset_external") != ["false"]:
            self.external.clear()
        return {"success": True}

    def metrics(self) -> str:
        zero = {"external_prefix_cache_queries": 0, "external_prefix_cache_hits": 0} if self.counts else {}
        shown = {n: v for n, v in (zero | self.counters).items() if self.counts or not n.startswith("external")}
        return "".join(f'vllm:{name}_total{{engine="0"}} {value}\n' for name, value in (shown or {"x": 0}).items())


@contextmanager
def serving(server: CachingServer) -> Iterator[CachingServer]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            known: dict[str, Any] = {"/version": {"version": "9.9"}, "/v1/models": {"data": [{"id": "m"}]}}
            if self.path == "/metrics":
                self.send(server.metrics())
            else:
                self.send(known.get(self.path))

        def do_POST(self) -> None:
            raw = self.rfile.read(int(self.headers["Content-Length"] or 0))
            address = urlsplit(self.path)
            with server.lock:
                if address.path == "/v1/completions":
                    self.send(server.complete(json.loads(raw)))
                elif address.path == "/reset_prefix_cache" and server.development:
                    self.send(server.reset(address.query))
                else:
                    self.send(None)

        def send(self, body: dict[str, Any] | str | None) -> None:
            data = body.encode() if isinstance(body, str) else json.dumps(body or {}).encode()
            self.send_response(404 if body is None else 200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None: ...

    class Threaded(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 128

    http = Threaded(("127.0.0.1", 0), Handler)
    server.base_url = f"http://127.0.0.1:{http.server_port}"
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server
    finally:
        http.shutdown()
        http.server_close()
        thread.join()


def check(folder: Path, server: CachingServer, more: str) -> EvalResult:
    """Run one config with four questions at once against the server."""
    path = folder / "config.yaml"
    written = "model_name: m\ntask: smoke\naccuracy_threshold: 0.9\ntolerance: 0.0\nmax_concurrency: 4\n"
    path.write_text(written + more)
    (entry,) = listed("config", load_config_file(path), Position(path=path))
    with serving(server):
        record = RunRecord(folder / "results").config("config")
        return evaluate(entry, record, RunOptions(base_url=server.base_url), LiveLine("config"))


def indices(folder: Path, name: str) -> list[int]:
    return sorted(sample["index"] for sample in read_samples(folder / "results/config" / name))


@pytest.fixture(autouse=True)
def _short_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing tells of stores a second will do."""
    monkeypatch.setattr(cache_control, "SILENT_STEPS", 6)


PREFIX = "prefix_cache_check: true\n"
OFFLOAD = "kv_offload_check: true\n"


def gate_of(result: EvalResult, name: str) -> Any:
    return next(gate for gate in result.gates if gate.name == name)


def test_without_a_check_questions_are_asked_once(tmp_path: Path) -> None:
    """A config that asks for no check has one pass and one file of samples."""
    server = CachingServer()
    result = check(tmp_path, server, "")
    assert (result.verdict, server.log) == ("pass", ["question"] * 20)
    assert [path.name for path in (tmp_path / "results/config").glob("samples*")] == ["samples.jsonl"]


def test_a_warm_prefix_cache_answers_as_a_cold_one(tmp_path: Path) -> None:
    """Every question is asked again and hit in the cache; both passes are recorded and held to the floor."""
    server = CachingServer()
    result = check(tmp_path, server, PREFIX)
    assert result.verdict == "pass", result.reason
    assert server.log == ["question"] * 40
    assert indices(tmp_path, "samples.jsonl") == indices(tmp_path, "samples-2.jsonl") == list(range(20))
    assert [gate.name for gate in result.gates] == [
        *("errors", "accuracy", "errors, pass 2", "accuracy, pass 2", "prefix cache")
    ]
    assert "0 of 20 answers differ" in gate_of(result, "prefix cache").message
    assert "2000 of 2000 prompt tokens" in gate_of(result, "prefix cache").message
    assert result.counts.asked == 20


def test_a_cache_that_changes_answers_is_a_regression(tmp_path: Path) -> None:
    """Five wrong answers of 20 that were right when the cache was cold: the questions are named, and the floor too."""
    spoilt = list(GOLD.values())[:5]
    server = CachingServer(answer=lambda visit, gold: "999983" if visit and gold in spoilt else gold)
    result = check(tmp_path, server, PREFIX)
    assert result.verdict == "regression"
    assert gate_of(result, "accuracy").verdict == "pass"
    assert gate_of(result, "accuracy, pass 2").verdict == "regression"
    assert gate_of(result, "prefix cache").verdict == "regression"
    assert "questions 0, 1, 2, 3, 4" in result.reason


def test_a_void_first_pass_is_not_repeated(tmp_path: Path) -> None:
    """Where a request of the first pass failed nothing can be said, so the server is not asked again."""
    server = CachingServer()
    failed = list(GOLD)[3]
    server.complete, answer = (
        (lambda body: {} if body["prompt"].endswith(failed + "\nAnswer:") else answer(body)),
        (  # type: ignore[method-assign]
            server.complete
        ),
    )
    result = check(tmp_path, server, PREFIX)
    assert result.verdict == "infrastructure"
    assert server.log == ["question"] * 19


def test_offloaded_blocks_are_awaited_and_used(tmp_path: Path) -> None:
    """The GPU's cache is dropped once all was offloaded, the external one is kept and hit by every question."""
    server = CachingServer()
    result = check(tmp_path, server, OFFLOAD)
    assert result.verdict == "pass", result.reason
    assert server.log[:20] == server.log[-20:] == ["question"] * 20
    assert set(server.log[20:-20]) == {"step", "reset"}
    assert server.log.count("reset") == 1
    assert server.counters["external_prefix_cache_hits"] == 20 * TOKENS
    assert indices(tmp_path, "samples-2.jsonl") == list(range(20))
    assert "2000 of 2000 prompt tokens" in gate_of(result, "KV offload").message


def test_a_reset_refused_while_blocks_are_held_is_tried_again(tmp_path: Path) -> None:
    """A transfer under way holds blocks: the engine is stepped until the server lets go of them."""
    server = CachingServer()
    server.pending = [f"earlier {n}" for n in range(12)]
    result = check(tmp_path, server, OFFLOAD)
    assert result.verdict == "pass", result.reason
    assert "reset refused" in server.log
    assert server.log.count("reset") == 1


@pytest.mark.parametrize("array_events", [False, True], ids=["events are maps", "events are arrays"])
def test_kv_events_tell_when_all_is_offloaded(tmp_path: Path, array_events: bool) -> None:
    """The blocks stored outside the GPU are counted from before the first question on, and are in the message."""
    with zmq.Context() as context, context.socket(zmq.PUB) as publisher:
        publisher.linger = 0
        port = publisher.bind_to_random_port("tcp://127.0.0.1")
        server = CachingServer(publisher=publisher, array_events=array_events)
        events = json.dumps({"enable_kv_cache_events": True, "endpoint": f"tcp://*:{port}", "topic": "kv"})
        result = check(tmp_path, server, f"{OFFLOAD}server_args: >-\n  --kv-events-config '{events}'\n")
    assert result.verdict == "pass", result.reason
    assert "KV events told of 20 blocks" in gate_of(result, "KV offload").message


def test_an_offload_that_never_happens_is_a_regression(tmp_path: Path) -> None:
    """The external cache was asked for every prompt again and knew none."""
    result = check(tmp_path, CachingServer(offloads=False), OFFLOAD)
    assert result.verdict == "regression"
    assert "0 of 2000 prompt tokens found in it" in result.reason
    assert "no KV events are published" in result.reason


def test_answers_from_the_offloaded_cache_are_held_to_the_floor(tmp_path: Path) -> None:
    """Blocks that come back damaged show in the second pass alone."""
    server = CachingServer(answer=lambda visit, gold: "999983" if visit else gold)
    result = check(tmp_path, server, OFFLOAD)
    assert result.verdict == "regression"
    assert "pass 2: accuracy 0.0000 (0 of 20" in result.reason


OUTAGES = {
    "no development mode": ({"development": False}, OFFLOAD, "VLLM_SERVER_DEV_MODE"),
    "no external counters": ({"counts": False}, OFFLOAD, "vllm:external_prefix_cache_hits_total"),
}


@pytest.mark.parametrize(("trait", "more", "says"), OUTAGES.values(), ids=OUTAGES)
def test_a_check_that_cannot_be_made_is_an_outage(tmp_path: Path, trait: dict[str, bool], more: str, says: str) -> None:
    """The remedy is named, and what the first pass measured is kept."""
    result = check(tmp_path, CachingServer(**trait), more)
    assert result.verdict == "infrastructure"
    assert says in result.reason
    assert result.counts.correct == 20


def test_both_checks_are_three_passes(tmp_path: Path) -> None:
    """The warm pass comes before the cache is dropped; each pass has its file."""
    result = check(tmp_path, CachingServer(), PREFIX + OFFLOAD)
    assert result.verdict == "pass", result.reason
    assert indices(tmp_path, "samples-3.jsonl") == list(range(20))
    assert [gate.name for gate in result.gates][-2:] == ["prefix cache", "KV offload"]


def test_the_server_is_started_in_development_mode(tmp_path: Path) -> None:
    """`/reset_prefix_cache` is there only then; the config's own word outweighs ours."""
    path = tmp_path / "config.yaml"
    path.write_text("model_name: m\naccuracy_threshold: 0.5\nkv_offload_check: true\n")
    assert environment(load_config_file(path).config, {}, "key", 1)["VLLM_SERVER_DEV_MODE"] == "1"
    path.write_text("model_name: m\naccuracy_threshold: 0.5\n")
    assert "VLLM_SERVER_DEV_MODE" not in environment(load_config_file(path).config, {}, "key", 1)


ADDRESSES = {
    "wildcard": ({"endpoint": "tcp://*:7000"}, ("tcp://h:7000", "tcp://h:7001"), False),
    "default": ({}, (f"tcp://h:{DEFAULT_ENDPOINT[-4:]}", "tcp://h:5558"), False),
    "the engine connects": ({"endpoint": "tcp://10.0.0.1:7000"}, ("tcp://10.0.0.1:7000", "tcp://10.0.0.1:7001"), True),
    "ipc": ({"endpoint": "ipc:///tmp/kv"}, ("ipc:///tmp/kv",), False),
    "any port": ({"endpoint": "tcp://*:0"}, (), False),
    "in the process": ({"endpoint": "inproc://cache"}, (), False),
    "switched off": ({"enable_kv_cache_events": False}, (), False),
    "no publisher": ({"publisher": "null"}, (), False),
}


@pytest.mark.parametrize(("said", "addresses", "bind"), ADDRESSES.values(), ids=ADDRESSES)
def test_where_events_are_published(said: dict[str, Any], addresses: tuple[str, ...], bind: bool) -> None:
    """As vLLM reads its own setting: two data-parallel ranks publish on neighbouring ports."""
    found = event_addresses(json.dumps({"enable_kv_cache_events": True, **said}), host="h", ranks=2)
    assert (tuple(found.addresses), found.bind) == (addresses, bind)


FOREIGN = {"no batch": 7, "no events": [0.5], "unknown event": [0.5, ["AllBlocksCleared", {}], 0], "empty": [0.5, []]}


@pytest.mark.parametrize("batch", FOREIGN.values(), ids=FOREIGN)
def test_other_events_are_no_stores(batch: Any) -> None:
    """Whatever else is published counts for nothing and breaks nothing."""
    assert blocks_stored_outside(batch) == 0
