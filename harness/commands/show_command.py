"""`accuracy-gate show`: a run, one of its configs or one of its samples in the terminal, from the record alone."""

from __future__ import annotations

import argparse
import contextlib
import io
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.commands.report_command import add_run, check_versions, find_run_folder
from harness.errors import ConfigError, DataUnavailable
from harness.records import read_samples
from harness.reports.documents import ConfigDocument, RunDocument, read_run
from harness.reports.page.marks import find_answer, find_gold
from harness.reports.terminal import LABELS, measured, notes, table
from harness.reports.untrusted import wrapped
from harness.run_settings import settings_of_result
from harness.tasks.base import Status

FILTERS = {
    "wrong": "answered, and wrong",
    "flipped": "changed against the baseline",
    "truncated": "hit the token limit without an answer",
    "unanswered": "nothing to grade",
    "errors": "got no response",
}
WIDEST = 120
LABEL = 12
Sample = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """One config's samples, and its answers that changed, by question."""

    samples: tuple[Sample, ...]
    flips: Mapping[int, Sample]

    def of(self, name: str) -> tuple[Sample, ...]:
        """Take the samples that a filter of FILTERS lets through, in the questions' order."""
        return tuple(sample for sample in self.samples if self._passes(name, sample))

    def _passes(self, name: str, sample: Sample) -> bool:
        match name:
            case "wrong":
                return sample["status"] == Status.OK and not sample["correct"] and bool(sample["scores"])
            case "flipped":
                return sample["index"] in self.flips
            case "errors":
                return bool(sample["status"] == Status.ERROR)
        return bool(sample["status"] == name)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what `accuracy-gate show` takes."""
    add_run(parser)
    parser.add_argument("config", nargs="?", metavar="CONFIG", help="its id, or the end of it where that is one alone")
    parser.add_argument("sample", nargs="?", type=_index, metavar="SAMPLE", help="the question's number, from 0")
    for name, meaning in FILTERS.items():
        parser.add_argument(f"--{name}", action="store_true", help=f"list the questions of CONFIG that are {meaning}")


def run(arguments: argparse.Namespace) -> int:
    """Print what was asked for.

    Raises ConfigError for a run, config or sample that is not there, DataUnavailable for a damaged record.
    """
    folder = find_run_folder(arguments.run_folder, arguments.results_dir)
    check_versions(folder)
    document = read_run(folder, base=folder)
    columns = min(shutil.get_terminal_size().columns, WIDEST)
    _print(_lines(arguments, folder, document, columns))
    return 0


def _lines(arguments: argparse.Namespace, folder: Path, document: RunDocument, columns: int) -> Iterator[str]:
    filters = [name for name in FILTERS if getattr(arguments, name)]
    if arguments.config is None:
        if filters:
            raise ConfigError(f"--{filters[0]}: name a config, of which to list the questions")
        return show_run(document, folder, columns)
    config = _find(document, arguments.config)
    at = folder / config.folder
    answers = read_answers(at)
    if arguments.sample is not None:
        return show_sample(config, at, answers, arguments.sample, columns)
    if filters:
        return (line for name in filters for line in list_samples(name, answers, columns))
    return show_config(config, document, answers, columns)


def _find(document: RunDocument, name: str) -> ConfigDocument:
    known = [config.row.config_id for config in document.configs]
    found = [one for one in known if one == name] or [one for one in known if one.endswith(f"/{name}")]
    if len(found) == 1:
        return document.configs[known.index(found[0])]
    if name in document.skipped:
        raise ConfigError(f"{name}: did not run: {document.skipped[name]}")
    raise ConfigError(f"{name}: {'ends several' if found else 'is no config of this run'}: {', '.join(found or known)}")


def read_answers(folder: Path) -> Answers:
    """Read one config's first pass; raises DataUnavailable where it is damaged."""
    samples = sorted(_rows(folder / "samples.jsonl"), key=lambda sample: int(sample["index"]))
    flips = {int(flip["index"]): flip for flip in _rows(folder / "flips.jsonl")}
    return Answers(samples=tuple(samples), flips=flips)


