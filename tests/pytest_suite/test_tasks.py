"""Several tasks on one server: one start, one test and one row each."""

from __future__ import annotations

import json
import sys
from pathlib import Path

STAND_IN = Path(__file__).resolve().parents[1] / "faults/faulty_vllm.py"
CONFIG = f"""\
model_name: stand-in
task: smoke
accuracy_threshold: 0.9
tolerance: 0.0
serve_command: {sys.executable} {STAND_IN} none {{model}} --port {{port}} {{args}}
tasks:
  - task: smoke
  - name: first-four
    task: smoke
    num_questions: 4
    accuracy_threshold: 1.0
  - name: chat
    task: smoke
    use_chat_completions: true
"""
LIST = "--config-list-file=models-small.txt"


def starts(mini_suite, config_id: str) -> list[dict]:
    """The server records of a config: one for each start."""
    folder = mini_suite.records()[-1] / config_id
    assert (folder / "server.log").is_file()
    return [json.loads(path.read_text()) for path in folder.rglob("server.json")]


def test_tasks_share_one_server(mini_suite) -> None:
    """Three tasks are three tests, three records and three rows, and the server is started once."""
    (mini_suite.path / "configs/A.yaml").write_text(CONFIG)
    result = mini_suite.run(LIST, "-v")
    result.assert_outcomes(passed=3)
    result.stdout.fnmatch_lines([f"*test_accuracy?A:{name}? PASSED*" for name in ("smoke", "first-four", "chat")])
    (server,) = starts(mini_suite, "A")
    assert server["stopping_seconds"] < 8
    stored = {name: mini_suite.result(f"A/{name}") for name in ("smoke", "first-four", "chat")}
    assert {name: facts["num_questions"] for name, facts in stored.items()} == {
        "smoke": 20,
        "first-four": 4,
        "chat": 20,
    }
    assert len({facts["server"]["base_url"] for facts in stored.values()}) == 1
    assert [row["config_id"] for row in mini_suite.run_json()["configs"]] == ["A:chat", "A:first-four", "A:smoke"]


def test_each_config_gets_a_server_of_its_own(mini_suite) -> None:
    """The next config's server is another one, started after the first is stopped."""
    for name in ("A", "B"):
        (mini_suite.path / f"configs/{name}.yaml").write_text(CONFIG)
    mini_suite.list("A", "B")
    mini_suite.run(LIST).assert_outcomes(passed=6)
    urls = {starts(mini_suite, name)[0]["base_url"] for name in ("A", "B")}
    assert len(urls) == 2


def test_a_server_that_does_not_start_is_tried_once_for_all_tasks(mini_suite) -> None:
    """Each task's record says why; nobody waits for the same failure twice."""
    (mini_suite.path / "configs/A.yaml").write_text(CONFIG.replace(" none ", " exits-0 "))
    result = mini_suite.run(LIST)
    assert result.ret == 75
    result.assert_outcomes(failed=3)
    assert {mini_suite.result(f"A/{name}")["verdict"] for name in ("smoke", "chat")} == {"infrastructure"}


def test_the_first_failure_with_x_still_stops_the_server(mini_suite) -> None:
    """With -x the next task never comes, and the server is stopped all the same."""
    text = CONFIG.replace("  - task: smoke\n", "  - task: smoke\n    max_tokens: 8\n").replace(
        " none ", " wrong-answers "
    )
    (mini_suite.path / "configs/A.yaml").write_text(text)
    result = mini_suite.run(LIST, "-x")
    assert result.ret == 1
    result.assert_outcomes(failed=1)
    assert starts(mini_suite, "A")[0]["stopping_seconds"] is not None
