"""`accuracy-gate calibrate` on a real server: baseline, threshold and tolerance, or nothing at all."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from loopback import Reply, Script, completion, loopback_server

from harness.baselines import load
from harness.config import load_config

CONFIG = "# kept\nmodel_name: m\ndataset: q.jsonl\nnum_fewshot: 0\naccuracy_threshold: 0.5  # old\nnum_questions: 40\n"


def calibrate(folder: Path, script: Script, *more: str) -> subprocess.CompletedProcess[str]:
    (folder / "M.yaml").write_text(CONFIG)
    rows = (f'{{"question": "{n}?", "answer": "{n}"}}' for n in range(40))
    (folder / "q.jsonl").write_text("\n".join(rows))
    with loopback_server(script) as server:
        command = [sys.executable, "-m", "harness.cli", "calibrate", "M.yaml", "--base-url", server.base_url]
        return subprocess.run([*command, *more], cwd=folder, capture_output=True, text=True, check=False)


def mostly_right(body: dict[str, str], n: int) -> Reply:
    """Questions 0 to 9 are wrong, the others right, but for question 20, which is right in every other run."""
    question = int(re.findall(r"Question: (\d+)", body["prompt"])[-1])
    wrong = question < 10 or (question == 20 and (n // 40) % 2)
    return completion("#### 999" if wrong else f"#### {question}")


def test_noise_is_measured_and_everything_written(tmp_path: Path) -> None:
    """Five runs give the mean as threshold and a tolerance above their noise; the baseline knows each question."""
    done = calibrate(tmp_path, mostly_right)
    assert done.returncode == 0, done.stderr
    assert "1 questions came out both ways" in done.stdout
    text = (tmp_path / "M.yaml").read_text()
    config = load_config(tmp_path / "M.yaml")
    assert config.accuracy_threshold == (29 * 5 + 3) / 5 / 40
    assert 0 < config.tolerance < 0.3
    assert text.startswith("# kept\n")
    assert "# old" in text
    baseline = load(tmp_path / "baselines/M.json")
    assert [h.right for h in baseline.histories] == [0] * 10 + [5] * 10 + [3] + [5] * 19
    assert baseline.binding["model"] == "m"


def test_a_dry_run_writes_nothing(tmp_path: Path) -> None:
    """It measures, prints, and leaves the YAML as it was."""
    done = calibrate(tmp_path, mostly_right, "--dry-run", "--runs", "2")
    assert done.returncode == 0, done.stderr
    assert "smallest loss that shows" in done.stdout
    assert (tmp_path / "M.yaml").read_text() == CONFIG
    assert not (tmp_path / "baselines").exists()


def test_runs_with_errors_are_refused(tmp_path: Path) -> None:
    """Noise that is an outage is no noise of the model."""
    done = calibrate(tmp_path, lambda body, n: Reply(status=500) if n == 3 else mostly_right(body, n))
    assert done.returncode == 75
    assert "requests got no answer" in done.stderr
    assert (tmp_path / "M.yaml").read_text() == CONFIG


def test_dead_speculation_is_refused(tmp_path: Path) -> None:
    """An acceptance length near 1 is no state to calibrate on."""
    (tmp_path / "M.yaml").write_text(CONFIG)
    rows = (f'{{"question": "{n}?", "answer": "{n}"}}' for n in range(40))
    (tmp_path / "q.jsonl").write_text("\n".join(rows))

    def metrics(asked: int) -> Reply:
        lines = [f"vllm:spec_decode_num_drafts_total {asked}", "vllm:spec_decode_num_accepted_tokens_total 0"]
        return Reply(body="\n".join([*lines, f'vllm:request_success_total{{finished_reason="stop"}} {asked}', ""]))

    with loopback_server(mostly_right, metrics=metrics) as server:
        command = [sys.executable, "-m", "harness.cli", "calibrate", "M.yaml", "--base-url", server.base_url]
        done = subprocess.run([*command, "--runs", "2"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 75
    assert "acceptance length 1.000 is near 1" in done.stderr
