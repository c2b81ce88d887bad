"""A stand-in for an installed vLLM whose imports, start and answers take stated times and whose GPUs are locked files.

`install` writes a package named `vllm` and an `nvidia-smi`; the `vllm` command of this environment then runs `serve`.
The server's engine is a process of its own, as with vLLM, and refuses a GPU on which another engine is.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
SMOKE = HERE.parent / "harness/tasks/data/smoke.jsonl"
FOLDER, ANSWERS, ENGINE, OWNER = "STANDIN_FOLDER", "STANDIN_ANSWERS", "STANDIN_ENGINE", "STANDIN_OWNER"
WRONG = "wrong"
"""A model whose name holds this answers every question wrongly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Seconds."""

    imports: float
    engine: float
    """From the engine's start, GPU in hand, until it is ready."""
    answers: float
    """For each question; all are asked at once."""

    @property
    def on_gpu(self) -> float:
        return self.engine + self.answers


def install(folder: Path, times: Times, gpus: int) -> dict[str, str]:
    """Write the package and the tool, and return the environment in which they stand for the real ones."""
    cli = folder / "site/vllm/entrypoints/cli"
    cli.mkdir(parents=True)
    (folder / "gpus").mkdir()
    for package in (cli, cli.parent):
        (package / "__init__.py").touch()
    (folder / "site/vllm/__init__.py").write_text(f"import time\ntime.sleep({times.imports})\n")
    (cli / "main.py").write_text("from standin_server import serve as main\n")
    (cli / "serve.py").touch()
    # Without it the harness sees the CPU build of vLLM, where one is installed, and counts no GPUs.
    distribution = folder / "site/vllm-0.0.dist-info"
    distribution.mkdir()
    (distribution / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.0\n")
    rows = "".join(f"{n}, GPU-{n}{n}{n}{n}, 81559, 9.0, Disabled, Stand-in\n" for n in range(gpus))
    tool = folder / "tools/nvidia-smi"
    tool.parent.mkdir()
    tool.write_text(f"#!/bin/sh\ncat <<'END'\n{rows}END\n")
    tool.chmod(0o755)
    env = {name: value for name, value in os.environ.items() if not name.startswith(("CUDA_", "PYTEST_"))}
    return {
        **env,
        "PATH": f"{tool.parent}{os.pathsep}{env['PATH']}",
        "PYTHONPATH": os.pathsep.join(map(str, (folder / "site", HERE, HERE.parent))),
        FOLDER: str(folder),
        ENGINE: str(times.engine),
        ANSWERS: str(times.answers),
    }


def serve() -> None:
    """Be `vllm serve MODEL … --port PORT`."""
    model, port = sys.argv[2], int(sys.argv[sys.argv.index("--port") + 1])
    engine = subprocess.Popen([sys.executable, "-S", __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert engine.stdout is not None
    if engine.stdout.readline() != b"ready\n":
        sys.exit(engine.wait() or 1)
    # Five waiting connections are too few for questions that come all at once: the sixth is asked again a second later.
    ThreadingHTTPServer.request_queue_size = 512
    server = ThreadingHTTPServer(("127.0.0.1", port), _handler(model))
    server.daemon_threads = True
    try:
        server.serve_forever(poll_interval=0.05)
    except KeyboardInterrupt:
        engine.terminate()
        engine.wait()


def run_engine() -> None:
    """Hold the GPU from the first moment until stdin, and so the server, is gone; the GPU's file notes since when."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    (index,) = os.environ["CUDA_VISIBLE_DEVICES"].split(",")
    with (Path(os.environ[FOLDER]) / "gpus" / index).open("a") as gpu:
        try:
            fcntl.flock(gpu, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            sys.exit(f"GPU {index} is in use by another engine")
        gpu.write(json.dumps({"owner": os.environ.get(OWNER), "began": time.monotonic()}) + "\n")
        gpu.flush()
        time.sleep(float(os.environ[ENGINE]))
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        sys.stdin.read()


def _handler(model: str) -> type[BaseHTTPRequestHandler]:
    gold = {row["question"]: row["answer"] for row in map(json.loads, SMOKE.read_text().splitlines())}

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            known = {
                "/health": {},
                "/version": {"version": "0.0"},
                "/v1/models": {"data": [{"id": model, "max_model_len": 4096}]},
            }
            allowed = self.headers["Authorization"] == f"Bearer {os.environ['VLLM_API_KEY']}"
            if self.path == "/v1/models" and not allowed:
                self.reply(401, {})
            else:
                self.reply(200 if self.path in known else 404, known.get(self.path, {}))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.path != "/v1/completions":
                self.reply(404, {})
                return
            time.sleep(float(os.environ[ANSWERS]))
            question = body["prompt"].rsplit("Question: ", 1)[1].removesuffix("\nAnswer:")
            text = " 999983" if WRONG in model else f" {gold[question]}"
            usage = {"prompt_tokens": 11, "completion_tokens": 7}
            self.reply(200, {"choices": [{"text": text, "finish_reason": "stop"}], "usage": usage})

        def reply(self, status: int, body: dict[str, Any]) -> None:
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            return

    return Handler


if __name__ == "__main__":
    run_engine()
