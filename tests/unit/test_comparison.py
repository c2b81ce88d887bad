"""Two runs side by side: pairing and its refusals, figures, settings, conditions, and text that nobody can trust."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
from h200_records import BF16, RUNS
from scipy.stats import binomtest
from statsmodels.stats.contingency_tables import mcnemar as statsmodels_mcnemar

from harness.comparison import Comparison, ConfigComparison, compare, compare_config
from harness.errors import ConfigError
from harness.fail_conditions import Outcome, judge, judge_conditions, parse_condition
from harness.gates.history import QuestionHistory
from harness.gates.paired import paired_verdict
from harness.recordings import Answer, Measure, Recording, Recordings
from harness.reports.comparison import render_json, render_markdown, render_text
from harness.reports.untrusted import code, escaped, fenced, html, wrapped
from harness.run_settings import Settings, differences, settings_of_result
from harness.tasks.base import Status

FIXED = {"temperature": 0.0, "seed": 42, "max_tokens": 256}


def answer(right: int, runs: int = 1, **keys: Any) -> Answer:
    status = Status.OK if runs else Status.ERROR
    facts = {"status": status, "text": f"{right}", "latency": 1.0, "question": "q", "gold": "g", "prompt_sha256": "p"}
    return Answer(history=QuestionHistory(right=right, runs=runs), **{**facts, **keys})


def recording(answers: Sequence[Answer], **keys: Any) -> Recording:
    facts = {
        "id": "m",
        "source": "here",
        "settings": Settings(arguments={}, env={}, sampling=FIXED),
        "planned": len(answers),
        "own": {Measure.TOKENS_PER_SECOND: 100.0, Measure.STARTUP: 30.0},
    }
    return Recording(answers=dict(enumerate(answers)), **{**facts, **keys})


def right_and_wrong(answers: Sequence[bool]) -> list[Answer]:
    return [answer(int(right), question=f"q{i}", prompt_sha256=str(i)) for i, right in enumerate(answers)]


def one(before: Recording, after: Recording) -> Comparison:
    sides = [
        Recordings(source=name, recordings={run.id: run}, whole_run=True)
        for name, run in zip("ab", (before, after), strict=True)
    ]
    return compare(*sides)


def test_one_run_each_is_paired_by_mcnemars_test() -> None:
    """Change, both kinds of flips and the exact two-sided p-value, as statsmodels has it."""
    before = right_and_wrong([True] * 60 + [False] * 40)
    after = right_and_wrong([False] * 9 + [True] * 51 + [True] * 2 + [False] * 38)
    found = compare_config(recording(before), recording(after))
    assert found.paired is not None
    assert found.paired.change == Fraction(-7, 100)
    table = [[51, 9], [2, 38]]
    assert found.paired.p_value == pytest.approx(statsmodels_mcnemar(table, exact=True).pvalue, abs=1e-12)
    assert found.paired.p_value == pytest.approx(binomtest(2, 11).pvalue, abs=1e-12)
    assert found.paired.low < -0.07 < found.paired.high
    assert [flip.index for flip in found.flips if flip.became == "wrong"] == list(range(9))
    assert [flip.index for flip in found.flips if flip.became == "right"] == [60, 61]
    assert found.paired.same_text == 89


def test_the_other_way_round_everything_is_mirrored() -> None:
    """B against A has the same p-value, the negative change and the mirrored interval."""
    runs = [
        recording([answer(r, k) for r, k in side])
        for side in ([(4, 5), (5, 5), (1, 5)] * 9, [(1, 1), (0, 1)] * 13 + [(0, 1)])
    ]
    there, back = compare_config(*runs).paired, compare_config(*reversed(runs)).paired
    assert there is not None
    assert back is not None
    assert there.change == -back.change
    assert there.p_value == pytest.approx(back.p_value, rel=1e-9)
    assert (there.low, there.high) == pytest.approx((-back.high, -back.low))


def test_a_baseline_of_several_runs_uses_how_often_each_question_was_right() -> None:
    """The interval is the paired gate's own, and the flips between the baseline's runs are told beside."""
    passes = [RUNS[name] for name in BF16[:4]]
    rates = [QuestionHistory(right=sum(answers), runs=4) for answers in zip(*passes, strict=True)]
    run = RUNS[BF16[4]]
    baseline = [answer(h.right, 4, text=None) for h in rates]
    found = compare_config(recording(baseline), recording([answer(int(right)) for right in run])).paired
    gate = paired_verdict(rates, [run])
    assert found is not None
    assert (found.questions, found.test) == (1319, "exact permutation test")
    assert (found.low, found.high) == pytest.approx((-gate.high, -gate.low))
    assert float(found.change) == pytest.approx(-gate.loss)
    assert found.flips_by_chance == gate.flips_between_runs
    assert found.same_text is None
    assert found.p_value > 0.01


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"question": "another"}, "the questions differ in 3 of 3, the first of them at index 0"),
        ({"gold": "another"}, "the gold answers differ in 3 of 3"),
        ({"prompt_sha256": "another"}, "the prompts differ in 3 of 3"),
    ],
    ids=lambda value: str(value)[:24],
)
def test_other_questions_or_prompts_are_not_paired(change: dict[str, str], says: str) -> None:
    """Nothing is told of the quality's change, and why is said; the start-up is still compared."""
    before, after = recording([answer(1)] * 3), recording([answer(0, **change)] * 3)
    found = compare_config(before, after)
    assert found.paired is None
    assert says in str(found.refusal)
    assert (found.flips, found.figure(Measure.ACCURACY).change) == ((), None)
    assert (found.figure(Measure.ACCURACY).a, found.figure(Measure.ACCURACY).b) == (1, 0)
    assert found.figure(Measure.STARTUP).change == 0
    assert judge(parse_condition("accuracy < -0.9"), found).outcome is Outcome.NOT_JUDGED
    assert judge(parse_condition("flips > 0"), found).outcome is Outcome.NOT_JUDGED
    assert judge(parse_condition("startup > 0"), found).outcome is Outcome.DOES_NOT_HOLD


