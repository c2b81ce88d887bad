"""Write what `accuracy-gate calibrate` found into a YAML: `store_calibration.py YAML LOG [--task NAME]`.

LOG is what calibrate printed. Writes threshold, tolerance and `baseline:`, for a
task into its row (gsm8k's stand at the top level), and for perplexity the bound.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

from harness.commands.calibrate_command import with_values
from harness.config import load_config_file
from harness.records import write_text

ROOM_IN_BITS = 1.02
"""Bits per byte that are let pass beyond the measured: numeric noise, and what other kernels change."""


def found_in(log: str) -> dict[str, str]:
    """Read threshold and tolerance from what calibrate printed.

    Raises ValueError where it printed none.
    """
    found = {key: re.search(rf"^{key} (\S+) \(was", log, re.MULTILINE) for key in ("threshold", "tolerance")}
    if not all(found.values()):
        raise ValueError("calibrate printed no threshold and tolerance")
    values = {key: match[1] for key, match in found.items() if match}
    # Of very few questions the noise may explain everything.
    return {"accuracy_threshold": values["threshold"], "tolerance": str(min(float(values["tolerance"]), 1.0))}


def in_row(text: str, task: str, values: dict[str, str]) -> str:
    """Replace keys in the row of `tasks` that begins with the task's name."""
    head, mark, tail = text.partition(f"  - task: {task}\n")
    row = re.match(r"(?:    .*\n)*", tail)
    if not mark or row is None:
        raise ValueError(f"no row of tasks begins with task: {task}")
    keys = row[0]
    for key, value in values.items():
        keys = re.sub(rf"^(    {key}: ).*$", rf"\g<1>{value}", keys, flags=re.MULTILINE)
    return head + mark + keys + tail[row.end() :]


def with_baseline(text: str, baseline: str, after: str) -> str:
    """Name a baseline after the line that begins so, unless one is named already."""
    indent = " " * (4 if after.startswith(" ") else 0)
    if re.search(rf"^{after}.*\n(?:{indent}\w.*\n)*{indent}baseline:", text, re.MULTILINE):
        return text
    return re.sub(rf"^({after}.*)$", rf"\g<1>\n{indent}baseline: {baseline}", text, count=1, flags=re.MULTILINE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("yaml", type=Path)
    parser.add_argument("log", type=Path, nargs="?", help="what calibrate printed")
    parser.add_argument("--task", help="the row of tasks; gsm8k stands at the top level")
    parser.add_argument("--perplexity", type=Path, metavar="RESULT", help="a result.json of perplexity instead")
    arguments = parser.parse_args()
    text = arguments.yaml.read_text(encoding="utf-8")
    if arguments.perplexity is not None:
        measures = json.loads(arguments.perplexity.read_text(encoding="utf-8"))["measures"]
        text = in_row(text, "perplexity", {"max_bits_per_byte": f"{measures['bits_per_byte'] * ROOM_IN_BITS:.4f}"})
    else:
        values = found_in(arguments.log.read_text(encoding="utf-8"))
        if arguments.task not in (None, "gsm8k"):
            text = in_row(text, arguments.task, values)
            baseline = f"baselines/{arguments.yaml.stem}-{arguments.task}.json"
            text = with_baseline(text, baseline, f"  - task: {arguments.task}")
        else:
            text = with_values(text, values)
            name = arguments.yaml.stem + ("-gsm8k" if arguments.task else "")
            # At the top level it would hold for all tasks, which were asked something else.
            after = "  - name: gsm8k" if arguments.task else "tolerance:"
            text = with_baseline(text, f"baselines/{name}.json", after)
    write_text(arguments.yaml, text)
    load_config_file(arguments.yaml)
    print(f"{arguments.yaml}: written")


if __name__ == "__main__":
    main()
