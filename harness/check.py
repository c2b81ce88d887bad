"""What is wrong with configs that load: gates that cannot hold or cannot fail, and configs that disagree; pure."""

from __future__ import annotations

import json
import math
import re
import shlex
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from enum import StrEnum
from pathlib import Path

from harness.config import ModelConfig
from harness.config_lists import ListedConfig
from harness.errors import Position
from harness.platforms import Layer, apply_layers, override_layers, written_at
from harness.yaml_source import Location

WIDE_TOLERANCE = 0.03
STANDARD_ERRORS = 2
"""Of the binomial formula; a tolerance of fewer fails an unchanged model more than once in 50 draws of questions."""


class Severity(StrEnum):
    """An error cannot work as written; a warning is for a person to judge; a note is true and often meant."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that is wrong, on one line."""

    where: str
    """File, line and column as far as they are known."""
    severity: Severity
    message: str

    @classmethod
    def from_fault(cls, fault: str, severity: Severity) -> Finding:
        """Take one line of a ConfigError."""
        where, _, message = fault.partition(": ")
        return cls(where=where, severity=severity, message=message)

    def __str__(self) -> str:
        return f"{self.where}: {self.severity}: {self.message}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Variant:
    """A config as it holds where one of its overrides does."""

    entry: ListedConfig
    config: ModelConfig
    questions: int | None
    layers: tuple[Layer, ...] = ()

    def finding(self, key: str, severity: Severity, message: str) -> Finding:
        at = where_written(self.entry, key, self.layers)
        return Finding(where=str(at), severity=severity, message=message)


def check_config(entry: ListedConfig, questions: int) -> Iterator[Finding]:
    """Find what one config gets wrong, in itself or under any of its overrides.

    `questions` is how many it asks where no override holds.
    """
    found: list[Finding] = []
    for variant in _variants(entry, questions):
        for rule in (_floor_at_zero, _tolerance_below_noise, _acceptance_without_drafts, _no_room_for_a_prompt):
            found.extend(rule(variant))
    yield from dict.fromkeys(found)


def _variants(entry: ListedConfig, questions: int) -> Iterator[_Variant]:
    base = entry.config
    yield _Variant(entry=entry, config=base, questions=questions)
    for layer in override_layers(entry.file.raw):
        merged = apply_layers(entry.file.raw, [layer])
        row = merged["tasks"][entry.file.task_names.index(entry.task)] if entry.task else {}
        own = {key: value for key, value in row.items() if key != "name"}
        config = ModelConfig.model_validate({**merged, **own, "tasks": []})
        same_rows = (config.task, config.dataset, config.num_questions) == (base.task, base.dataset, base.num_questions)
        asked = questions if same_rows else config.num_questions
        yield _Variant(entry=entry, config=config, questions=asked, layers=(layer,))


def where_written(entry: ListedConfig, key: str | None = None, layers: Sequence[Layer] = ()) -> Position:
    """Find where a config has a key from: the row of its task, an override, or the file; else where it begins."""
    source = entry.file.source
    row: Location = ("tasks", entry.file.task_names.index(entry.task)) if entry.task else ()
    if key is None or (row and (*row, key) in source.positions):
        return source.position(row if key is None else (*row, key))
    return source.position(written_at((key,), layers))


def _floor_at_zero(variant: _Variant) -> Iterator[Finding]:
    config = variant.config
    if config.task != "perplexity" and config.floor <= 0:
        said = f"accuracy_threshold {config.accuracy_threshold} less tolerance {config.tolerance} is {config.floor}"
        yield variant.finding("accuracy_threshold", Severity.WARNING, f"the floor cannot fail: {said}")


def _tolerance_below_noise(variant: _Variant) -> Iterator[Finding]:
    config, n = variant.config, variant.questions
    # With a baseline the questions are the same each time: what runs differ by is less, and calibrate has measured it.
    if n is None or config.task == "perplexity" or config.baseline is not None:
        return
    share = config.accuracy_threshold
    noise = STANDARD_ERRORS * math.sqrt(share * (1 - share) / n)
    if config.tolerance < noise:
        message = (
            f"tolerance {config.tolerance} is under the noise: {STANDARD_ERRORS} binomial standard errors are "
            f"{noise:.3f} at {n} questions; raise it or ask more"
        )
        yield variant.finding("tolerance", Severity.WARNING, message)


