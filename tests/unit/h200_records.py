"""Real runs of one model over GSM8K's 1,319 test questions, right or wrong for each; not part of the project."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

VARIABLE = "ACCURACY_GATE_H200_RUNS"
BF16 = [*(f"bf16_{number}" for number in range(1, 6)), "bf16_c100", "bf16_c512", "bf16_0"]
"""One server's runs, without the one that another host made."""
CHANGED = ["fp8_1", "fp8_0", "kv_cache_fp8_0", "fp8_second_host", "kv_cache_fp8_1"]


class Records(dict[str, list[bool]]):
    """The runs by name; a test that asks for one is skipped where they are absent."""

    def __missing__(self, name: str) -> list[bool]:
        reason = f"real runs are not here: name a file of them in {VARIABLE}"
        raise pytest.skip.Exception(reason, allow_module_level=True)


def _read() -> Records:
    named = os.environ.get(VARIABLE)
    runs = json.loads(Path(named).read_text(encoding="utf-8"))["runs"] if named else {}
    return Records({name: [bool(right) for right in run] for name, run in runs.items()})


RUNS = _read()
