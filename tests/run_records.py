"""Run folders as runs leave them, for tests of what is read from them: every verdict, and text that is hostile."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from harness.gates.flips import flip_test
from harness.gates.history import QuestionHistory
from harness.gates.paired import paired_verdict
from harness.gates.threshold import Counts, Gate, Verdict, judge_acceptance, judge_accuracy, judge_errors, overall
from harness.metrics import Acceptance
from harness.records import EvalResult, RunRecord, Timings
from harness.tasks.base import Sample, Status

QUESTIONS = 60
PASS, REGRESSION, OUTAGE = "cpu/good", "cpu/worse", "gpu/outage"
LOG_TAIL = "".join(f"(EngineCore pid=4711) INFO line {i}\n" for i in range(40)) + "RuntimeError: <out> of memory\n"

FEWSHOT = "Question: How many are 2 boxes of 100?\nAnswer: They are 200.\n#### 200\n\nQuestion: \nAnswer:"
TIMINGS = Timings(startup=42.0, asking=31.5, latency_mean=2.4, latency_p50=2.3, latency_p95=3.3)

HOSTILE: Mapping[str, str] = {
    "script": "<script>document.title='owned';alert(1)</script><img src=x onerror=alert(2)>",
    "end of script": "</script></style></textarea>--><svg onload=alert(3)>",
    "terminal": "\x1b[31mred\x1b[0m\x07\x00bell \x9b2J",
    "direction": "pay \u202e100\u202c or \u2067200\u2069 \u200bhidden",
    "surrogate": "half a pair \ud83d and a whole one \U0001f600",
    "markdown": "````\n```\n| a | b |\n[link](javascript:alert(4)) ![i](http://example.invalid/i.png)",
    "long line": "lorem," * 17_000,
}
"""What a model may print; each is the reply to one question of the regression, in this order from question 0."""
TRUNCATED, UNANSWERED, FAILED = 20, 21, 22
"""Questions of the regression that came to no answer."""
TO_WRONG, TO_RIGHT = (10, 11, 12), (13,)
"""Questions of the regression that the baseline answers otherwise."""


def sample(index: int, *, right: bool = True, reply: str | None = None, **more: Any) -> Sample:
    """Make a graded sample of a sum whose gold answer is 7 more than its number, times 100."""
    gold = 100 * (index + 7)
    said = gold if right else gold + 1
    text = f"It is 100 * {index + 7}.\n#### {said:,}" if reply is None else f"{reply}\n#### {said}"
    facts: dict[str, Any] = {
        "index": index,
        "status": Status.OK,
        "correct": right,
        "scores": {"numeric": right, "last-number": right},
        "question": f"A crate holds {index + 7} boxes of 100 screws. How many screws does it hold?",
        "gold": f"The crate holds 100 * {index + 7} = {gold} screws.\n#### {gold}",
        "text": text,
        "extracted": f"{said:,}" if reply is None else str(said),
        "found_by": "hash",
        "finish_reason": "stop",
        "generated_tokens": 40 + 7 * (index % 13),
        "prompt_tokens": 300 + index,
        "latency": 1.5 + 0.11 * (index % 17),
        "attempts": 1,
        "prompt_sha256": f"{index:064x}",
    }
    return Sample(**(facts | more))


def document(index: int) -> Sample:
    """Make a text that was scored and neither right nor wrong."""
    none = dict.fromkeys(("text", "extracted", "found_by", "finish_reason"))
    measures = {"nll": 250.5, "tokens": 90, "bytes": 400, "words": 70, "windows": 1}
    shown = {"question": f"Text {index} goes on.", "gold": "", "generated_tokens": 0, "value": 0.9 + 0.01 * index}
    return sample(index, right=False, scores={}, measures=measures, **none, **shown)


def choice(index: int) -> Sample:
    """Make a multiple-choice question whose choices have scores."""
    right = index % 3 != 0
    said = "blue" if right else "red"
    measures = {"choices": ["blue", "red"], "gold": 0, "sum": [-1.5, -2.5], "greedy": [True, False], "tie": False}
    shown = {"question": f"What is the colour of sky {index}?", "gold": "blue", "text": said, "extracted": said}
    scored = {"measures": measures, "value": 1.0 if right else -1.0, "generated_tokens": 0, "found_by": "sum"}
    return sample(index, right=right, **shown, **scored)


def _no_answer(index: int, status: Status) -> Sample:
    facts: dict[Status, dict[str, Any]] = {
        Status.TRUNCATED: {"text": "It is 100 * ", "finish_reason": "length", "generated_tokens": 256},
        Status.UNANSWERED: {"text": ""},
        Status.ERROR: {
            "text": None,
            "finish_reason": None,
            "generated_tokens": None,
            "latency": None,
            "attempts": 3,
            "error": {"kind": "timeout", "detail": "no reply within 600 s <b>at all</b>"},
            "scores": {},
        },
    }
    return sample(index, right=False, **{"status": status, "extracted": None, "found_by": None, **facts[status]})


def regressed_samples() -> list[Sample]:
    """Make the regression's samples: hostile replies, flips, and questions that came to no answer."""
    made = {index: sample(index, right=index % 2 == 0) for index in range(QUESTIONS)}
    made |= {index: sample(index, reply=reply) for index, reply in enumerate(HOSTILE.values())}
    made |= {index: sample(index, right=False) for index in TO_WRONG}
    made |= {index: sample(index, right=True) for index in TO_RIGHT}
    for index, status in (
        (TRUNCATED, Status.TRUNCATED),
        (UNANSWERED, Status.UNANSWERED),
        (FAILED, Status.ERROR),
    ):
        made[index] = _no_answer(index, status)
    return [made[index] for index in random.Random(1).sample(range(QUESTIONS), QUESTIONS)]