def _acceptance_without_drafts(variant: _Variant) -> Iterator[Finding]:
    config = variant.config
    if config.min_acceptance_length is not None and not _may_draft(config):
        message = "min_acceptance_length needs speculative decoding: server_args hold no --speculative-config"
        yield variant.finding("min_acceptance_length", Severity.ERROR, message)


def _may_draft(config: ModelConfig) -> bool:
    """Say whether the server may use speculative decoding, as far as can be seen from here."""
    if "speculator" in config.model_name.lower():  # such a checkpoint brings its draft model and its settings along
        return True
    names = [name for name, _ in read_flags((*config.arguments, *shlex.split(config.serve_command or "")))]
    return any(name.startswith("--spec") or name == "--config" for name in names)


def _no_room_for_a_prompt(variant: _Variant) -> Iterator[Finding]:
    config = variant.config
    context = _max_model_len(config)
    if context is not None and config.max_tokens >= context:
        message = f"max_tokens {config.max_tokens} leaves no room for a prompt in --max-model-len {context}"
        key = "max_tokens" if "max_tokens" in config.model_fields_set else "server_args"
        yield variant.finding(key, Severity.ERROR, message)


_LENGTH = re.compile(r"(\d+)|(\d+(?:\.\d+)?)([kmgt])|(\d+)([KMGT])")


def _max_model_len(config: ModelConfig) -> int | None:
    """Read the context that server_args ask for, None where they leave it to vLLM."""
    said = [values for name, values in read_flags(config.arguments) if name == "--max-model-len"]
    written = _LENGTH.fullmatch(said[-1][0]) if said and said[-1] else None
    if written is None:
        return None
    plain, decimal, decimal_unit, binary, binary_unit = written.groups()
    if decimal:
        return int(Decimal(decimal) * 1000 ** ("kmgt".index(decimal_unit) + 1))
    return int(plain) if plain else int(binary) * 1024 ** ("KMGT".index(binary_unit) + 1)


_NEGATIVE = re.compile(r"-\d+(?:\.\d+)?")
_SPELLINGS = {
    "-tp": "--tensor-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-dp": "--data-parallel-size",
    "-ep": "--enable-expert-parallel",
    "-sc": "--speculative-config",
    "-q": "--quantization",
}
Flag = tuple[str, tuple[str, ...]]


def read_flags(arguments: Sequence[str]) -> list[Flag]:
    """Read each flag of a command line with the words after it, whichever way vLLM lets it be spelled."""
    flags: list[Flag] = []
    for word in arguments:
        if word.startswith("-") and not _NEGATIVE.fullmatch(word):
            written, equals, value = word.partition("=")
            head, dot, tail = written.partition(".")
            flags.append((_whole(head) + dot + tail, (_canonical(value),) if equals else ()))
        elif flags:
            name, values = flags[-1]
            flags[-1] = (name, (*values, _canonical(word)))
    return flags


def _whole(name: str) -> str:
    name = name.replace("_", "-") if name.startswith("--") else name
    shortened = name.startswith("--max-mo") and "--max-model-len".startswith(name)
    return "--max-model-len" if shortened else _SPELLINGS.get(name, name)


def _canonical(value: str) -> str:
    if not value.startswith(("{", "[")):
        return value
    try:
        return json.dumps(json.loads(value), sort_keys=True)
    except ValueError:
        return value


def wide_tolerances(list_path: Path, entries: Sequence[ListedConfig]) -> Iterator[Finding]:
    """Note once for a list how much its configs let pass."""
    wide = [entry.config.tolerance for entry in entries if entry.config.tolerance > WIDE_TOLERANCE]
    if wide:
        message = (
            f"a tolerance over {WIDE_TOLERANCE} in {len(wide)} of {len(entries)}: "
            f"a loss of up to {100 * max(wide):.3g} points passes"
        )
        yield Finding(where=str(Position(path=list_path, line=1, column=1)), severity=Severity.NOTE, message=message)


def duplicates(entries: Sequence[ListedConfig]) -> Iterator[Finding]:
    """Find configs that say the same, in these words or others."""
    for first, *others in _groups(entries, _meaning):
        for other in others:
            message = f"says the same as {where_written(first)}: a model is tried twice for one answer"
            yield Finding(where=str(where_written(other)), severity=Severity.WARNING, message=message)


