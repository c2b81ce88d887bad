"""The process that evaluates one server's configs on a cluster's node; ends with the Ray worker that started it."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from harness.config_lists import ListedConfig
from harness.errors import ConfigError
from harness.gates.threshold import Counts
from harness.on_ray.node import EVENTS, FILES, RECORD, SETTINGS
from harness.pipeline import evaluate
from harness.records import RunRecord
from harness.servers.leftovers import sweep_dead_runs
from harness.serving import RunOptions, Serving
from harness.suite import Suite, prepare

INTERRUPTED, REFUSED = 2, 4
PR_SET_PDEATHSIG = 1


class Journal:
    """Says what happens, a JSON line at a time."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def say(self, **facts: Any) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(facts) + "\n")


class Stages:
    """Tells the journal how far one config has come."""

    def __init__(self, config_id: str, journal: Journal) -> None:
        self._config_id = config_id
        self._journal = journal

    def stage(self, text: str) -> None:
        self._journal.say(config=self._config_id, stage=text)

    def answered(self, counts: Counts, total: int) -> None: ...

    def close(self) -> None: ...


def main(argv: list[str]) -> int:
    scratch, worker = Path(argv[0]), int(argv[1])
    signal.signal(signal.SIGTERM, _interrupt)
    journal = Journal(scratch / EVENTS)
    try:
        _end_with(worker)
        _evaluate(scratch, journal)
    except KeyboardInterrupt as error:
        journal.say(interrupted=str(error))
        return INTERRUPTED
    except ConfigError as error:
        for fault in error.faults:
            journal.say(fault=fault.replace(f"{scratch / FILES}/", ""))
        return REFUSED
    return 0


def _interrupt(signum: int, frame: object) -> None:
    raise KeyboardInterrupt(signal.Signals(signum).name)


def _end_with(worker: int) -> None:
    """Get SIGTERM when the worker dies, which on a lost node is the only word that comes."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != worker:
        raise KeyboardInterrupt("the Ray worker is gone")


def _evaluate(scratch: Path, journal: Journal) -> None:
    settings = json.loads((scratch / SETTINGS).read_text(encoding="utf-8"))
    for left in sweep_dead_runs().killed:
        journal.say(note=f"left by a dead run, killed now: {left}")
    suite = _prepared(scratch, settings)
    journal.say(
        platform=", ".join(sorted({str(placement.platform) for placement in suite.placements})) or "unknown",
        gpus=[asdict(gpu) for gpu in suite.options.gpus],
    )
    owed = [entry for entry in suite.listed if entry.id in settings["ids"]]
    record = RunRecord(scratch / RECORD)
    log_path = record.folder / owed[0].server_id / "server.log"
    with Serving(owed[0].config, log_path, suite.options) as serving:
        serving.say = lambda text: journal.say(config=owed[0].server_id, stage=text)
        for entry in owed:
            _evaluate_one(entry, record, suite, serving, journal)


def _prepared(scratch: Path, settings: Mapping[str, Any]) -> Suite:
    """Read and check the configs here, for their platform's overrides and GPUs are this node's."""
    data_dir = settings["data_dir"]
    options = RunOptions(data_dir=scratch / data_dir if data_dir else None, **settings["options"])
    return prepare([str(scratch / settings["list"])], suite_root=scratch, cwd=scratch, options=options, starting=True)


def _evaluate_one(entry: ListedConfig, record: RunRecord, suite: Suite, serving: Serving, journal: Journal) -> None:
    reason = entry.skip or (entry.unmet if not suite.options.require_gpus else None)
    if reason is not None:
        journal.say(config=entry.id, skipped=reason)
        return
    evaluate(entry, record.config(entry.folder), suite.options, Stages(entry.id, journal), serving)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
