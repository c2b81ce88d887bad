"""What the suite itself takes: memory that does not grow with the replies, and no dawdling around the server."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from loopback import completion, loopback_server

QUESTIONS = 1319
TOKENS = 12_000
REPLY = "so we add one more to it, and then " * (TOKENS * 4 // 35) + "\n#### 7"
LIMIT_MB = 300


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
        process = subprocess.Popen([*command, f"--base-url={loopback.base_url}"])
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    stored = mini_suite.result("A")
    assert (stored["counts"]["correct"], stored["output_tokens"]) == (QUESTIONS, QUESTIONS * TOKENS)
    assert usage.ru_maxrss / 1024 < LIMIT_MB, f"{usage.ru_maxrss / 1024:.0f} MB"