def _rows(path: Path) -> list[Sample]:
    try:
        return [*read_samples(path)] if path.is_file() else []
    except (OSError, ValueError) as error:
        raise DataUnavailable(f"{path}: is damaged: {error}") from error


def show_run(document: RunDocument, folder: Path, columns: int) -> Iterator[str]:
    """Show a run's table and circumstances."""
    run, environment = document.run, document.run.get("environment", {})
    finished = run.get("finished") or "not finished"
    yield from _fact("run", f"{run.get('run_id', folder.name)}, {run.get('started')} to {finished}", columns)
    where = [environment.get("host"), run.get("platform"), *(str(gpu.get("name")) for gpu in run.get("gpus") or ())]
    yield from _fact("where", ", ".join(str(part) for part in where if part), columns)
    yield from _fact("code", f"commit {environment.get('commit', 'unknown')}", columns)
    yield from _fact("lists", ", ".join(document.lists), columns)
    yield from _fact("exit code", str(run.get("exit_code", "none: it did not end")), columns)
    yield ""
    yield from table(document.rows, columns=columns, skipped=document.skipped)
    for note in (*notes(document.rows), *run.get("notes", ())):
        yield from wrapped(note, columns)
    reported = {row.config_id for row in document.rows} | set(document.skipped)
    if silent := [config_id for config_id in run.get("listed", ()) if config_id not in reported]:
        yield from wrapped(f"never reported: {', '.join(silent)}", columns)
    yield f"record: {folder}"


def show_config(config: ConfigDocument, document: RunDocument, answers: Answers, columns: int) -> Iterator[str]:
    """Show a config's verdict, gates, figures, settings, and how its answers fall apart."""
    row, result = config.row, config.result
    yield from _fact(LABELS[row.verdict], row.config_id, columns)
    yield from _fact("reason", row.reason, columns)
    for gate in result["gates"]:
        yield from _fact("gate", f"{gate['name']}: {gate['verdict']}: {gate['message']}", columns)
    interval = f", 95% interval {row.low:.4f} to {row.high:.4f}" if row.accuracy is not None else ""
    yield from _fact("measured", f"{measured(row)} over {row.graded} graded{interval}, floor {row.floor}", columns)
    for name, value in row.measures.items():
        yield from _fact(name, f"{value:g}", columns)
    yield from _fact("speed", _speed(row.tokens_per_second, row.questions_per_second, row.startup), columns)
    if row.acceptance_length is not None:
        yield from _fact("acceptance", f"{row.acceptance_length:.3f}", columns)
    settings = settings_of_result(result, document.run)
    groups = (("setting", settings.facts), ("argument", settings.arguments), ("env", settings.env))
    for label, group in groups:
        for name, setting in (group or {}).items():
            yield from _fact(label, f"{name}: {setting}", columns)
    yield from _fact("questions", f"{len(answers.samples)} recorded", columns)
    for name, meaning in FILTERS.items():
        if count := len(answers.of(name)):
            yield from _fact("", f"{count} {meaning} (--{name})", columns)
    yield from _fact("files", config.folder, columns)


def _speed(tokens: float | None, questions: float | None, startup: float | None) -> str:
    figures = ((tokens, "output tokens/s"), (questions, "questions/s"), (startup, "s to start"))
    return ", ".join(f"{value:.1f} {unit}" for value, unit in figures if value is not None) or "not measured"


