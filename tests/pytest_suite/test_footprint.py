"""What the suite itself takes: memory that does not grow with the replies, and no dawdling around the server."""

from __future__ import annotations

import json
import subprocess
import sys

from loopback import completion, loopback_server

QUESTIONS = 1319
TOKENS = 12_000
REPLY = "so we add one more to it, and then " * (TOKENS * 4 // 35) + "\n#### 7"
LIMIT_MB = 300
# Linux counts the memory of whoever started a process as that process's own until it has more: a test runner may be
# larger than the limit, so that a small process stands between.
MEASURE = """
import os, subprocess, sys
process = subprocess.Popen(sys.argv[1:], stdout=subprocess.DEVNULL)
_, status, usage = os.wait4(process.pid, 0)
print(os.waitstatus_to_exitcode(status), usage.ru_maxrss // 1024)
"""


def test_memory_stays_small_with_long_replies(mini_suite) -> None:
    """With 1,319 replies of 12,000 tokens each, pytest's own process stays under 300 MB."""
    rows = (json.dumps({"question": f"{n}?", "answer": "#### 7"}) for n in range(QUESTIONS))
    (mini_suite.path / "configs/q.jsonl").write_text("\n".join(rows))
    (mini_suite.path / "configs/A.yaml").write_text(
        "model_name: m\naccuracy_threshold: 1.0\ntolerance: 0.0\ndataset: q.jsonl\nnum_fewshot: 0\nmax_tokens: 16000\n"
    )
    reply = completion(REPLY, tokens=TOKENS)
    with loopback_server(lambda body, n: reply) as loopback:
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--config-list-file=models-small.txt"]
        measured = subprocess.run(
            [sys.executable, "-c", MEASURE, *command, f"--base-url={loopback.base_url}"],
            capture_output=True,
            text=True,
            check=True,
        )
    exit_code, megabytes = map(int, measured.stdout.split())
    assert exit_code == 0
    stored = mini_suite.result("A")
    assert (stored["counts"]["correct"], stored["output_tokens"]) == (QUESTIONS, QUESTIONS * TOKENS)
    assert megabytes < LIMIT_MB
