"""A small server that answers as SGLang 0.5.16 was recorded to, its oddities included, from a toy model.

The model knows words: token n is the word `w<n>`, and how likely one is after another is a formula. It is run as
`sglang.launch_server` is, or started in a test's own process with `replay`.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

CONTEXT = 64
LONGEST = CONTEXT - 7
"""Tokens of a prompt, however short the reply."""
VERSION = "0.5.16"
NOT_FOUND: dict[str, Any] = {"detail": "Not Found"}


def logprob(before: int, token: int) -> float:
    """How likely a token is after another: the toy model's only rule."""
    return -0.25 if token == likeliest(before) else -1.0 - ((before * 7 + token * 3) % 11) / 4


def likeliest(before: int) -> int:
    return (before * 5 + 1) % 40


def tokens_of(prompt: str | list[int]) -> list[int]:
    if not isinstance(prompt, str):
        return prompt
    return [int(word[1:]) if word[1:].isdecimal() else len(word) for word in prompt.split()]


def text_of(tokens: list[int]) -> str:
    return "".join(f" w{token}" for token in tokens)


@dataclass(kw_only=True)
class Replay:
    """One server's state, and what a test may read or spoil of it."""

    model: str = "toy"
    key: str | None = None
    ignored: frozenset[str] = frozenset()
    """Native settings that this server does not know."""
    unhealthy: int = 0
    """So many polls of /health answer 503, as while the model is loaded."""
    silent: int = 0
    """And so many of /health_generate once it is."""
    busy: int = 0
    """So many /flush_cache are refused."""
    asked: list[tuple[str, Any]] = field(default_factory=list)
    prompt_tokens: int = 0
    generated: int = 0
    finished: int = 0
    cached: int = 0
    seen: set[tuple[int, ...]] = field(default_factory=set)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def get(self, path: str) -> tuple[int, Any]:
        match path:
            case "/health":
                self.unhealthy -= 1
                return (503 if self.unhealthy >= 0 else 200), ""
            case "/health_generate":
                self.silent -= 1
                return (503 if self.silent >= 0 else 200), ""
            case "/v1/models":
                card = {"id": self.model, "object": "model", "owned_by": "sglang", "root": self.model, "parent": None}
                return 200, {"object": "list", "data": [{**card, "max_model_len": CONTEXT}]}
            case "/server_info":
                told = {"model_path": self.model, "dtype": "auto", "context_length": None, "quantization": None}
                return 200, {**told, "api_key": self.key, "random_seed": 1, "version": VERSION}
            case "/metrics":
                return 200, self.metrics()
        return 404, NOT_FOUND

    def post(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        with self.lock:
            self.asked.append((path, body))
            match path:
                case "/v1/completions" | "/v1/chat/completions":
                    return self.openai(body, chat=path.endswith("chat/completions"))
                case "/generate":
                    return self.native(body)
                case "/flush_cache":
                    self.busy -= 1
                    self.seen.clear()
                    return (400 if self.busy >= 0 else 200), "Cache flushed.\nNot while requests are under way.\n"
        return 404, NOT_FOUND

    def openai(self, body: dict[str, Any], *, chat: bool) -> tuple[int, Any]:
        limit = body.get("max_tokens", 16)
        if limit <= 0:
            return 400, error("max_tokens must be positive", "Bad Request")
        text = " ".join(turn["content"] for turn in body["messages"]) if chat else body["prompt"]
        sent = tokens_of(text)
        if len(sent) + limit > CONTEXT:
            wanted = len(sent) + limit
            return 400, error(f"{wanted} tokens are more than the context length of {CONTEXT}", "BadRequestError")
        written = self.generate(sent, limit)
        choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": "length", "matched_stop": None}
        if chat:
            message = {"role": "assistant", "content": text_of(written), "reasoning_content": None, "tool_calls": None}
            choice |= {"message": message}
        else:
            choice |= {"text": text_of(written)}
        usage = {"prompt_tokens": len(sent), "completion_tokens": len(written), "total_tokens": len(sent + written)}
        # Any model's name is accepted, and `prompt_logprobs` is not looked at.
        return 200, {"model": body.get("model", "default"), "choices": [choice], "usage": usage}

    def native(self, body: dict[str, Any]) -> tuple[int, Any]:
        body = {name: value for name, value in body.items() if name not in self.ignored}
        limit = body["sampling_params"]["max_new_tokens"]
        given = body.get("input_ids") or [tokens_of(body["text"])]
        longest = max(map(len, given))
        if longest > LONGEST or longest + limit > CONTEXT:
            return 400, {"error": {"message": f"{longest} tokens are more than the context length of {CONTEXT}"}}
        replies = [self.native_one(sent, limit, body) for sent in given]
        return 200, replies if "input_ids" in body else replies[0]

    def native_one(self, sent: list[int], limit: int, body: dict[str, Any]) -> dict[str, Any]:
        written = self.generate(sent, limit)
        about: dict[str, Any] = {
            "id": "0",
            "finish_reason": {"type": "length", "length": limit},
            "prompt_tokens": len(sent),
            "completion_tokens": len(written),
            "cached_tokens": 0,
        }
        if body.get("return_logprob"):
            start = body.get("logprob_start_len", len(sent) - 1)
            pairs = list(zip([None, *sent[:-1]], sent, strict=True))[start:]
            about["input_token_logprobs"] = [[None if b is None else logprob(b, t), t, None] for b, t in pairs]
            if body.get("top_logprobs_num"):
                best = [None if b is None else [[-0.25, likeliest(b), None]] for b, _ in pairs]
                about["input_top_logprobs"] = best
        return {"text": text_of(written), "output_ids": written, "meta_info": about}

    def generate(self, sent: list[int], limit: int) -> list[int]:
        written: list[int] = []
        for _ in range(limit):
            written.append(likeliest((sent + written)[-1]))
        self.finished += 1
        self.prompt_tokens += len(sent)
        self.generated += limit
        self.cached += len(sent) if tuple(sent) in self.seen else 0
        self.seen.add(tuple(sent))
        return written

    def metrics(self) -> str:
        labels = f'engine_type="unified",model_name="{self.model}"'
        lines = [
            "# TYPE sglang:spec_accept_length gauge",
            f'sglang:spec_accept_length{{{labels},tp_rank="0"}} 0.0',
            "# TYPE sglang:fwd_occupancy gauge",
            f'sglang:fwd_occupancy{{{labels},tp_rank="0"}} NaN',
            "# TYPE sglang:token_usage gauge",
            f'sglang:token_usage{{{labels},tp_rank="0"}} 0.25',
            "# TYPE sglang:prompt_tokens_total counter",
            f"sglang:prompt_tokens_total{{{labels}}} {float(self.prompt_tokens)}",
            "# TYPE sglang:generation_tokens_total counter",
            f"sglang:generation_tokens_total{{{labels}}} {float(self.generated)}",
            "# TYPE sglang:num_requests_total counter",
            f"sglang:num_requests_total{{{labels}}} {float(self.finished)}",
        ]
        if self.cached:
            lines.append("# TYPE sglang:cached_tokens_total counter")
            lines.append(f'sglang:cached_tokens_total{{cache_source="device",{labels}}} {float(self.cached)}')
        return "\n".join(lines) + "\n"


def error(message: str, kind: str) -> dict[str, Any]:
    return {"object": "error", "message": message, "type": kind, "param": None, "code": 400}


def handler(replay: Replay) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.answer(*(replay.get(self.path) if self.allowed() else (401, {"error": "Unauthorized"})))

        def do_POST(self) -> None:
            raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            body = json.loads(raw) if raw else {}
            self.answer(*(replay.post(self.path, body) if self.allowed() else (401, {"error": "Unauthorized"})))

        def allowed(self) -> bool:
            free = self.path.startswith(("/health", "/metrics"))
            return free or not replay.key or self.headers["Authorization"] == f"Bearer {replay.key}"

        def answer(self, status: int, body: Any) -> None:
            data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            return

    return Handler


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 512


@contextmanager
def replay(**spoiled: Any) -> Iterator[tuple[str, Replay]]:
    """Serve until the block is left; give the address and what the server saw."""
    state = Replay(**spoiled)
    server = Server(("127.0.0.1", 0), handler(state))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", state
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model-path", required=True)
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--api-key")
    parser.add_argument("--served-model-name")
    parser.add_argument("--nccl-port", type=int)
    parser.add_argument("--enable-metrics", action="store_true")
    parser.add_argument("--trust-remote-code", action="store_true")
    parser.add_argument("--random-seed", type=int, help="here: polls of /health that answer 503")
    parser.add_argument("--stream-interval", type=int, default=0, help="here: polls of /health_generate likewise")
    told = parser.parse_args()
    # As SGLang does, which shows whatever it was told.
    sys.stdout.write(f"server_args=ServerArgs(model_path={told.model_path!r}, api_key={told.api_key!r})\n")
    sys.stdout.flush()
    state = Replay(
        model=told.served_model_name or told.model_path,
        key=told.api_key,
        unhealthy=told.random_seed or 0,
        silent=told.stream_interval,
    )
    Server((told.host, told.port), handler(state)).serve_forever(poll_interval=0.05)


if __name__ == "__main__":
    main()
