"""A stand-in for `vllm serve` that answers the smoke set rightly, but for the fault named first on its command line."""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from loopback import Reply, Script, completion, loopback_server

SMOKE = Path(__file__).resolve().parents[2] / "harness/tasks/data/smoke.jsonl"
GOLD = {row["question"]: row["answer"] for row in map(json.loads, SMOKE.read_text().splitlines())}
STUBBORN = "import signal, time\nfor n in (2, 15): signal.signal(n, signal.SIG_IGN)\ntime.sleep(3600)"


def right(body: dict[str, Any], n: int) -> Reply:
    text = body.get("prompt") or body["messages"][0]["content"]
    gold = GOLD[text.rsplit("Question: ", 1)[1].removesuffix("\nAnswer:")]
    if "prompt" in body:
        return completion(" " + gold)
    return Reply(body={"choices": [{"message": {"content": gold}, "finish_reason": "stop"}]})


def instead(reply: Reply, when: Callable[[int], bool] = lambda n: True) -> Script:
    return lambda body, n: reply if when(n) else right(body, n)


def slowly(body: dict[str, Any], n: int) -> Reply:
    return Reply(body=right(body, n).body, delay=1.0)


def die(body: dict[str, Any], n: int) -> Reply:
    if n == 6:
        print("RuntimeError: engine core died", flush=True)
        os._exit(1)
    return right(body, n)


def hang(body: dict[str, Any], n: int) -> Reply:
    if n == 6:
        os.kill(os.getpid(), signal.SIGSTOP)
    return right(body, n)


NULL = {"choices": [{"message": {"content": None, "reasoning_content": "so 7"}, "finish_reason": "stop"}]}
SCRIPTS: dict[str, Script] = {
    "wrong-answers": instead(completion("#### 999983")),
    "400-for-all": instead(Reply(status=400, body={"error": {"message": "seed is not supported"}})),
    "429-then-well": instead(Reply(status=429, headers={"Retry-After": "0.5"}), lambda n: n < 5),
    "429-for-ever": instead(Reply(status=429, headers={"Retry-After": "0"})),
    "500-one-in-ten": instead(Reply(status=500, body="internal"), lambda n: n % 10 == 3),
    "503-now-and-then": instead(Reply(status=503), lambda n: n % 7 == 3),
    "reset-mid-body-once": instead(Reply(body=completion("x").body, cut=20), lambda n: n == 3),
    "reset-mid-body": instead(Reply(body=completion("x").body, cut=20)),
    "slow-loris": instead(Reply(body=completion("x").body, drip=0.2), lambda n: n == 4),
    "truncated-json": instead(Reply(body='{"choices": [{"text": "#### '), lambda n: n == 4),
    "html-200": instead(Reply(body="<html>please log in</html>"), lambda n: n == 4),
    "empty-choices": instead(Reply(body={"choices": []}), lambda n: n == 4),
    "aborted": instead(completion("#### 7", finish_reason="abort"), lambda n: n == 4),
    "null-content": instead(Reply(body=NULL)),
    "cut-off": instead(completion("First 3 and then 4", finish_reason="length")),
    "dies-half-way": die,
    "hangs-half-way": hang,
    "slow": slowly,
}


def counters(drafts: str, accepted: str) -> Callable[[int], Reply]:
    """Counters that grow with the questions asked; an expression of `n` each."""

    def metrics(n: int) -> Reply:
        values = {"drafts": eval(drafts), "accepted_tokens": eval(accepted)}
        lines = [f'vllm:spec_decode_num_{name}_total{{engine="0"}} {value}' for name, value in values.items()]
        return Reply(body="\n".join([*lines, f'vllm:request_success_total{{finished_reason="stop"}} {n}', ""]))

    return metrics


METRICS: dict[str, Callable[[int], Reply]] = {
    "drafts": counters("10 * n", "8 * n"),
    "few-accepted": counters("10 * n", "n"),
    "no-drafts": counters("0", "0"),
    "no-series": lambda n: Reply(body="vllm:num_requests_running 0\n"),
    "empty-metrics": lambda n: Reply(body=""),
    "nan-metrics": counters("'NaN'", "n"),
    "metrics-500": lambda n: Reply(status=500, body="no"),
    "metrics-restart": counters("100 - n", "50"),
}


def exit_at_once(asked: argparse.Namespace) -> None:
    sys.exit(0)


def traceback(asked: argparse.Namespace) -> None:
    print("Traceback (most recent call last):\n  torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB")
    sys.exit(3)


def never_ready(asked: argparse.Namespace) -> None:
    print("Loading weights", flush=True)
    time.sleep(3600)


def port_taken_once(asked: argparse.Namespace) -> None:
    """The first start loses its port, as to a race."""
    first = Path(os.environ["ACCURACY_GATE_FAULT_FOLDER"]) / "lost"
    if not first.exists():
        first.touch()
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", asked.port))
            taken.listen()
            socket.create_server(("127.0.0.1", asked.port))


def foreign(asked: argparse.Namespace) -> None:
    """Tell the test which port to take, and never listen."""
    (Path(os.environ["ACCURACY_GATE_FAULT_FOLDER"]) / f"port-{asked.port}").touch()
    time.sleep(3600)


def flood(asked: argparse.Namespace) -> None:
    line = "x" * 1023 + "\n"
    for _ in range(100 * 1024):
        sys.stdout.write(line)
    sys.stdout.flush()


def ignore_sigterm(asked: argparse.Namespace) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def escaped_grandchild(asked: argparse.Namespace) -> None:
    if os.fork() == 0:
        subprocess.Popen([sys.executable, "-c", STUBBORN], start_new_session=True)
        os._exit(0)
    subprocess.Popen([sys.executable, "-c", STUBBORN])


BEFORE: dict[str, Callable[[argparse.Namespace], None]] = {
    "exits-0": exit_at_once,
    "traceback": traceback,
    "never-ready": never_ready,
    "port-taken-once": port_taken_once,
    "foreign-server": foreign,
    "log-flood": flood,
    "ignores-sigterm": ignore_sigterm,
    "setsid-grandchild": escaped_grandchild,
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("fault")
    parser.add_argument("model")
    parser.add_argument("--port", type=int, required=True)
    asked, _ = parser.parse_known_args()
    if asked.fault in BEFORE:
        BEFORE[asked.fault](asked)
    serving = loopback_server(
        SCRIPTS.get(asked.fault, right),
        model="another" if asked.fault == "another-model" else asked.model,
        port=asked.port,
        health=503 if asked.fault == "503-for-ever" else 200,
        metrics=METRICS.get(asked.fault, METRICS["drafts"]),
        posts={"/tokenize": Reply(body={"count": 4000})} if asked.fault == "context-too-small" else {},
    )
    with serving:
        threading.Event().wait()


if __name__ == "__main__":
    main()