def with_facts(run: Recording, **facts: str) -> Recording:
    return replace(run, settings=replace(run.settings, facts={k.replace("_", " "): v for k, v in facts.items()}))


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        (recording([answer(1)] * 3), recording([answer(1)] * 2), "A was asked 3, B 2"),
        (recording([answer(1)]), recording([], planned=1), "no question was answered in both"),
        (recording([answer(1)]), recording([], planned=1, unusable="no samples"), "no samples"),
        (
            with_facts(recording([answer(1)]), question_texts="a" * 64),
            with_facts(recording([answer(1, question=None)]), question_texts="b" * 64),
            "the question texts differ: their digests begin aaaaaaaaaaaa and bbbbbbbbbbbb",
        ),
        (
            recording([answer(1)]),
            recording([answer(1, question=None, gold=None, prompt_sha256=None)]),
            "nothing recorded says that the questions are the same",
        ),
    ],
    ids=["other-number", "none-answered", "no-samples", "other-digest", "nothing-to-go-by"],
)
def test_what_cannot_be_paired_is_refused_with_the_reason(before: Recording, after: Recording, says: str) -> None:
    """Each way in which two runs do not belong together has its own words."""
    assert says in str(compare_config(before, after).refusal)


def test_digests_vouch_for_a_baseline_that_keeps_no_questions() -> None:
    """A baseline is paired where its digests are the run's; the flips' questions are the run's."""
    bare = {"question": None, "gold": None, "prompt_sha256": None}
    before = with_facts(recording([answer(2, 2, **bare)]), question_texts="a", prompts="p")
    after = with_facts(recording([answer(0, question="Why?", gold="7")]), question_texts="a", prompts="p")
    (flip,) = compare_config(before, after).flips
    assert (flip.question, flip.gold, flip.became) == ("Why?", "7", "wrong")


def test_requests_that_failed_are_in_neither() -> None:
    """Only what both answered is paired; a failure is no wrong answer."""
    before = recording([answer(1), answer(1), answer(0, 0)])
    found = compare_config(before, recording([answer(1), answer(0, 0), answer(1)]))
    assert found.paired is not None
    assert (found.paired.questions, found.paired.change, found.incomplete) == (1, 0, None)


