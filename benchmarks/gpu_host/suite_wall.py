"""Run the suite once and write what it took: `suite_wall.py NAME LIST FOLDER -- [pytest options …]`.

FOLDER/NAME.json holds wall clock, GPU-seconds, memory before and after, what was left, and a row for each config.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from gpu_watch import GpuWatch
from suite_process import SuiteProcess


def row(result: dict[str, Any]) -> dict[str, Any]:
    """Pick what tables show of one result."""
    accepted = result["acceptance"] or {}
    return {
        "id": result["config_id"],
        "verdict": result["verdict"],
        "reason": result["reason"],
        "accuracy": result["accuracy"],
        "floor": result["floor"],
        "asked": result["counts"]["asked"],
        "errors": result["counts"]["errors"],
        "acceptance_length": accepted.get("length"),
        "measures": result["measures"],
        "startup": result["timings"]["startup"],
        "asking": result["timings"]["asking"],
        "started": result["started"],
        "finished": result["finished"],
        "gpus": result["server"].get("lease", {}).get("gpus", []),
        "seconds_waited": result["server"].get("lease", {}).get("seconds_waited"),
        "started_again": result["server"].get("started_again", []),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name")
    parser.add_argument("list", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--within", type=float, default=540.0, help="seconds; then it is interrupted (%(default)s)")
    given = sys.argv[1:]
    # argparse cannot tell pytest's options from its own, even after `--`.
    end = given.index("--") if "--" in given else len(given)
    arguments, options = parser.parse_args(given[:end]), given[end + 1 :]
    results = arguments.folder / arguments.name
    with GpuWatch() as watch:
        began = time.monotonic()
        with SuiteProcess(arguments.list, results, *options) as suite:
            code = suite.wait(arguments.within)
            wall = time.monotonic() - began
        left = [f"{process.pid} {process.name()}" for process in suite.left()]
    document = {
        "name": arguments.name,
        "command": " ".join(suite.command[1:]),
        "options": options,
        "exit_code": code,
        "wall_seconds": round(wall, 2),
        "left": left,
        **watch.facts(),
        "configs": [row(result) for result in suite.rows()],
        "skipped": skipped(suite),
    }
    path = arguments.folder / f"{arguments.name}.json"
    path.write_text(json.dumps(document, indent=2), encoding="utf-8")
    print(suite.output[-6000:])
    sys.exit(124 if code is None else code)


def skipped(suite: SuiteProcess) -> dict[str, str]:
    """Read which configs did not run, and why."""
    record = suite.record
    if record is None:
        return {}
    found: dict[str, str] = json.loads((record / "run.json").read_text(encoding="utf-8")).get("skipped", {})
    return found


if __name__ == "__main__":
    main()
