"""A small server that answers as an OpenAI-compatible one does, and misbehaves as told on its command line."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

SLEEPER = "import signal, time\nfor number in (2, 15):\n    signal.signal(number, signal.SIG_IGN)\ntime.sleep(3600)"
TITLED = "import setproctitle, time\nsetproctitle.setproctitle('VLLM::EngineCore' + 99 * '_')\ntime.sleep(3600)"


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--key", default=None)
    parser.add_argument("--health", type=int, default=200, help="what /health answers")
    parser.add_argument("--drip", action="store_true", help="/v1/models answers a byte now and then, for ever")
    parser.add_argument("--print", default="", help="printed first")
    parser.add_argument("--flood", type=int, default=0, help="MiB printed before listening")
    parser.add_argument("--exit", type=int, default=None, help="end at once with this code")
    parser.add_argument("--raise", dest="error", default=None, help="end at once with a traceback and code 3")
    parser.add_argument("--die-by", type=int, default=None, help="end at once by this signal")
    parser.add_argument("--silent", action="store_true", help="never listen")
    parser.add_argument("--stubborn", action="store_true", help="ignore SIGINT and SIGTERM")
    parser.add_argument("--worker", default=None, help="start a worker in this process group; its pid goes to the file")
    parser.add_argument("--titled", action="store_true", help="the worker renames itself with setproctitle")
    parser.add_argument("--escaped", default=None, help="start a stubborn grandchild in a session of its own")
    parser.add_argument("--shared", default=None, help="hold shared memory; its name goes to the file")
    return parser.parse_args()


def main() -> None:
    asked = options()
    if asked.stubborn:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.stdout.write(asked.print + "\n")
    sys.stdout.flush()
    start_others(asked)
    end_at_once(asked)
    if asked.shared:
        memory = SharedMemory(create=True, size=1)
        Path(asked.shared).write_text(memory.name)
    for _ in range(asked.flood):
        sys.stdout.write(("x" * 127 + "\n") * 8192)
    sys.stdout.flush()
    if asked.silent:
        time.sleep(3600)
    server = ThreadingHTTPServer(("127.0.0.1", asked.port), handler(asked))
    server.daemon_threads = True
    server.serve_forever(poll_interval=0.05)


def start_others(asked: argparse.Namespace) -> None:
    if asked.worker:
        worker = subprocess.Popen([sys.executable, "-c", TITLED if asked.titled else SLEEPER])
        write_pid(Path(asked.worker), worker.pid)
    if asked.escaped and os.fork() == 0:
        escaped = subprocess.Popen([sys.executable, "-c", SLEEPER], start_new_session=True)
        write_pid(Path(asked.escaped), escaped.pid)
        os._exit(0)


def write_pid(path: Path, pid: int) -> None:
    scratch = path.with_suffix(".new")
    scratch.write_text(str(pid))
    scratch.rename(path)


def end_at_once(asked: argparse.Namespace) -> None:
    if asked.error is not None:
        try:
            raise RuntimeError(asked.error)
        except RuntimeError:
            sys.excepthook(*sys.exc_info())
            sys.exit(3)
    if asked.exit is not None:
        sys.exit(asked.exit)
    if asked.die_by is not None:
        os.kill(os.getpid(), asked.die_by)


def handler(asked: argparse.Namespace) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/health":
                self.answer(asked.health, {})
            elif asked.drip:
                self.drip()
            elif asked.key and self.headers["Authorization"] != f"Bearer {asked.key}":
                self.answer(401, {"error": "Unauthorized"})
            else:
                self.answer(200, {"object": "list", "data": [{"id": asked.model}]})

        def drip(self) -> None:
            self.send_response(200)
            self.end_headers()
            while True:
                self.wfile.write(b".")
                time.sleep(0.05)

        def answer(self, status: int, body: dict[str, Any]) -> None:
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            return

    return Handler


if __name__ == "__main__":
    main()