def test_an_unfinished_run_is_compared_over_what_both_answered_and_judged_by_nothing() -> None:
    """It says so, gives no change in throughput, and passes no condition, not even one that would not hold."""
    after = recording([answer(1)] * 2, planned=4, shortfall="was not finished: it has 2 answers")
    found = compare_config(recording([answer(1)] * 4), after)
    assert found.paired is not None
    assert found.paired.questions == 2
    assert found.warnings[0].startswith("B was not finished: it has 2 answers; compared over the 2 questions")
    assert found.figure(Measure.TOKENS_PER_SECOND).change is None
    assert "not over the same questions" in str(found.figure(Measure.TOKENS_PER_SECOND).gap)
    judged = judge(parse_condition("accuracy < -0.01"), found)
    assert (judged.outcome, judged.reason) == (Outcome.NOT_JUDGED, "B was not finished: it has 2 answers")


def test_figures_are_over_the_same_questions() -> None:
    """Latency, truncation and unanswered replies count the questions alone that both answered."""
    before = [answer(1, latency=1.0), answer(0, latency=3.0, status=Status.TRUNCATED), answer(0, latency=90.0)]
    after = [answer(1, latency=2.0), answer(0, latency=2.0, status=Status.UNANSWERED), answer(0, 0)]
    found = compare_config(recording(before), recording(after))
    shown = {figure.measure: (figure.a, figure.b) for figure in found.figures}
    assert shown[Measure.LATENCY_MEAN] == (2.0, 2.0)
    assert shown[Measure.LATENCY_P50] == (2.0, 2.0)
    assert shown[Measure.LATENCY_P95] == pytest.approx((2.9, 2.0))
    assert shown[Measure.TRUNCATED] == (Fraction(1, 2), 0)
    assert shown[Measure.UNANSWERED] == (0, Fraction(1, 2))


def sides(before: Sequence[str], after: Sequence[str], whole: tuple[bool, bool] = (True, True)) -> list[Recordings]:
    return [
        Recordings(source=source, recordings={n: recording([answer(1)], id=n) for n in names}, whole_run=of_run)
        for source, names, of_run in zip(("A", "B"), (before, after), whole, strict=True)
    ]


@pytest.mark.parametrize(
    ("given", "compared", "only_a", "only_b"),
    [
        (sides("xyz", "yzw"), [("y", "y"), ("z", "z")], ("x",), ("w",)),
        (sides("x", "y"), [("x", "y")], (), ()),
        (sides("xy", "x", (True, False)), [("x", "x")], (), ()),
    ],
    ids=["by-id", "one-each", "one-of-a-run"],
)
def test_configs_are_matched_by_id(
    given: list[Recordings], compared: list[tuple[str, str]], only_a: tuple[str, ...], only_b: tuple[str, ...]
) -> None:
    """What only one run has is named; two single configs are compared whatever they are called."""
    found = compare(*given)
    assert [(config.id_a, config.id_b) for config in found.configs] == compared
    assert (found.only_a, found.only_b) == (only_a, only_b)


def test_runs_with_nothing_in_common_are_refused() -> None:
    """The message says what each holds."""
    with pytest.raises(ConfigError, match="A holds x, y and B holds z"):
        compare(*sides("xy", "z"))


def test_a_config_that_only_a_has_fails_no_condition_and_passes_none() -> None:
    """A model that fell out of the list is not a model that kept its accuracy."""
    judged = judge_conditions((parse_condition("flips > 3"),), compare(*sides("xy", "yz")))
    assert {one.config_id: one.outcome for one in judged} == {"y": Outcome.DOES_NOT_HOLD, "x": Outcome.NOT_JUDGED}


def changed(accuracy: int, rate: float | None, total: int = 1300) -> ConfigComparison:
    """A comparison in which so many of 1,300 answers more are right."""
    base = 700
    runs = [
        recording(
            right_and_wrong([True] * right + [False] * (total - right)),
            own={Measure.TOKENS_PER_SECOND: speed, Measure.UNANSWERED: None},
        )
        for right, speed in ((base, 200.0), (base + accuracy, rate))
    ]
    return compare_config(*runs)