def mixed_run(results_dir: Path) -> Path:
    """Leave a run with a pass, a regression with flips and hostile text, and an outage with its log."""
    record = RunRecord.create(results_dir)
    good = [sample(index, right=index % 6 != 0) for index in range(QUESTIONS)]
    acceptance = Acceptance(
        drafts=900, draft_tokens=2700, accepted_tokens=1200, length=2.333, rate_by_position=(0.7, 0.4, 0.2)
    )
    write_config(record, PASS, good, acceptance=acceptance)
    worse = regressed_samples()
    flips = [_flip(one) for one in worse if one.index in (*TO_WRONG, *TO_RIGHT)]
    write_config(record, REGRESSION, worse, against_baseline=_against(worse), flips=flips)
    outage = f"the server exited with code 1 while it started\nserver.log ends:\n{LOG_TAIL}"
    write_config(record, OUTAGE, [], fault=outage)
    finish(record, [PASS, REGRESSION, OUTAGE])
    return record.folder


def _flip(one: Sample) -> dict[str, Any]:
    return {
        "index": one.index,
        "changed": "to right" if one.correct else "to wrong",
        "question": one.question,
        "gold": one.gold,
        "baseline_right": 0 if one.correct else 1,
        "baseline_runs": 1,
        "baseline_text": f"The baseline said <i>otherwise</i> about {one.index}.",
        "text": one.text,
        "extracted": one.extracted,
    }


def _against(samples: Sequence[Sample]) -> dict[str, Any]:
    """Compare with a baseline of one run that differs in the flips alone."""
    ordered = sorted(samples, key=lambda one: one.index)
    graded = [None if one.status is Status.ERROR else one.correct for one in ordered]
    changed = {*TO_WRONG, *TO_RIGHT}
    before = [QuestionHistory(runs=1, right=int(one.correct != (one.index in changed))) for one in ordered]
    return {
        "paired": asdict(paired_verdict(before, [graded])),
        "flips": asdict(flip_test(before, [graded])),
        "baseline_runs": 1,
        "baseline_circumstances": {"vllm": "0.32.0"},
    }