def contradictions(entries: Sequence[ListedConfig]) -> Iterator[Finding]:
    """Find a model that two configs serve and ask alike, where what one of them expects fails the other."""
    for group in _groups(entries, _served_and_asked):
        strict = max(group, key=lambda entry: entry.config.floor)
        low = min(group, key=lambda entry: entry.config.accuracy_threshold)
        if Decimal(str(low.config.accuracy_threshold)) < strict.config.floor:
            message = (
                f"accuracy_threshold {strict.config.accuracy_threshold} has the floor {strict.config.floor}, but the "
                f"same model, served and asked alike, is expected at {low.config.accuracy_threshold} in "
                f"{where_written(low, 'accuracy_threshold')}"
            )
            at = where_written(strict, "accuracy_threshold")
            yield Finding(where=str(at), severity=Severity.WARNING, message=message)


def _groups(
    entries: Sequence[ListedConfig], key: Callable[[ListedConfig], Hashable]
) -> Iterator[tuple[ListedConfig, ...]]:
    groups: dict[Hashable, list[ListedConfig]] = defaultdict(list)
    for entry in entries:
        groups[key(entry)].append(entry)
    return (tuple(group) for group in groups.values() if len(group) > 1)


def _meaning(entry: ListedConfig) -> Hashable:
    return _said(entry, leave_out=()), _sorted(read_flags(entry.config.arguments))


_NOT_QUALITY = (
    *("accuracy_threshold", "tolerance", "max_error_rate", "min_acceptance_length", "max_seconds", "seed", "env"),
    *("max_concurrency", "request_timeout_seconds", "rocm_request_timeout_seconds", "startup_max_wait_seconds"),
    *("startup_rpc_checks", "num_gpus", "skip", "overrides", "trust_remote_code"),
    *("prefix_cache_check", "kv_offload_check", "gpu_share", "tokenizer"),
    *("max_bits_per_byte", "max_bits_per_byte_increase", "numeric_noise"),
)
"""Keys that say how a model is run or judged. What is not named here may move an accuracy, new keys included."""
_HOW_IT_RUNS = re.compile(
    r"--(?:tensor|pipeline|data|expert|prefill-context|decode-context)-parallel|--(?:no-)?enable-expert-parallel"
    r"|--(?:no-)?enable-eplb$|--eplb-config|--(?:moe|attention|mamba|all2all)-backend$|--(?:no-)?enforce-eager$"
    r"|--max-(?:model-len|num-seqs|num-batched-tokens)$|--gpu-memory-utilization$|--block-size$|--swap-space$"
    r"|--(?:no-)?async-scheduling$|--(?:no-)?enable-(?:prefix-caching|chunked-prefill)$|--spec|--worker-extension-cls$"
    r"|--distributed-executor-backend$|--nnodes$|--node-rank$|--trust-remote-code$|--disable-uvicorn-access-log$"
    r"|--served-model-name$|--seed$"
)
"""Flags that may not move an accuracy by a tolerance. With any other that differs, two thresholds may differ too."""


_PRECISION = re.compile(r"QUANT|DTYPE|PRECISION")
"""In the name of a variable that may move an accuracy; most others choose kernels."""


def _served_and_asked(entry: ListedConfig) -> Hashable:
    config = entry.config
    flags = [flag for flag in read_flags(config.arguments) if not _HOW_IT_RUNS.match(flag[0])]
    variables = sorted(item for item in config.env.items() if _PRECISION.search(item[0]))
    return _said(entry, leave_out=_NOT_QUALITY), _sorted(flags), tuple(variables)


def _said(entry: ListedConfig, *, leave_out: Sequence[str]) -> str:
    """Render what a config says besides its server_args, its data by where they lie."""
    config = entry.config
    said = config.model_dump(mode="json", exclude={"server_args", *leave_out})
    for key in ("dataset", "fewshot_dataset"):
        if said[key] is not None:
            said[key] = str(entry.path.parent / said[key])
    if config.dataset is None:
        said["num_questions"] = config.num_questions or config.available_questions
    return json.dumps(said, sort_keys=True)


def _sorted(flags: Sequence[Flag]) -> tuple[Flag, ...]:
    """Order flags by name alone: of one that stands twice the last counts."""
    return tuple(sorted(flags, key=lambda flag: flag[0]))