@pytest.mark.parametrize(
    ("condition", "outcome"),
    [
        ("accuracy < -0.01", Outcome.DOES_NOT_HOLD),
        ("accuracy <= -0.01", Outcome.HOLDS),
        ("  accuracy<=-.01  ", Outcome.HOLDS),
        ("accuracy < -0.0099", Outcome.HOLDS),
        ("accuracy < -1%", Outcome.HOLDS),
        ("accuracy < -2%", Outcome.DOES_NOT_HOLD),
        ("tokens_per_second < -5%", Outcome.DOES_NOT_HOLD),
        ("tokens_per_second <= -5 %", Outcome.HOLDS),
        ("tokens_per_second < -9.5", Outcome.HOLDS),
        ("flips > 12", Outcome.HOLDS),
        ("flips > 13", Outcome.DOES_NOT_HOLD),
        ("flips >= 1%", Outcome.HOLDS),
        ("flips > 1%", Outcome.DOES_NOT_HOLD),
        ("truncated > 0%", Outcome.DOES_NOT_HOLD),
        ("acceptance_length < 0", Outcome.NOT_JUDGED),
        ("questions_per_second < -5%", Outcome.NOT_JUDGED),
    ],
)
def test_conditions_are_judged_exactly(condition: str, outcome: Outcome) -> None:
    """13 of 1,300 is 0.01 and neither more nor less; a figure that is missing judges nothing."""
    assert judge(parse_condition(condition), changed(-13, 190.0)).outcome is outcome


def test_a_relative_change_from_nothing_is_not_judged() -> None:
    """From 0 to something has no percentage, and the remedy is said."""
    after = recording([answer(0, status=Status.TRUNCATED), answer(1)])
    found = compare_config(recording([answer(1)] * 2), after)
    judged = judge(parse_condition("truncated > 5%"), found)
    assert (judged.outcome, "without %" in judged.reason) == (Outcome.NOT_JUDGED, True)
    assert judge(parse_condition("truncated > 0.05"), found).outcome is Outcome.HOLDS


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("accuracy", "must be NAME"),
        ("", "must be NAME"),
        ("accuracy == 0", "must be NAME"),
        ("accuracy < x", "must be NAME"),
        ("accuracy < 1e400", "must be NAME"),
        ("accuracy < nan", "must be NAME"),
        ("accuracy < ٣", "must be NAME"),
        ("accuracy < -0.01 or 1", "must be NAME"),
        ("accuracy < -0.01\nflips > 3", "must be NAME"),
        ("__import__('os') < 1", "must be NAME"),
        ("acuracy < -0.01", "did you mean accuracy?"),
        ("speed < 0", "known: accuracy, tokens_per_second"),
        ("flips < -1", "never below 0"),
    ],
)
def test_nonsense_is_no_condition(text: str, says: str) -> None:
    """The message quotes the condition and says what would be one."""
    with pytest.raises(ConfigError, match=re.escape(says)) as fault:
        parse_condition(text)
    assert repr(text) in str(fault.value)


def result(command: Sequence[str] | None = None, port: int = 8000, **keys: Any) -> dict[str, Any]:
    server: dict[str, Any] = {"base_url": f"http://127.0.0.1:{port}", "version": "0.30"}
    if command is not None:
        server |= {"command": list(command), "env": keys.pop("env", {})}
    task = {
        "name": "gsm8k",
        "questions": 10,
        "fewshot": 5,
        "fewshot_prefix": "x",
        "scorer": "numeric",
        "sampling": FIXED,
    }
    return {"model_name": "org/M", "task": {**task, **keys}, "server": server}


def vllm(*more: str, port: int = 8000, model: str = "org/M", place: str = "/a") -> list[str]:
    return [f"{place}/bin/vllm", "serve", model, *more, "--host", "127.0.0.1", "--port", str(port)]