def write_config(
    record: RunRecord,
    config_id: str,
    samples: Iterable[Sample],
    *,
    acceptance: Acceptance | None = None,
    against_baseline: Mapping[str, Any] | None = None,
    flips: Sequence[Mapping[str, Any]] = (),
    fault: str | None = None,
) -> None:
    """Write one config's folder as the pipeline does, judged by its samples, or void for the fault."""
    config = record.config(config_id)
    counts, tokens = Counts(), 0
    for one in samples:
        config.append(one)
        counts = _counted(counts, one)
        tokens += one.generated_tokens or 0
    gates = () if fault else tuple(_gates(counts, acceptance))
    failed = [gate for gate in gates if gate.verdict is not Verdict.PASS] or gates
    config.server_log.write_text(LOG_TAIL, encoding="utf-8")
    result = EvalResult(
        config_id=config_id,
        model_name=f"example/{config_id.rpartition('/')[2]}-8B",
        task={"name": "gsm8k", "questions": counts.asked, "scorer": "numeric", "fewshot_prefix": FEWSHOT},
        verdict=Verdict.INFRASTRUCTURE if fault else overall(gates),
        reason=fault or "; ".join(gate.message for gate in failed),
        counts=counts,
        threshold=0.8,
        tolerance=0.08,
        floor=0.72,
        against_baseline=against_baseline,
        gates=gates,
        timings=Timings() if fault else TIMINGS,
        output_tokens=None if fault else tokens,
        acceptance=acceptance,
        server={} if fault else {"command": ["vllm", "serve", "--dtype", "float32"], "version": "0.32.0"},
        started="2026-03-02T10:00:00.000+00:00",
        finished="2026-03-02T10:04:00.000+00:00",
    )
    config.write_result(result)
    config.write_flips(flips)
    config.close()


def _counted(counts: Counts, one: Sample) -> Counts:
    return Counts(
        asked=counts.asked + 1,
        correct=counts.correct + one.correct,
        truncated=counts.truncated + (one.status is Status.TRUNCATED),
        unanswered=counts.unanswered + (one.status is Status.UNANSWERED),
        errors=counts.errors + (one.status is Status.ERROR),
    )


def _gates(counts: Counts, acceptance: Acceptance | None) -> Iterator[Gate]:
    yield judge_errors(counts, max_error_rate=0.05)
    yield judge_accuracy(counts, threshold=0.8, tolerance=0.08)
    if acceptance is not None:
        yield judge_acceptance(acceptance.length, minimum=1.8)


def finish(record: RunRecord, listed: Sequence[str]) -> None:
    """Write `run.json` as a run does at its end."""
    record.write_run(
        {
            "started": "2026-03-02T10:00:00.000+00:00",
            "finished": "2026-03-02T10:12:00.000+00:00",
            "lists": ["configs/models-small.txt"],
            "listed": list(listed),
            "environment": {"harness_version": "0.1.0", "host": "runner-7", "commit": "9c1e4f7a" * 5, "ci": {}},
            "platform": "cpu x86_64",
            "gpus": [],
            "exit_code": 1,
        }
    )


LONG = "gpu/long"


def long_run(results_dir: Path, *, questions: int = 1319, tokens: int = 12_000) -> Path:
    """Leave a run as large as they get: GSM8K's questions with reasoning of so many tokens each, about 4 letters long.

    The words are drawn anew for each reply, so that they compress as text does rather than as copies.
    """
    record = RunRecord.create(results_dir)
    chance = random.Random(7)
    words = ["".join(chance.choices("etaoinshrdlucmfwypvbgk", k=chance.randint(2, 9))) for _ in range(3000)]
    write_config(record, LONG, (_long_sample(index, tokens, words, chance) for index in range(questions)))
    finish(record, [LONG])
    return record.folder


def _long_sample(index: int, tokens: int, words: Sequence[str], chance: random.Random) -> Sample:
    said = chance.choices(words, k=tokens * 4 // 7)
    return sample(
        index,
        right=index % 5 != 0,
        reply=" ".join(said),
        generated_tokens=tokens + chance.randint(-2000, 2000),
        latency=90 + chance.expovariate(0.05),
    )
