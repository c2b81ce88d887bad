"""A real OpenAI-compatible server on loopback whose every reply a test decides."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """One HTTP reply; `cut` closes the connection after so many bytes, `drip` waits so many seconds between bytes."""

    body: bytes | str | dict[str, Any] = b""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    delay: float = 0.0
    cut: int | None = None
    drip: float | None = None

    def encoded(self) -> bytes:
        if isinstance(self.body, dict):
            return json.dumps(self.body).encode()
        return self.body.encode() if isinstance(self.body, str) else self.body


def completion(text: str, finish_reason: str = "stop", tokens: int = 7) -> Reply:
    usage = {"prompt_tokens": 11, "completion_tokens": tokens}
    return Reply(body={"choices": [{"text": text, "finish_reason": finish_reason}], "usage": usage})


Script = Callable[[dict[str, Any], int], Reply]
"""From a request's body and its number, from 0, to the reply."""


@dataclass
class LoopbackServer:
    """What a test sees of the server: its address and all that was asked."""

    base_url: str
    requests: list[dict[str, Any]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    raw: list[bytes] = field(default_factory=list)


@contextmanager
def loopback_server(
    script: Script,
    *,
    model: str = "m",
    port: int = 0,
    health: int = 200,
    metrics: Callable[[int], Reply] = lambda asked: Reply(body="", status=404),
    models: Reply | None = None,
    posts: Mapping[str, Reply | Callable[[dict[str, Any]], Reply]] = MappingProxyType({}),
    gets: Mapping[str, Reply] = MappingProxyType({}),
) -> Iterator[LoopbackServer]:
    """Serve until the block is left; `metrics` gets the number of questions asked so far.

    `posts` and `gets` are other paths; a post may be answered by its body.
    """
    seen = LoopbackServer(base_url="")
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            usual = {
                "/health": Reply(status=health),
                "/version": Reply(body={"version": "9.9"}),
                "/v1/models": models or Reply(body={"data": [{"id": model, "max_model_len": 4096}]}),
            }
            counted = self.path == "/metrics"
            self.send(metrics(len(seen.requests)) if counted else {**usual, **gets}.get(self.path, Reply(status=404)))

        def do_POST(self) -> None:
            raw = self.rfile.read(int(self.headers["Content-Length"]))
            if not self.path.startswith("/v1/"):
                other = posts.get(self.path, Reply(status=404))
                self.send(other if isinstance(other, Reply) else other(json.loads(raw)))
                return
            with lock:
                number = len(seen.requests)
                seen.requests.append(json.loads(raw))
                seen.raw.append(raw)
                seen.paths.append(self.path)
                seen.headers.append(dict(self.headers))
            self.send(script(json.loads(raw), number))

        def send(self, reply: Reply) -> None:
            time.sleep(reply.delay)
            body = reply.encoded()
            try:
                self.send_response(reply.status)
                for name, value in {"Content-Length": str(len(body)), **reply.headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                for piece in [body[: reply.cut]] if reply.drip is None else [body[i : i + 1] for i in range(len(body))]:
                    self.wfile.write(piece)
                    time.sleep(reply.drip or 0.0)
            except ConnectionError:
                self.close_connection = True
            if reply.cut is not None:
                self.close_connection = True

        def log_message(self, format: str, *args: object) -> None: ...

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 512

    server = Server(("127.0.0.1", port), Handler)
    seen.base_url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield seen
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
