"""`accuracy-gate check`: reads lists and their YAMLs and says what is wrong with them; nothing is started."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from harness.check import (
    Finding,
    Severity,
    check_config,
    contradictions,
    duplicates,
    where_written,
    wide_tolerances,
)
from harness.commands import ROOT
from harness.config import load_config_file
from harness.config_lists import SUFFIXES, ListedConfig, find_list, listed, load_lists
from harness.errors import ConfigError, Position
from harness.servers.embedded_model import check_embedded, is_embedded
from harness.tasks.build import build_task
from harness.yaml_source import read_text

LARGEST_LIST = 1_000_000
"""Bytes; a text file beyond that is no list, and reading it would be slow."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what `accuracy-gate check` takes."""
    parser.add_argument(
        "lists", nargs="+", metavar="LIST", help="a list of configs, or a folder: every list in it and below"
    )


def run(arguments: argparse.Namespace) -> int:
    """Print every finding; 4 where something does not load, else 1 where there is an error, else 0."""
    checked = Checked()
    for path in _lists(arguments.lists, checked):
        checked.add(path)
    checked.finish()
    for finding in checked.findings:
        print(finding)
    print(checked.summary())
    return 4 if checked.faulty else int(any(finding.severity is Severity.ERROR for finding in checked.findings))


@dataclass(kw_only=True)
class Checked:
    """The lists checked so far and all that was found."""

    lists: list[Path] = field(default_factory=list)
    entries: dict[tuple[Path, str | None], ListedConfig] = field(default_factory=dict)
    """What the lists name, by real path and task; what several lists name is one."""
    findings: list[Finding] = field(default_factory=list)
    faulty: bool = False

    def add(self, path: Path) -> None:
        """Check one list and the configs it names; one that does not load keeps no other from being checked."""
        self.lists.append(path)
        try:
            entries = load_lists([path])
        except ConfigError as error:
            self.fault(error)
            entries = tuple(entry for named in _named(path) for entry in _loaded(named))
        self.findings.extend(wide_tolerances(path, entries))
        for entry in entries:
            key = (entry.path.resolve(), entry.task)
            if key not in self.entries:
                self.entries[key] = entry
                self._check(entry)

    def fault(self, error: ConfigError) -> None:
        """Note what does not load, once where several lists name it."""
        self.faulty = True
        found = [Finding.from_fault(fault, Severity.ERROR) for fault in error.faults]
        self.findings.extend(finding for finding in found if finding not in self.findings)

    def _check(self, entry: ListedConfig) -> None:
        config = entry.config
        questions = config.num_questions or config.available_questions
        key = "model_name"
        try:
            if is_embedded(config.model_name):
                check_embedded(config.model_name, installed=False)
            if config.dataset is not None:
                key = "dataset"
                questions = len(build_task(config, folder=entry.path.parent, data_dir=None).requests)
        except ConfigError as error:
            at = where_written(entry, key)
            self.fault(ConfigError(*(f"{at}: {fault}" for fault in error.faults)))
            return
        self.findings.extend(check_config(entry, questions))

    def finish(self) -> None:
        """Add what shows only when all lists are seen together."""
        entries = tuple(self.entries.values())
        self.findings.extend(duplicates(entries))
        self.findings.extend(contradictions(entries))
        self.findings.extend(orphans(list(dict.fromkeys(path.parent for path in self.lists))))

    def summary(self) -> str:
        """Count what was checked and what was found."""
        counts = [sum(finding.severity is severity for finding in self.findings) for severity in Severity]
        found = ", ".join(_plural(n, severity) for n, severity in zip(counts, Severity, strict=True))
        return f"{_plural(len(self.entries), 'config')} in {_plural(len(self.lists), 'list')}: {found}"


def _plural(n: int, noun: str) -> str:
    return f"{n} {noun}{'' if n == 1 else 's'}"


def _lists(names: Sequence[str], checked: Checked) -> tuple[Path, ...]:
    found: dict[Path, None] = {}
    for name in names:
        try:
            folder = Path.cwd() / name
            lists = _lists_below(folder) if folder.is_dir() else [find_list(name, suite_root=ROOT, cwd=Path.cwd())]
            if not lists:
                raise ConfigError.at(Position(path=folder), "no list of configs in this folder or below")
            found.update(dict.fromkeys(lists))
        except ConfigError as error:
            checked.fault(ConfigError(*(fault.removeprefix("--config-list-file ") for fault in error.faults)))
    return tuple(found)


def orphans(folders: Sequence[Path]) -> Iterator[Finding]:
    """Find configs in these folders and below that no list names, theirs or one of a folder above."""
    around = {path for folder in folders for path in (*_lists_below(folder), *_lists_above(folder))}
    named = {path.resolve() for around_path in around for path in _named(around_path)}
    candidates = {path for folder in folders for suffix in SUFFIXES for path in _below(folder, f"*{suffix}")}
    for path in sorted(candidates):
        if path.resolve() not in named and _looks_like_config(path):
            at = Position(path=path, line=1, column=1)
            yield Finding(where=str(at), severity=Severity.WARNING, message="no list names this config")
            try:
                load_config_file(path)
            except ConfigError as error:
                # No run meets it, so that it stops none.
                yield from (Finding.from_fault(fault, Severity.WARNING) for fault in error.faults)


def _below(folder: Path, pattern: str) -> Iterator[Path]:
    for path in sorted(folder.rglob(pattern)):
        hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if path.is_file() and not hidden:
            yield path


def _lists_below(folder: Path) -> list[Path]:
    return [path for path in _below(folder.resolve(), "*.txt") if _named(path)]


def _lists_above(folder: Path) -> Iterator[Path]:
    """Climb for as long as there are lists that name what is there: one above may name configs in our folder."""
    for parent in folder.resolve().parents:
        lists = [path for path in sorted(parent.glob("*.txt")) if any(named.is_file() for named in _named(path))]
        if not lists:
            return
        yield from lists


def _named(list_path: Path) -> list[Path]:
    """Take the YAMLs that a text file names, whether or not they are there; none where it is no list."""
    try:
        text = read_text(list_path) if list_path.stat().st_size <= LARGEST_LIST else ""
    except (ConfigError, OSError):
        return []
    names = [re.split(r"(?:^|\s)#", line, maxsplit=1)[0].strip() for line in text.split("\n")]
    return [list_path.parent / name for name in names if name.endswith(SUFFIXES)]


def _loaded(path: Path) -> tuple[ListedConfig, ...]:
    try:
        return listed(path.stem, load_config_file(path), Position(path=path))
    except ConfigError:
        return ()


def _looks_like_config(path: Path) -> bool:
    """Tell our YAMLs from others in the folder; a key in a comment counts, and so does a file of nothing else."""
    try:
        text = read_text(path)
    except ConfigError:
        return False
    lines = [line.strip() for line in text.split("\n")]
    empty = all(not line or line.startswith("#") for line in lines)
    return empty or "model_name" in text or "accuracy_threshold" in text