def differing(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    found = differences(settings_of_result(before, {}), settings_of_result(after, {}))
    return {one.name: (one.a, one.b) for one in found}


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (result(vllm(port=81), 81), result(vllm(port=92, place="/b"), 92), {}),
        (
            result(vllm("--kv-cache-dtype", "auto")),
            result(vllm("--kv_cache_dtype=fp8", "--enforce-eager")),
            {"--kv-cache-dtype": ("auto", "fp8"), "--enforce-eager": ("(not given)", "")},
        ),
        (
            result(vllm("-cc", '{"level": -1}')),
            result(vllm("-cc", '{"level": 3}')),
            {"-cc": ('{"level": -1}', '{"level": 3}')},
        ),
        (result(vllm("--seed", "-1")), result(vllm("--seed", "-2")), {"--seed": ("-1", "-2")}),
        (
            result(["docker", "run", "--name", "accuracy-gate-0123456789ab", "-p", "81:8000", "org/M"], 81),
            result(["docker", "run", "--name", "accuracy-gate-ba9876543210", "-p", "92:8000", "org/M"], 92),
            {},
        ),
        (
            result(vllm(), env={"A": "1", "B": "2"}),
            result(vllm(), env={"A": "3", "C": "2"}),
            {"env A": ("1", "3"), "env B": ("2", "(not given)"), "env C": ("(not given)", "2")},
        ),
        (
            result(vllm(), sampling={**FIXED, "temperature": 0.7}),
            result(vllm()),
            {"sampling temperature": ("0.7", "0.0")},
        ),
        (result(vllm(), scorer="last-number"), result(vllm()), {"scorer": ("last-number", "numeric")}),
        (result(vllm("--dtype", "half")), result(None), {}),
        (
            result(vllm(), prompts_sha256="a", fewshot=5),
            result(vllm(), prompts_sha256="b", fewshot=8),
            {"worked examples": ("5 (2d711642)", "8 (2d711642)")},
        ),
        (result(vllm(), prompts_sha256="a"), result(vllm(), prompts_sha256="b"), {"prompts": ("a", "b")}),
    ],
    ids=[
        *("port-and-place", "flags", "json", "negative", "container", "env", "sampling", "scorer", "not-recorded"),
        *("explained-prompts", "prompts"),
    ],
)
def test_settings_are_told_apart(
    before: dict[str, Any], after: dict[str, Any], expected: dict[str, tuple[str, str]]
) -> None:
    """Arguments are compared flag by flag; ports and names that every start makes anew are no difference."""
    assert differing(before, after) == expected


def test_another_model_is_one_difference() -> None:
    """The model's name stands in the command line as well, which does not count again."""
    after = {**result(vllm(model="org/M-FP8")), "model_name": "org/M-FP8"}
    assert differing(result(vllm()), after) == {"model": ("org/M", "org/M-FP8")}


def test_hardware_and_versions_are_settings() -> None:
    """GPUs come from the run, the engine's version from the server."""
    runs = [
        {"gpus": [{"name": gpu}] * 2, "environment": {"harness_version": v}}
        for gpu, v in (("H100", "1"), ("H200", "2"))
    ]
    found = differences(*(settings_of_result(result(vllm()), run) for run in runs))
    assert {one.name: (one.a, one.b) for one in found} == {
        "GPUs": ("2 x H100", "2 x H200"),
        "harness version": ("1", "2"),
    }


@pytest.mark.parametrize(
    ("sampling", "says"),
    [
        (FIXED, None),
        ({**FIXED, "temperature": 0.7}, "temperature is 0.7"),
        ({**FIXED, "temperature": None}, "temperature is left to the server"),
        ({**FIXED, "seed": None}, "seed is null"),
    ],
    ids=["fixed", "temperature", "server-default", "no-seed"],
)
def test_sampling_that_is_not_fixed_is_warned_of(sampling: dict[str, Any], says: str | None) -> None:
    """Greedy with a seed warns of nothing; anything else says what is loose."""
    run = recording([answer(1)], settings=Settings(arguments={}, env={}, sampling=sampling))
    warnings = compare_config(run, run).warnings
    if says is None:
        assert warnings == ()
    else:
        assert [w for w in warnings if f"not fixed in A ({says})" in w]


def test_more_than_one_change_is_warned_of() -> None:
    """One setting is a change; two are a riddle."""
    settings = [Settings(arguments={}, env={"A": a, "B": b}, sampling=FIXED) for a, b in ("11", "21", "22")]
    none, single, double = (
        compare_config(recording([answer(1)], settings=settings[0]), recording([answer(1)], settings=s))
        for s in settings
    )
    assert (none.warnings, single.warnings) == ((), ())
    assert double.warnings == ("2 settings differ: change one thing at a time, or its effect cannot be told",)


HOSTILE = "a\x1b[31mred\x07\u202e\ud800 ``` \n~~~\n````\n</details><script>x</script>|\r\nend\u2028"


