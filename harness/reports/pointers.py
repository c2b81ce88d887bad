"""What a record holds so that reports can point back: where gates are written, how to run one config again. Pure."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from harness.config_lists import ListedConfig
from harness.platforms import override_layers
from harness.redaction import redact_argv
from harness.serving import RunOptions
from harness.yaml_source import Location

GATE_KEYS: Mapping[str, str] = {
    "accuracy": "accuracy_threshold",
    "errors": "max_error_rate",
    "acceptance length": "min_acceptance_length",
    "paired": "gate",
    "flip rate": "max_flip_rate",
    "bits per byte": "max_bits_per_byte",
    "bits per byte increase": "max_bits_per_byte_increase",
    "prefix cache": "prefix_cache_check",
    "KV offload": "kv_offload_check",
    "startup check": "startup_rpc_checks",
}
"""The key of a config that asks for a gate, by the gate's name less what is particular to one result."""
SUITE = "tests/test_accuracy.py::test_accuracy"
_EXPRESSION = re.compile(r"[\w:+\-.\[\]\\/]+")
"""What `pytest -k` takes for one word."""


def gate_key(gate: str) -> str:
    """Name the key that asks for a gate; accuracy's for a gate that has none of its own."""
    name = gate.partition(",")[0]
    begun = next((key for start, key in GATE_KEYS.items() if name.startswith(f"{start} ")), "accuracy_threshold")
    return GATE_KEYS.get(name, begun)


def places(entry: ListedConfig) -> dict[str, Any]:
    """Say where a config's file writes each gate, as line and column from 1; `model_name` stands for the file."""
    source, found = entry.file.source, {}
    for key in ("model_name", *dict.fromkeys(GATE_KEYS.values())):
        location = _location(entry, key)
        if location is not None:
            at = source.position(location)
            found[key] = [at.line, at.column]
    return {"path": str(entry.path), "keys": found}


def _location(entry: ListedConfig, key: str) -> Location | None:
    """Find where the value that holds is written: in the task's row, in an override, or at the top."""
    candidates: list[Location] = []
    rows = entry.file.source.data.get("tasks") or []
    if entry.task is not None:
        candidates.append(("tasks", entry.file.task_names.index(entry.task), key))
    candidates += [(*layer.location, key) for layer in reversed(override_layers(entry.file.source.data))]
    candidates.append((key,))
    written = [place for place in candidates if place in entry.file.source.positions]
    holding = [place for place in written if _value(entry, rows, place) == getattr(entry.config, key)]
    return next(iter(holding or written), None)


def _value(entry: ListedConfig, rows: Sequence[Any], place: Location) -> Any:
    value: Any = entry.file.source.data
    for part in place:
        value = value[part]
    return value


def options_given(options: RunOptions) -> list[str]:
    """Spell the options that decide how configs are run, with secrets masked."""
    given = {
        "--backend": options.backend,
        "--base-url": options.base_url,
        "--data-dir": options.data_dir,
        "--serve-command": options.serve_command,
        "--gpus": options.gpu_choice,
    }
    return redact_argv(
        [f"{name}={value}" for name, value in given.items() if value is not None]
        + (["--require-gpus"] if options.require_gpus else [])
    )


def rerun(config_id: str, lists: Sequence[str], options: Sequence[str]) -> str:
    """Spell the command that runs one config alone."""
    words = ["pytest", *(f"--config-list-file={path}" for path in lists), *options]
    name = f"[{config_id.encode('unicode_escape').decode('ascii')}]"
    # Only the brackets make -k exact: it looks for a part of the name.
    words += ["-k", name] if _EXPRESSION.fullmatch(name) else [f"{SUITE}{name}"]
    return shlex.join(words)
