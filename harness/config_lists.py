"""Config lists: which files are named, that each is there, and the id each gets."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from harness.config import ConfigFile, ModelConfig, load_config_file
from harness.errors import ConfigError, Position
from harness.yaml_source import YamlSource, read_text

SUFFIXES = (".yaml", ".yml")


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedConfig:
    """One config as a list names it."""

    id: str
    """Path below the list's folder, less its suffix, with forward slashes; then `:` and the task if it has several."""
    path: Path
    listed_at: Position
    file: ConfigFile
    config: ModelConfig
    """As it holds on this machine, once it is placed."""
    task: str | None = None
    """The name of its row in `tasks`."""
    skip: str | None = None
    """Why it does not run on this platform."""
    unmet: str | None = None
    """What this machine lacks."""

    @property
    def runs(self) -> bool:
        """Whether it is run here and not skipped."""
        return self.skip is None and self.unmet is None

    @property
    def server_id(self) -> str:
        """What all tasks of one server share: the id less the task."""
        return self.id if self.task is None else self.id.removesuffix(f":{self.task}")

    @property
    def folder(self) -> str:
        """Where its record lies below the run's folder."""
        return self.id if self.task is None else f"{self.server_id}/{self.task}"


def find_list(argument: str, *, suite_root: Path, cwd: Path) -> Path:
    """Find the file an option names: under the suite's root, then its `configs/`, then the working directory.

    Raises ConfigError naming every place tried.
    """
    given = Path(argument)
    places = [given] if given.is_absolute() else [base / given for base in (suite_root, suite_root / "configs", cwd)]
    for place in dict.fromkeys(places):
        if place.is_file():
            return place.resolve()
    raise ConfigError(
        f"--config-list-file {argument}: no such file; tried {', '.join(map(str, dict.fromkeys(places)))}"
    )


def load_lists(paths: Sequence[Path]) -> tuple[ListedConfig, ...]:
    """Load every config that the lists name, in order.

    Raises ConfigError with one line per fault: a list named twice, an empty list, a file that is missing, a line that
    stands twice, two equal ids, or whatever is wrong inside a config.
    """
    faults: list[str] = []
    named: list[ListedConfig] = []
    for index, path in enumerate(paths):
        if path in paths[:index]:
            faults.append(f"{path}: this list is named twice")
            continue
        for outcome in _entries(path):
            if isinstance(outcome, ConfigError):
                faults.extend(outcome.faults)
            else:
                named.extend(outcome)
    faults.extend(_equal_ids(named))
    if faults:
        raise ConfigError(*faults)
    return tuple(named)


def _entries(path: Path) -> Iterator[tuple[ListedConfig, ...] | ConfigError]:
    try:
        text = read_text(path)
    except ConfigError as error:
        yield error
        return
    names = 0
    for number, raw in enumerate(text.split("\n"), start=1):
        name = re.split(r"(?:^|\s)#", raw, maxsplit=1)[0].strip()
        if not name:
            continue
        names += 1
        try:
            yield _entry(path, name, Position(path=path, line=number, column=raw.index(name) + 1))
        except ConfigError as error:
            yield error
    if not names:
        yield ConfigError.at(Position(path=path), "this list names no config")


def _entry(list_path: Path, name: str, at: Position) -> tuple[ListedConfig, ...]:
    relative = PurePosixPath(name)
    if relative.is_absolute() or ".." in relative.parts:
        raise ConfigError.at(at, f"{name} must be a path below the list's own folder, {list_path.parent}")
    if relative.suffix not in SUFFIXES:
        raise ConfigError.at(at, f"{name} is no YAML file name: it must end in {' or '.join(SUFFIXES)}")
    path = list_path.parent / relative
    if not path.is_file():
        raise ConfigError.at(at, f"{name}: no such file (looked for {path})")
    return listed(str(relative.with_suffix("")), load_config_file(path), at)


def listed(config_id: str, file: ConfigFile, at: Position) -> tuple[ListedConfig, ...]:
    """Name a config that was read, once for each of its tasks."""
    return tuple(
        ListedConfig(
            id=config_id if task is None else f"{config_id}:{task}",
            path=file.path,
            listed_at=at,
            file=file,
            config=file.on(None, task),
            task=task,
        )
        for task in file.task_names
    )


def unlisted(config: ModelConfig) -> ListedConfig:
    """Name a config that no file holds; its own data lie in the working directory."""
    source = YamlSource(path=Path.cwd() / "config", data={}, positions={}, texts={})
    file = ConfigFile(source=source, raw={}, config=config)
    at = Position(path=source.path)
    return ListedConfig(id=config.model_name, path=source.path, listed_at=at, file=file, config=config)


def _equal_ids(named: Sequence[ListedConfig]) -> Iterator[str]:
    first: dict[str, ListedConfig] = {}
    for entry in named:
        other = first.setdefault(entry.id, entry)
        if other is not entry:
            yield f"{entry.listed_at}: the id {entry.id} is taken by {other.listed_at}: an id may stand once in a run"
