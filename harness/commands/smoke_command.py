"""`accuracy-gate smoke`: 20 word problems and 20 instructions asked of one server, to see what is obviously broken."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

import yaml

from harness.backends.offline_engine import OfflineEngine
from harness.backends.server import root_url
from harness.backends.vllm_offline import ENGINE
from harness.config import load_config_file
from harness.config_lists import ListedConfig, listed
from harness.errors import ConfigError, GpusMissing, InfrastructureError, Position
from harness.gates.intervals import Interval, wilson
from harness.gates.threshold import Verdict
from harness.offline import evaluate_offline
from harness.pipeline import evaluate
from harness.placement import Placement, find_placement
from harness.records import ConfigRecord, EvalResult, RunRecord, environment, now, read_samples, write_json, write_text
from harness.reports.terminal import LiveLine
from harness.servers.vllm import flag_value
from harness.serving import RunOptions, Serving
from harness.standalone import API_KEY_VARIABLES, api_key, only_model

TASKS = {"word-problems": "smoke", "instructions": "checks"}
TITLES = {"word-problems": "word problems (completions)", "instructions": "instructions (chat)"}
CONTENT_FORMAT = "--chat-template-content-format"
EXCERPT = 200
"""Characters of a text shown without --verbose."""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="what `vllm serve` is told to serve; with --base-url the served model's name")
    parser.add_argument("--base-url", help="ask this running server instead of starting one")
    parser.add_argument("--api-key", help=f"for --base-url; else ${', $'.join(API_KEY_VARIABLES)}")
    parser.add_argument("--backend", choices=["vllm", ENGINE], help="vllm (a server), or a vllm.LLM in this process")
    parser.add_argument("--server-args", metavar="ARGS", help="further ones of `vllm serve`: --server-args='--a --b'")
    parser.add_argument("--serve-command", metavar="LINE", help="how the server is started")
    parser.add_argument("--gpus", metavar="LIST", help="which of the visible GPUs to use")
    parser.add_argument("--max-tokens", type=int, default=256, help="longest reply (%(default)s)")
    parser.add_argument("--min-quality", type=_share, metavar="SHARE", help="exit 1 where fewer checks are passed")
    parser.add_argument("--verbose", action="store_true", help="show all prompts and replies, whole")
    parser.add_argument("--save-results", type=Path, metavar="FILE", help="write the figures as JSON")
    parser.add_argument("--results-dir", type=Path, default=Path("results"), help="where the run's record goes")


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedSet:
    """One of the two sets, asked."""

    name: str
    result: EvalResult
    samples: tuple[Mapping[str, Any], ...]

    @property
    def passed(self) -> int:
        return self.result.counts.correct

    @property
    def asked(self) -> int:
        return self.result.counts.graded


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What sets came to: never the one without the other."""

    passed: int
    asked: int
    output_tokens: int | None
    """None where the server does not report them."""
    seconds: float
    """Wall clock from the first request to the last response, without the time between two sets."""

    @classmethod
    def of(cls, *sets: AskedSet) -> Figures:
        tokens = [each.result.output_tokens for each in sets]
        return cls(
            passed=sum(each.passed for each in sets),
            asked=sum(each.asked for each in sets),
            output_tokens=None if None in tokens else sum(filter(None, tokens)),
            seconds=sum(each.result.timings.asking or 0.0 for each in sets),
        )

    @property
    def share(self) -> float | None:
        return self.passed / self.asked if self.asked else None

    @property
    def interval(self) -> Interval:
        return wilson(self.passed, self.asked)

    @property
    def tokens_per_second(self) -> float | None:
        return self.output_tokens / self.seconds if self.output_tokens is not None and self.seconds else None

    def to_json(self) -> dict[str, Any]:
        return {
            "quality": {
                "passed": self.passed,
                "asked": self.asked,
                "share": self.share,
                "interval": asdict(self.interval),
            },
            "throughput": {
                "output_tokens": self.output_tokens,
                "seconds": self.seconds,
                "output_tokens_per_second": self.tokens_per_second,
            },
        }


def run(arguments: argparse.Namespace) -> int:
    """Ask both sets and print what they came to.

    Raises ConfigError for options that do not fit, InfrastructureError naming the set that could not be asked.
    """
    options = _options(arguments)
    model = arguments.model or asyncio.run(only_model(str(options.base_url), options.api_key))
    record = RunRecord.create(arguments.results_dir)
    entries = _entries(arguments, model, record.folder / "smoke.yaml")
    sets = _ask(entries, record, options, offline=arguments.backend == ENGINE)
    broken = [each for each in sets if each.result.verdict is Verdict.INFRASTRUCTURE]
    if not broken and arguments.save_results is not None:
        write_json(arguments.save_results, _document(sets, model, record, arguments.min_quality))
    print("\n".join([*_table(sets), *_texts(sets, everything=arguments.verbose)]))
    print(f"record: {record.folder}")
    if broken:
        raise InfrastructureError("\n".join(_why(broken)))
    whole = Figures.of(*sets)
    print(_together(whole))
    if _meets(whole, arguments.min_quality):
        return 0
    print(f"quality {whole.passed} of {whole.asked} is below --min-quality {arguments.min_quality}", file=sys.stderr)
    return 1