def list_samples(name: str, answers: Answers, columns: int) -> Iterator[str]:
    """List the questions that a filter lets through, a line each."""
    found = answers.of(name)
    yield f"{name}: {len(found)} of {len(answers.samples)}"
    for sample in found:
        gold, span = str(sample["gold"]), find_gold(sample["gold"])
        changed = answers.flips.get(sample["index"])
        facts = [
            f"{sample['index']:>6}",
            str(sample["status"]),
            f"said {sample['extracted']}",
            f"gold {gold[slice(*span)] if span else gold}",
            *([f"became {changed['changed'].removeprefix('to ')}"] if changed else []),
            *([str(_error(sample))] if sample["status"] == Status.ERROR else []),
            str(sample["question"]),
        ]
        yield wrapped("  ".join(" ".join(fact.split()) if i else fact for i, fact in enumerate(facts)), columns)[0]


def show_sample(config: ConfigDocument, folder: Path, answers: Answers, index: int, columns: int) -> Iterator[str]:
    """Show a question with its prompt, gold answer and reply, the answer that was read marked in it."""
    sample = next((one for one in answers.samples if one["index"] == index), None)
    if sample is None:
        last = answers.samples[-1]["index"] if answers.samples else "none"
        raise ConfigError(f"{index}: no such sample in {folder / 'samples.jsonl'}; the last is {last}")
    verdict = "not graded" if not sample["scores"] else "right" if sample["correct"] else "wrong"
    yield from _fact("sample", f"{config.row.config_id}, question {index}: {sample['status']}, {verdict}", columns)
    readings = ", ".join(f"{name} {'right' if right else 'wrong'}" for name, right in sample["scores"].items())
    yield from _fact("read", f"{sample['extracted']} (by {sample['found_by']}); {readings or 'not graded'}", columns)
    yield from _fact("reply", _circumstances(sample), columns)
    if error := _error(sample):
        yield from _fact("error", error, columns)
    flip = answers.flips.get(index)
    baseline = flip["baseline_text"] if flip else None
    texts = (
        ("prompt begins", config.result["task"].get("fewshot_prefix") or None),
        ("question", sample["question"]),
        ("gold", sample["gold"]),
        ("reasoning", sample.get("reasoning")),
        ("reply", _marked(sample)),
        ("baseline's reply", baseline if flip else "(kept where the answer changed alone)"),
    )
    for label, text in texts:
        if text is not None:
            yield ""
            yield f"{label}:"
            yield from (f"  | {line}".rstrip() for line in wrapped(str(text), columns - 4))


def _circumstances(sample: Sample) -> str:
    latency = sample["latency"]
    parts = [
        f"finished by {sample['finish_reason']}" if sample["finish_reason"] else None,
        f"{sample['generated_tokens']} tokens" if sample["generated_tokens"] is not None else None,
        f"{latency:.2f} s" if latency is not None else None,
        f"{sample['attempts']} attempts" if sample["attempts"] != 1 else None,
        f"prompt of {sample['prompt_tokens']} tokens" if sample["prompt_tokens"] is not None else None,
    ]
    return ", ".join(part for part in parts if part) or "none"


def _error(sample: Sample) -> str | None:
    error = sample.get("error")
    return f"{error.get('kind')}: {error.get('detail')}" if error else None


def _marked(sample: Sample) -> str | None:
    text = sample["text"]
    span = find_answer(text, sample["extracted"], sample["found_by"])
    if span is None:
        return None if text is None else str(text)
    begin, end = span
    return f"{text[:begin]}>>>{text[begin:end]}<<<{text[end:]}"


def _fact(label: str, text: str, columns: int) -> Iterator[str]:
    for number, line in enumerate(wrapped(text, columns - LABEL)):
        yield f"{label if number == 0 else '':<{LABEL}}{line}".rstrip()


def _index(text: str) -> int:
    if not text.isascii() or not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no number of a question: 0 or more")
    return int(text)


def _print(lines: Iterator[str]) -> None:
    if isinstance(sys.stdout, io.TextIOWrapper):
        with contextlib.suppress(ValueError):
            sys.stdout.reconfigure(errors="backslashreplace")  # a terminal of few letters shows the rest as escapes
    for line in lines:
        print(line)