def test_hostile_text_stays_text() -> None:
    """Escapes are shown, not sent, in text; in Markdown nothing leaves its block; JSON keeps every letter."""
    found = one(
        recording([answer(1, question=HOSTILE, gold=HOSTILE, text=HOSTILE)]),
        recording([answer(0, question=HOSTILE, gold=HOSTILE, text="fine")]),
    )
    text = render_text(found, (), flips=5)
    assert {c for c in text if not c.isprintable()} == {"\n"}
    assert "a\\x1b[31mred\\x07\\u202e\\ud800" in text
    assert max(map(len, text.split("\n"))) <= 80
    markdown = render_markdown(found, ())
    assert {c for c in markdown if not c.isprintable()} == {"\n"}
    assert outside_fences(markdown).count("</details>") == 1
    assert "<script>" not in outside_fences(markdown)
    stored = json.loads(render_json(found, ()))
    assert stored["configs"][0]["flips"][0]["a"]["text"] == HOSTILE
    assert render_json(found, ()).isascii()


def outside_fences(markdown: str) -> str:
    """What CommonMark sees outside of fenced code: a fence is closed by one at least as long."""
    kept: list[str] = []
    fence = ""
    for line in markdown.split("\n"):
        mark = re.match(r" {0,3}(`{3,}|~{3,})", line)
        if fence:
            closes = mark is not None and mark[1][0] == fence[0] and len(mark[1]) >= len(fence)
            fence = "" if closes and not line.strip().strip(fence[0]) else fence
        elif mark:
            fence = mark[1]
        else:
            kept.append(line)
    assert not fence
    return "\n".join(kept)


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (escaped("a\tb\nc"), "a\\tb\\nc"),
        (escaped("é漢🙂"), "é漢🙂"),
        (code("a|b"), "`a\\|b`"),
        (code("`x`"), "`` `x` ``"),
        (code(""), "` `"),
        (html("<b>*x*</b>"), "&#60;b&#62;&#42;x&#42;&#60;&#47;b&#62;"),
        (html("p = 0.5, see https://x.y"), "p = 0.5, see &#104;&#116;&#116;&#112;&#115;:&#47;&#47;x.y"),
        (fenced("```` x"), "`````text\n```` x\n`````"),
        (wrapped("aaa bbb ccc", 7), ["aaa bbb", "ccc"]),
        (wrapped("漢字漢字漢", 4), ["漢字", "漢字", "漢"]),
        (wrapped("x" * 9, 4), ["xxxx", "xxxx", "x"]),
        (wrapped("", 4), [""]),
    ],
)
def test_text_is_made_fit_to_be_shown(made: object, expected: object) -> None:
    """Each form of showing keeps what it may and escapes the rest."""
    assert made == expected


def test_text_shows_some_flips_and_the_others_show_all() -> None:
    """--flips bounds the text alone; Markdown folds them, JSON lists them."""
    found = one(recording(right_and_wrong([True] * 6)), recording(right_and_wrong([False] * 6)))
    text = render_text(found, (), flips=2)
    assert (
        text.count("wrong in B (right in 1 of 1 runs of A, right in 0 of 1 runs of B)"),
        "4 more flips" in text,
    ) == (2, True)
    markdown = render_markdown(found, ())
    assert "<details><summary>6 became wrong</summary>" in markdown
    assert markdown.count("**Question ") == 6
    assert len(json.loads(render_json(found, ()))["configs"][0]["flips"]) == 6


def test_json_holds_figures_conditions_and_reasons() -> None:
    """A program finds the change, why there is none, and what became of each condition."""
    found = one(recording(right_and_wrong([True] * 4)), recording(right_and_wrong([False] + [True] * 3)))
    judged = judge_conditions((parse_condition("accuracy < -0.2"), parse_condition("errors > 0")), found)
    stored = json.loads(render_json(found, judged))
    config = stored["configs"][0]
    assert config["figures"]["accuracy"] == {
        "a": 1.0,
        "b": 0.75,
        "change": -0.25,
        "relative": -0.25,
        "no_change_because": None,
    }
    assert config["figures"]["errors"]["no_change_because"] == "A and B do not record it"
    assert [row["outcome"] for row in stored["conditions"]] == ["holds", "cannot be judged"]
    assert config["paired"]["questions"] == 4
