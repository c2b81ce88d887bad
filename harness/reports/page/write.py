"""From a run's folder to `report.html`, one sample at a time."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import IO, Any

import jinja2

from harness.errors import DataUnavailable, RecordUnwritable
from harness.reports.page.chunks import Chunks, pack
from harness.reports.page.configs import ConfigView, view_of
from harness.reports.page.past import PastRun, interval_of, timeline
from harness.reports.page.samples import COLUMNS, sample_rows
from harness.reports.untrusted import escaped

NAME = "report.html"
SCRIPTS = ("dom.js", "store.js", "plots.js", "detail.js", "explorer.js", "keys.js", "main.js")
"""Modules in the order in which each finds what it imports."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Config:
    """One config's part of the page."""

    view: ConfigView
    index: str
    """Packed: its figures, its history and the rows of its samples."""
    chunks: Chunks

    def texts(self) -> Iterator[tuple[str, str]]:
        """Name and content of each of its chunks."""
        return ((f"c{self.view.number}-{i}", text) for i, text in enumerate(self.chunks.read()))


def write_page(run_folder: Path, *, history: Sequence[PastRun] = ()) -> Path:
    """Render a run's record to `report.html` in its folder.

    Holds the short rows of all samples, but never their texts. Raises DataUnavailable where the record is damaged and
    RecordUnwritable where the page cannot be written.
    """
    run = _run(run_folder)
    results = _results(run_folder)
    path = run_folder / NAME
    temporary = path.with_name(f".{NAME}.{os.getpid()}")
    try:
        with tempfile.TemporaryDirectory(dir=run_folder, prefix=".report-") as spools:
            configs = [
                _config(Path(spools) / f"{number}", number, folder, result, run, history)
                for number, (folder, result) in enumerate(results)
            ]
            try:
                with temporary.open("w", encoding="utf-8", newline="\n") as page:
                    _render(page, run, configs)
                temporary.replace(path)
            finally:
                temporary.unlink(missing_ok=True)
    except OSError as error:
        raise RecordUnwritable(f"{path}: cannot be written: {error.strerror or error}") from error
    return path


def _run(folder: Path) -> dict[str, Any]:
    path = folder / "run.json"
    return {"run_id": folder.name, **(_json(path) if path.is_file() else {})}


def _results(folder: Path) -> list[tuple[Path, dict[str, Any]]]:
    found = [(path.parent, _json(path)) for path in folder.rglob("result.json")]
    return sorted(found, key=lambda pair: str(pair[1].get("config_id")))


def _json(path: Path) -> dict[str, Any]:
    try:
        document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataUnavailable(f"{path}: is no JSON: {error}; remove it to render the rest of the run") from error
    return document


def _config(
    spool: Path,
    number: int,
    folder: Path,
    result: Mapping[str, Any],
    run: Mapping[str, Any],
    history: Sequence[PastRun],
) -> _Config:
    chunks = Chunks(spool)
    rows = sample_rows(folder, chunks)
    try:
        view = view_of(number, result)
        index = {
            "id": view.config_id,
            "verdict": view.verdict,
            "accuracy": result["accuracy"],
            "interval": interval_of(result) if result["accuracy"] is not None else None,
            "floor": result["floor"],
            "acceptance_floor": _required(result, "acceptance length"),
            "before": result["task"].get("fewshot_prefix") or "",
            "history": timeline(result, run, history),
            "columns": COLUMNS,
            "rows": rows,
        }
    except (LookupError, TypeError, ValueError) as error:
        raise DataUnavailable(f"{folder / 'result.json'}: is damaged: {type(error).__name__}: {error}") from error
    return _Config(view=view, index=pack(index), chunks=chunks)


def _required(result: Mapping[str, Any], name: str) -> float | None:
    return next((gate["required"] for gate in result["gates"] if gate["name"] == name), None)


def _render(page: IO[str], run: Mapping[str, Any], configs: Sequence[_Config]) -> None:
    style, script = _asset("page.css"), _script()
    names = {config.view.config_id for config in configs}
    template = _environment().get_template("page.html.j2")
    for piece in template.generate(
        policy=_policy(style, script),
        style=style,
        script=script,
        run=run,
        facts=list(_facts(run)),
        configs=configs,
        unfinished=[name for name in run.get("listed", []) if name not in names],
    ):
        page.write(piece)


def _facts(run: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    environment = run.get("environment", {})
    gpus = [str(gpu.get("name", gpu)) if isinstance(gpu, Mapping) else str(gpu) for gpu in run.get("gpus") or []]
    facts = {
        "commit": environment.get("commit"),
        "started": _moment(run.get("started")),
        "finished": _moment(run.get("finished")),
        "where": environment.get("host"),
        "platform": run.get("platform"),
        "GPUs": ", ".join(gpus),
        "lists": ", ".join(run.get("lists", [])),
        "harness": environment.get("harness_version"),
        **environment.get("ci", {}),
        "exit code": run.get("exit_code"),
    }
    return ((name, str(value)) for name, value in facts.items() if value not in (None, ""))


def _moment(iso: str | None) -> str | None:
    return re.sub(r"T(\d\d:\d\d:\d\d)(?:\.\d+)?(?:\+00:00|Z)$", r" \1 UTC", iso) if iso else None


def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("harness.reports.page", "assets"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["visible"] = lambda text: escaped(str(text), keep_newlines=True)
    return environment


def _asset(name: str) -> str:
    return files("harness.reports.page").joinpath("assets", name).read_text(encoding="utf-8")


def _script() -> str:
    """Join the modules into one: a page that is a single file cannot import any."""
    source = "\n".join(_asset(name) for name in SCRIPTS)
    source = re.sub(r"^import \{[^}]*\} from \"\./[\w-]+\.js\";\n", "", source, flags=re.MULTILINE)
    return re.sub(r"^export (?=const |function |async function |class )", "", source, flags=re.MULTILINE)


def _policy(style: str, script: str) -> str:
    """Forbid whatever is not this page's own: nothing is fetched, and no other script runs."""
    own = f"script-src '{_hash(script)}'; style-src '{_hash(style)}'"
    return f"default-src 'none'; {own}; base-uri 'none'; form-action 'none'"


def _hash(source: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()}"