def _options(arguments: argparse.Namespace) -> RunOptions:
    if arguments.base_url is None:
        if arguments.model is None:
            raise ConfigError("--model MODEL to serve one, or --base-url URL for a server that runs: give one of them")
        if arguments.api_key is not None:
            raise ConfigError("--api-key is for --base-url: a server started here gets a key of its own")
        return RunOptions(gpu_choice=arguments.gpus)
    for option in ("backend", "server_args", "serve_command", "gpus"):
        if getattr(arguments, option) is not None:
            raise ConfigError(f"--{option.replace('_', '-')} is for a server started here, not for --base-url")
    try:
        root = root_url(arguments.base_url)
    except ValueError as error:
        raise ConfigError(f"--base-url: {error}") from error
    return RunOptions(base_url=root, api_key=arguments.api_key or api_key())


def _entries(arguments: argparse.Namespace, model: str, path: Path) -> tuple[ListedConfig, ...]:
    """Write the run's config beside its results and read it as any other, checks included."""
    keys = {
        "model_name": model,
        "accuracy_threshold": 0.0,
        "tolerance": 0.0,
        "max_tokens": arguments.max_tokens,
        "server_args": arguments.server_args,
        "serve_command": arguments.serve_command,
        "tasks": [{"name": name, "task": task} for name, task in TASKS.items()],
    }
    written = {key: value for key, value in keys.items() if value is not None}
    write_text(path, yaml.safe_dump(written, sort_keys=False, allow_unicode=True, width=100))
    return listed("smoke", load_config_file(path), Position(path=path))


def _ask(
    entries: Sequence[ListedConfig], record: RunRecord, options: RunOptions, *, offline: bool
) -> tuple[AskedSet, ...]:
    placement = Placement()
    if options.base_url is None:
        placement = find_placement(options.gpu_choice, serve_command=entries[0].config.serve_command)
        options = replace(options, gpus=placement.gpus)
    placed = [placement.place(entry) for entry in entries]
    info = {"started": now(), "environment": environment(), "gpus": [asdict(gpu) for gpu in placement.gpus]}
    ask = _ask_offline if offline else _ask_server
    sets = ask(placed, record, options)
    record.write_run({**info, "platform": str(placement.platform or "unknown"), "finished": now()})
    return sets


def _ask_server(placed: Sequence[ListedConfig], record: RunRecord, options: RunOptions) -> tuple[AskedSet, ...]:
    def one(entry: ListedConfig) -> AskedSet:
        own = record.config(entry.folder)
        return _asked(entry, own, evaluate(entry, own, options, LiveLine(entry.id), serving))

    with Serving(placed[0].config, record.config("smoke").server_log, options) as serving:
        return tuple(one(entry) for entry in placed)


def _ask_offline(placed: Sequence[ListedConfig], record: RunRecord, options: RunOptions) -> tuple[AskedSet, ...]:
    config = placed[0].config
    if flag_value(config.arguments, CONTENT_FORMAT) not in {None, "auto"}:
        raise ConfigError(f"--server-args: {CONTENT_FORMAT} needs a server: leave out --backend {ENGINE}")
    if placed[0].unmet is not None:
        raise GpusMissing(placed[0].unmet)
    served = config.model_copy(update={"backend": ENGINE})
    with Serving(served, record.config("smoke").server_log, options) as serving:
        engine = serving.engine()
        assert isinstance(engine, OfflineEngine), f"backend {ENGINE} is one"
        return tuple(_ask_engine(entry, record, engine) for entry in placed)


def _ask_engine(entry: ListedConfig, record: RunRecord, engine: OfflineEngine) -> AskedSet:
    own, config = record.config(entry.folder), entry.config
    asked = evaluate_offline(
        engine.llm,
        task=config.task,
        num_fewshot=config.num_fewshot,
        max_tokens=config.max_tokens,
        record_dir=own.folder,
        tolerance=config.tolerance,
        # A server takes these at its start, an LLM with every conversation.
        chat_template_kwargs=engine.chat.get("chat_template_kwargs") if config.task == "checks" else None,
    )
    result = replace(asked, config_id=entry.id, model_name=config.model_name)
    own.write_result(result)
    return _asked(entry, own, result)


