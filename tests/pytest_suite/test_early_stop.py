"""stop_early: fewer questions asked, the same verdict, and a result that says so."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from loopback import Reply, completion, loopback_server

LIST = "--config-list-file=models-small.txt"
QUESTIONS = 400


def run(mini_suite, rule: str, right_share: float, more: str = "") -> tuple[pytest.RunResult, dict[str, Any], int]:
    """Gate a model that answers the given share rightly against a floor of 0.5."""
    rows = (json.dumps({"question": f"{n}?", "answer": f"{n}"}) for n in range(QUESTIONS))
    (mini_suite.path / "configs/q.jsonl").write_text("\n".join(rows))
    (mini_suite.path / "configs/A.yaml").write_text(
        f"model_name: m\naccuracy_threshold: 0.58\ntolerance: 0.08\ndataset: q.jsonl\nnum_fewshot: 0\n"
        f"max_concurrency: 8\nstop_early: {rule}\n{more}"
    )

    def script(body: dict[str, Any], n: int) -> Reply:
        number = int(re.findall(r"Question: (\d+)", body["prompt"])[-1])
        return completion(f"#### {number if number % 100 < right_share * 100 else -1}")

    with loopback_server(script) as server:
        result = mini_suite.run(LIST, f"--base-url={server.base_url}")
        return result, mini_suite.result("A"), len(server.requests)


@pytest.mark.parametrize(("share", "code"), [(0.95, 0), (0.05, 1)], ids=["far above", "far below"])
@pytest.mark.parametrize("rule", ["exact", "sequential"])
def test_a_clear_case_is_settled_early(mini_suite, rule: str, share: float, code: int) -> None:
    """Far from the floor a part of the questions decides; the result says how many and keeps a valid interval."""
    result, stored, asked = run(mini_suite, rule, share)
    assert result.ret == code
    stop = stored["stopped_early"]
    assert stop["rule"] == rule
    assert stop["graded"] <= stored["counts"]["asked"] <= asked < QUESTIONS * (0.7 if rule == "exact" else 0.4)
    assert stop["interval"]["low"] <= share <= stop["interval"]["high"]
    result.stdout.fnmatch_lines(["*A *pass" if code == 0 else f"*of the first {stop['graded']} of 400 questions*"])


def test_near_the_floor_everything_is_asked(mini_suite) -> None:
    """Where the verdict hangs on a few answers the rule runs on nearly to the end, with the full run's verdict."""
    _, stored, asked = run(mini_suite, "sequential", 0.50)
    assert asked > 0.95 * QUESTIONS
    assert stored["verdict"] == "pass"


def test_a_baseline_wants_all_questions(mini_suite) -> None:
    """Early stopping and pairing are refused together."""
    mini_suite.add("A", more="stop_early: exact\nbaseline: b.json\n")
    result = mini_suite.run(LIST, "--base-url=http://127.0.0.1:9")
    assert result.ret == 4
    result.stderr.fnmatch_lines(["*stop_early: baseline compares question by question*"])
