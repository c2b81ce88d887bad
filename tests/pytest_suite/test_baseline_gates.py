"""Baselines through the suite: saved, paired with, asked again where unclear, refused where they do not fit."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from loopback import Reply, Script, completion, loopback_server

LIST = "--config-list-file=models-small.txt"
QUESTIONS = 400


def answering(*, wrong: frozenset[int] = frozenset(), noisy: frozenset[int] = frozenset()) -> Script:
    """Answer rightly, but for some questions always wrong and some wrong in every other pass."""

    def script(body: dict[str, Any], n: int) -> Reply:
        number = int(re.findall(r"Question: (\d+)", body["prompt"])[-1])
        lost = number in wrong or (number in noisy and (n // QUESTIONS + number) % 2)
        return completion(f"#### {-1 if lost else number}")

    return script


NOISY = frozenset(range(300, 312))
HEALTHY = answering(wrong=frozenset(range(50)), noisy=NOISY)


def config(mini_suite, more: str = "") -> None:
    rows = (json.dumps({"question": f"{n}?", "answer": f"{n}"}) for n in range(QUESTIONS))
    (mini_suite.path / "configs/q.jsonl").write_text("\n".join(rows))
    (mini_suite.path / "configs/A.yaml").write_text(
        f"model_name: m\naccuracy_threshold: 0.8\ntolerance: 0.08\ndataset: q.jsonl\nnum_fewshot: 0\n{more}"
    )


def run(mini_suite, script: Script, *more: str) -> tuple[pytest.RunResult, int]:
    with loopback_server(script) as server:
        result = mini_suite.run(LIST, f"--base-url={server.base_url}", *more)
        return result, len(server.requests)


def save_baseline(mini_suite, times: int = 3) -> None:
    """Make a baseline of so many runs of the healthy model."""
    config(mini_suite)
    for number in range(times):
        shifted: Script = lambda body, n, number=number: HEALTHY(body, n + number * QUESTIONS)  # noqa: E731
        result, _ = run(mini_suite, shifted, "--save-baseline=main")
        assert result.ret == 0


PAIRED = "baseline: ../baselines/main/A.json\ngate: paired\n"


def test_a_healthy_model_is_kept(mini_suite) -> None:
    """Noise like the baseline's own passes; the result holds the comparison and no flip that is none."""
    save_baseline(mini_suite)
    stored = json.loads((mini_suite.path / "baselines/main/A.json").read_text())
    assert {runs for _, runs, _ in stored["answers"]} == {3}
    config(mini_suite, PAIRED + "max_flip_rate: 0.02\n")
    result, asked = run(mini_suite, HEALTHY)
    assert result.ret == 0
    facts = mini_suite.result("A")
    assert facts["against_baseline"]["baseline_runs"] == 3
    assert {gate["name"] for gate in facts["gates"]} >= {"accuracy", "paired", "flip rate"}
    assert asked in {QUESTIONS, 3 * QUESTIONS}


def test_a_loss_within_the_tolerance_is_caught_by_pairing(mini_suite) -> None:
    """Twenty of 400 answers lost leave the accuracy above its floor and are a regression all the same."""
    save_baseline(mini_suite)
    config(mini_suite, PAIRED)
    result, _ = run(mini_suite, answering(wrong=frozenset(range(70)), noisy=NOISY))
    assert result.ret == 1
    result.stdout.fnmatch_lines(["*GateFailed: A: loss against the baseline +0.0*"])
    facts = mini_suite.result("A")
    assert {gate["name"]: gate["verdict"] for gate in facts["gates"]}["accuracy"] == "pass"
    flips = [json.loads(line) for line in (mini_suite.records()[-1] / "A/flips.jsonl").read_text().splitlines()]
    assert [flip["index"] for flip in flips if flip["changed"] == "to wrong"][:20] == list(range(50, 70))
    assert (flips[0]["baseline_text"], flips[0]["text"]) == ("#### 50", "#### -1")


def test_an_unclear_pass_is_asked_again(mini_suite) -> None:
    """Where one pass neither shows nor excludes a loss the questions are asked up to max_repeats times."""
    save_baseline(mini_suite)
    config(mini_suite, PAIRED)
    result, asked = run(mini_suite, answering(wrong=frozenset(range(53)), noisy=NOISY))
    assert asked == 3 * QUESTIONS
    assert (mini_suite.records()[-1] / "A/samples-3.jsonl").is_file()
    assert mini_suite.result("A")["against_baseline"]["paired"]["passes"] == 3
    assert result.ret in {0, 1}


def test_flips_both_ways_are_red_at_equal_accuracy(mini_suite) -> None:
    """As many answers gained as lost, far more than noise: a change meant to be neutral is not."""
    save_baseline(mini_suite)
    config(mini_suite, "baseline: ../baselines/main/A.json\nmax_flip_rate: 0.02\n")
    result, _ = run(mini_suite, answering(wrong=frozenset(range(25, 75)), noisy=NOISY))
    assert result.ret == 1
    result.stdout.fnmatch_lines(["*answers differ from the baseline*"])


@pytest.mark.parametrize(
    ("more", "what"),
    [("max_tokens: 99\n", "sampling: "), ("num_questions: 399\n", "questions: 400 in the baseline, 399 here")],
    ids=["settings", "questions"],
)
def test_a_baseline_of_something_else_is_refused_before_anything_starts(mini_suite, more: str, what: str) -> None:
    """Exit 4 with what differs, both for pairing and for adding to it."""
    save_baseline(mini_suite, times=1)
    for extra, option in ((PAIRED, ()), ("", ("--save-baseline=main",))):
        config(mini_suite, more + extra)
        result, asked = run(mini_suite, HEALTHY, *option)
        assert (result.ret, asked) == (4, 0)
        assert what in result.stderr.str()


def test_a_model_that_fails_is_not_saved(mini_suite) -> None:
    """A regression never becomes the baseline."""
    config(mini_suite)
    result, _ = run(mini_suite, answering(wrong=frozenset(range(200))), "--save-baseline=main")
    assert result.ret == 1
    assert not (mini_suite.path / "baselines").exists()