def _asked(entry: ListedConfig, own: ConfigRecord, result: EvalResult) -> AskedSet:
    path = own.folder / "samples.jsonl"
    samples = sorted(read_samples(path) if path.is_file() else (), key=lambda sample: sample["index"])
    return AskedSet(name=str(entry.task), result=result, samples=tuple(samples))


def _table(sets: Sequence[AskedSet]) -> list[str]:
    rows: list[tuple[str, ...]] = [("set", "passed", "95% interval", "unans", "trunc", "err", "tok/s")]
    for each in sets:
        counts, figures = each.result.counts, Figures.of(each)
        judged = each.result.verdict is not Verdict.INFRASTRUCTURE
        rows.append(
            (
                TITLES[each.name],
                f"{each.passed} of {each.asked}" if judged else "-",
                f"{counts.interval.low:.3f}-{counts.interval.high:.3f}" if judged else "-",
                *(str(n) for n in (counts.unanswered, counts.truncated, counts.errors)),
                "-" if figures.tokens_per_second is None or not judged else f"{figures.tokens_per_second:.1f}",
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    ]


def _together(figures: Figures) -> str:
    """Say quality and throughput in one line."""
    interval, rate = figures.interval, figures.tokens_per_second
    speed = "unknown: the server reports no token counts"
    if rate is not None:
        speed = f"{rate:.1f} output tokens/s ({figures.output_tokens} tokens in {figures.seconds:.1f} s)"
    return (
        f"quality {figures.share:.4f} ({figures.passed} of {figures.asked} checks passed, "
        f"95% interval {interval.low:.4f} to {interval.high:.4f}), throughput {speed}"
    )


def _texts(sets: Sequence[AskedSet], *, everything: bool) -> list[str]:
    """Show what failed; with `everything` also what passed, and no text cut."""
    shown = []
    for each in sets:
        for sample in each.samples:
            if sample["correct"] and not everything:
                continue
            outcome = "passed" if sample["correct"] else "failed" if sample["status"] == "ok" else sample["status"]
            reply = sample["text"] if sample["error"] is None else sample["error"]["detail"]
            shown += [
                f"{outcome}: {each.name} {sample['index'] + 1}, expected {_expected(sample)}",
                f"  prompt: {_excerpt(sample['question'], everything)}",
                f"  reply:  {_excerpt(reply, everything)}",
            ]
    return shown


def _expected(sample: Mapping[str, Any]) -> str:
    """The check of an instruction as it is written, or the number of a word problem."""
    return str(sample["gold"]).rsplit("#### ", 1)[-1]


def _excerpt(text: str | None, whole: bool) -> str:
    flat = "(none)" if text is None else text if whole else " ".join(text.split())
    cut = flat if whole or len(flat) <= EXCERPT else flat[:EXCERPT] + "…"
    return cut.replace("\n", "\n          ") or "(empty)"


def _why(broken: Sequence[AskedSet]) -> list[str]:
    """One line per reason, so that a server that did not start is not reported once for each set."""
    by_reason: dict[str, list[str]] = {}
    for each in broken:
        by_reason.setdefault(each.result.reason, []).append(TITLES[each.name])
    return [f"{' and '.join(titles)} could not be asked: {reason}" for reason, titles in by_reason.items()]


def _meets(figures: Figures, minimum: Decimal | None) -> bool:
    """Compare in exact arithmetic: 32 of 40 meets 0.8."""
    return minimum is None or Decimal(figures.passed) >= minimum * figures.asked


def _document(sets: Sequence[AskedSet], model: str, record: RunRecord, minimum: Decimal | None) -> dict[str, Any]:
    whole = Figures.of(*sets)
    failures = [
        {"set": each.name, "number": sample["index"] + 1, "expected": _expected(sample)}
        | {key: sample[key] for key in ("status", "question", "text")}
        for each in sets
        for sample in each.samples
        if not sample["correct"]
    ]
    return {
        "model": model,
        "server_version": sets[0].result.server.get("version", "unknown"),
        **whole.to_json(),
        "min_quality": None if minimum is None else float(minimum),
        "met": _meets(whole, minimum),
        "sets": {each.name: Figures.of(each).to_json() for each in sets},
        "failures": failures,
        "record": str(record.folder),
    }


def _share(text: str) -> Decimal:
    try:
        share = Decimal(text)
    except InvalidOperation as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no number") from error
    if not (share.is_finite() and 0 <= share <= 1):
        raise argparse.ArgumentTypeError(f"{text} must lie between 0 and 1")
    return share
