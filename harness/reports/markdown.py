"""A run as Markdown, for a pull request: the table first, what explains each config folded under it; pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import PurePath

from harness.gates.threshold import Verdict
from harness.records import Row
from harness.reports.documents import ConfigDocument, Example, RunDocument
from harness.reports.explain import Remark, changes, remarks, shortened
from harness.reports.terminal import COLUMNS, LABELS, NOTHING, notes
from harness.reports.untrusted import code, fenced, html

LIMIT_BYTES = 900 * 1024
"""GitHub takes 1,024 KiB a step, of all that writes to its summary."""
LONGEST_TEXT = 2000
"""Letters of one text of a model; the record holds the rest."""
SHARE_OF_TABLE = 0.6
"""Of the limit, where there are so many configs that their rows alone reach it."""
_ROOM_FOR_NOTE = 200
Link = Callable[[str], str]
"""Names a file of the record in Markdown."""


def render_markdown(run: RunDocument, *, limit_bytes: int = LIMIT_BYTES, link: Link = code) -> str:
    """Render a run in at most so many bytes of UTF-8.

    Where all does not fit, the last configs lose their details, failures after the rest; how many is said. Nothing is
    cut within: no letter, code block or folded part is left open.
    """
    head = _head(run, int(limit_bytes * SHARE_OF_TABLE))
    rest = [config for config in run.configs if config.row.verdict is Verdict.PASS]
    shown, size, left = [head], _bytes(head), 0
    for config in (*run.failed, *rest):
        block = _details(config, run, link)
        if left or size + _bytes(block) > limit_bytes - _ROOM_FOR_NOTE:
            left += 1
            continue
        shown.append(block)
        size += _bytes(block)
    if left:
        shown.append(f"\n{left} configs are left out here, for this may hold {limit_bytes // 1024} KiB.\n")
    text = "".join(shown)
    return text if _bytes(text) <= limit_bytes else text.encode()[:limit_bytes].decode(errors="ignore")


def _bytes(text: str) -> int:
    return len(text.encode())


def headline(run: RunDocument) -> str:
    """Say in one line what became of a run."""
    found = [config.row.verdict for config in run.configs]
    counts = (
        (found.count(Verdict.REGRESSION), "got worse"),
        (found.count(Verdict.INFRASTRUCTURE), "could not be judged"),
        (found.count(Verdict.PASS), "passed"),
        (len(run.skipped), "skipped"),
    )
    return ", ".join(f"{count} {what}" for count, what in counts if count) or "nothing was run"


def _head(run: RunDocument, limit: int) -> str:
    lists = ", ".join(code(PurePath(path).stem) for path in run.lists)
    lines = [f"## accuracy-gate: {headline(run)}", "", *([lists, ""] if lists else [])]
    columns = [c for c in COLUMNS if not c.use or any(c.cell(row) != NOTHING for row in run.rows)]
    lines.append(f"| config | verdict | {' | '.join(c.heading for c in columns)} |")
    lines.append(f"| :-- | :-- |{' --: |' * len(columns)}")
    cells = [(row.config_id, _label(row), *(column.cell(row) for column in columns)) for row in run.rows]
    cells += [(name, f"skipped: {html(reason)}", *("" for _ in columns)) for name, reason in run.skipped.items()]
    lines += _rows_within(cells, limit - _bytes("\n".join(lines)))
    lines += ["", *(f"- {html(note)}" for note in notes(run.rows)[: len(run.configs)]), ""] if _few(run) else [""]
    lines += [*_circumstances(run), ""]
    return "\n".join(lines)


def _few(run: RunDocument) -> bool:
    return len(run.configs) <= 200


def _label(row: Row) -> str:
    return LABELS[row.verdict] if row.verdict is Verdict.PASS else f"**{LABELS[row.verdict]}**"


def _rows_within(cells: Sequence[Sequence[str]], room: int) -> Iterator[str]:
    for number, (name, *others) in enumerate(cells):
        line = f"| {code(name)} | {' | '.join(others)} |"
        room -= _bytes(line) + 1
        if room < 0:
            yield from ("", f"{len(cells) - number} more configs do not fit into this table.")
            return
        yield line


def _circumstances(run: RunDocument) -> Iterator[str]:
    environment = run.run.get("environment", {})
    known = {
        "platform": run.run.get("platform"),
        "GPUs": ", ".join(str(gpu.get("name", "unknown")) for gpu in run.run.get("gpus", ())),
        "commit": environment.get("commit"),
        "record": run.folder,
    }
    yield ", ".join(f"{name} {code(str(value))}" for name, value in known.items() if value)


def _details(config: ConfigDocument, run: RunDocument, link: Link) -> str:
    row = config.row
    lines = ["", f"<details><summary><code>{html(row.config_id)}</code>: {LABELS[row.verdict]}</summary>", ""]
    if row.verdict is Verdict.PASS:
        lines += [f"- {html(shortened(gate['message'], LONGEST_TEXT))}" for gate in config.result["gates"]]
    else:
        lines += [line for remark in remarks(config, run) for line in _remark(remark, link)]
        lines += [*_settings(config, run), *_examples(config), *_log(config)]
    return "\n".join([*lines, "", "</details>", ""])


def _remark(remark: Remark, link: Link) -> Iterator[str]:
    if remark.label in ("answers", "log"):
        return
    if remark.label == "files":
        names = ("result.json", "samples.jsonl", "server.log")
        text = ", ".join(link(f"{remark.text}/{name}") for name in names)
    elif remark.label == "rerun":
        text = code(remark.text)
    else:
        text = html(shortened(remark.text, LONGEST_TEXT))
    yield f"- **{remark.label}** {text}"


def _settings(config: ConfigDocument, run: RunDocument) -> Iterator[str]:
    found = changes(config, run)
    if found is None or not found[1]:
        return
    yield from ("", f"| setting | before ({html(found[0])}) | now |", "| :-- | :-- | :-- |")
    for one in found[1]:
        yield f"| {code(one.name)} | {code(shortened(one.a, LONGEST_TEXT))} | {code(shortened(one.b, LONGEST_TEXT))} |"


def _examples(config: ConfigDocument) -> Iterator[str]:
    if config.row.verdict is not Verdict.REGRESSION:
        return
    for example in config.examples:
        yield from ("", f"**Question {example.index}** ({html(example.status)})")
        for label, text in _parts(example):
            yield from ("", f"{label}:", "", fenced(_clipped(text)))


def _parts(example: Example) -> Iterable[tuple[str, str]]:
    texts = (
        ("question", example.question),
        ("gold", example.gold),
        ("answer", example.text),
        ("read as", example.extracted),
        ("before", example.before),
    )
    return ((label, text) for label, text in texts if text)


def _log(config: ConfigDocument) -> Iterator[str]:
    if config.row.verdict is Verdict.INFRASTRUCTURE and config.log:
        yield from ("", "server.log ends:", "", fenced("\n".join(shortened(line, 500) for line in config.log)))


def _clipped(text: str) -> str:
    """Leave the middle out of a long text: its question stands at the beginning, its answer at the end."""
    if len(text) <= LONGEST_TEXT:
        return text
    half = LONGEST_TEXT // 2
    return f"{text[:half]}\n[… {len(text) - 2 * half} letters …]\n{text[-half:]}"
