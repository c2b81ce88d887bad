"""GitHub Actions: the step summary, an annotation for each failure, log tails folded away."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from harness.gates.threshold import Verdict
from harness.reports.documents import ConfigDocument, RunDocument
from harness.reports.explain import shortened, what
from harness.reports.markdown import LIMIT_BYTES, render_markdown
from harness.reports.pointers import gate_key
from harness.reports.untrusted import escaped

ANNOTATIONS = 10
"""GitHub shows so many errors of a step and drops the rest."""
LONGEST_MESSAGE = 1000
TITLES: Mapping[Verdict, str] = {
    Verdict.REGRESSION: "the model got worse",
    Verdict.INFRASTRUCTURE: "infrastructure, not the model",
}


def on_github(env: Mapping[str, str]) -> bool:
    return env.get("GITHUB_ACTIONS") == "true"


def write_summary(run: RunDocument, env: Mapping[str, str]) -> str | None:
    """Add the run to the step's summary, within what earlier writers have left; say what went wrong, if anything."""
    name = env.get("GITHUB_STEP_SUMMARY")
    if not name:
        return None
    path = Path(name)
    try:
        taken = path.stat().st_size if path.exists() else 0
        text = render_markdown(run, limit_bytes=max(0, LIMIT_BYTES - taken))
        with path.open("a", encoding="utf-8") as summary:
            summary.write(text)
    except OSError as error:
        return f"GITHUB_STEP_SUMMARY {path}: cannot be written: {error.strerror or error}"
    return None


def commands(run: RunDocument, env: Mapping[str, str]) -> Iterator[str]:
    """Spell a workflow command for each failure, regressions first; what GitHub would not show is summed up in one."""
    failed = run.failed
    shown = failed if len(failed) <= ANNOTATIONS else failed[: ANNOTATIONS - 1]
    workspace = Path(env.get("GITHUB_WORKSPACE") or Path.cwd()).resolve()
    for config in shown:
        message = f"{config.row.config_id}: {what(config)}"
        yield _command("error", _properties(config, workspace), shortened(message, LONGEST_MESSAGE))
    if len(shown) < len(failed):
        names = ", ".join(config.row.config_id for config in failed[len(shown) :])
        properties = {"title": f"accuracy-gate: {len(failed) - len(shown)} more configs failed"}
        yield _command("error", properties, shortened(names, LONGEST_MESSAGE))


def _properties(config: ConfigDocument, workspace: Path) -> dict[str, str]:
    title = f"accuracy-gate: {config.row.config_id}: {TITLES[config.row.verdict]}"
    keys = config.place.get("keys", {})
    if not keys:
        return {"title": title}
    gates = config.failing if config.row.verdict is Verdict.REGRESSION else ()
    wanted = [*(gate_key(gate["name"]) for gate in gates), "accuracy_threshold", "model_name"]
    line, column = next((keys[key] for key in wanted if key in keys), (1, 1))
    path = Path(config.place["path"])
    inside = path.is_absolute() and path.resolve().is_relative_to(workspace)
    shown = path.resolve().relative_to(workspace).as_posix() if inside else str(path)
    return {"file": shown, "line": str(line), "col": str(column), "title": title}


def _command(name: str, properties: Mapping[str, str], message: str) -> str:
    shown = ",".join(f"{key}={_property(value)}" for key, value in properties.items())
    return f"::{name} {shown}::{_data(message)}"


def _data(text: str) -> str:
    """Escape as the runner unescapes; controls are written out first, the line breaks among them excepted."""
    safe = escaped(text.replace("\r\n", "\n"), keep_newlines=True)
    return safe.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")


def log_groups(run: RunDocument) -> Iterator[str]:
    """Fold the log's end of each outage away."""
    for config in run.failed:
        if config.row.verdict is Verdict.INFRASTRUCTURE and config.log:
            yield f"::group::server.log of {_data(config.row.config_id)} ends"
            yield from (defused(escaped(line)) for line in config.log)
            yield "::endgroup::"


def defused(text: str) -> str:
    """Change lines that the runner would take for commands: `::name::` at a line's start, `##[name]` anywhere in it."""
    lines = text.replace("##[", "## [").split("\n")
    return "\n".join(f"| {line}" if line.lstrip().startswith("::") else line for line in lines)


def defused_here(text: str) -> str:
    """Change such lines where this process runs under GitHub Actions."""
    return defused(text) if on_github(os.environ) else text
