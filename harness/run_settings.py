"""What a run was made with, flattened to names and values, so that two runs can be told apart. Pure."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

from harness.baselines import Baseline

GIVEN_NEITHER = "(not given)"
_OWN_FLAGS = {"--host", "--port"}
"""Set anew by the harness for every server."""
_CONTAINER = re.compile(r"accuracy-gate-[0-9a-f]{12}")
_NEGATIVE = re.compile(r"-[0-9.]+")
_DERIVED = ("question texts", "prompts")
_EXPLAINING = {"task", "questions", "worked examples", "gen_prefix", "sampling chat", "sampling fewshot_as_multiturn"}
"""Settings from which the texts and prompts follow: where one of these differs, that is the thing that changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Everything that may make two runs differ; what is not recorded is not in a mapping, or None as a whole."""

    facts: Mapping[str, str] = field(default_factory=dict)
    arguments: Mapping[str, str] | None = None
    """Flags of the server's command line, each with its value; "command" is what stands before them."""
    env: Mapping[str, str] | None = None
    sampling: Mapping[str, Any] | None = None

    @property
    def loose_sampling(self) -> str | None:
        """Why asking again may give other answers, or None where sampling is fixed or not recorded."""
        if self.sampling is None:
            return None
        temperature, seed = self.sampling.get("temperature"), self.sampling.get("seed")
        if temperature is None:
            return "temperature is left to the server"
        if temperature != 0:
            return f"temperature is {temperature:g}"
        return "seed is null" if seed is None else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One setting that is not the same in both runs."""

    name: str
    a: str
    b: str


def differences(a: Settings, b: Settings) -> tuple[Difference, ...]:
    """List the settings that both record and that differ."""
    found = [Difference(name=name, a=a.facts[name], b=b.facts[name]) for name in a.facts if name in b.facts]
    groups = (("", a.arguments, b.arguments), ("env ", a.env, b.env), ("sampling ", a.sampling, b.sampling))
    for prefix, before, after in groups:
        if before is not None and after is not None:
            found += [
                Difference(name=prefix + name, a=_shown(before, name), b=_shown(after, name))
                for name in dict.fromkeys((*before, *after))
            ]
    found = [difference for difference in found if difference.a != difference.b]
    explained = any(difference.name in _EXPLAINING for difference in found)
    return tuple(difference for difference in found if not (explained and difference.name in _DERIVED))


def not_recorded(a: Settings, b: Settings) -> tuple[str, ...]:
    """Name the groups of settings of which nothing can be said, for one run or both do not record them."""
    groups = {
        "server arguments": (a.arguments, b.arguments),
        "server environment": (a.env, b.env),
        "sampling settings": (a.sampling, b.sampling),
    }
    return tuple(name for name, both in groups.items() if None in both)


def settings_of_result(result: Mapping[str, Any], run: Mapping[str, Any]) -> Settings:
    """Collect the settings that a `result.json`, or what there is of one, and its `run.json` hold."""
    task, server = result.get("task", {}), result.get("server", {})
    environment = run.get("environment", {})
    model = result.get("model_name")
    facts = {
        "model": model,
        "revision": server.get("revision"),
        "task": task.get("name"),
        "questions": task.get("questions"),
        "worked examples": _worked_examples(task),
        "gen_prefix": task.get("gen_prefix"),
        "scorer": task.get("scorer"),
        "max_concurrency": task.get("max_concurrency"),
        "question texts": task.get("questions_sha256"),
        "prompts": task.get("prompts_sha256"),
        "server version": server.get("version"),
        "GPUs": _gpus(server["gpus"] if "gpus" in server else run.get("gpus"), run.get("platform")),
        "GPU share": _share(server.get("lease") or {}),
        "harness version": environment.get("harness_version"),
    }
    return Settings(
        facts=_known(facts),
        arguments=_arguments(server, model),
        env=server.get("env"),
        sampling=task.get("sampling"),
    )


def settings_of_baseline(baseline: Baseline) -> Settings:
    """Collect the settings that a baseline is bound to and those it tells of."""
    bound, told = baseline.binding, baseline.circumstances
    facts = {
        "model": bound.get("model"),
        "revision": bound.get("revision"),
        "task": bound.get("task"),
        "questions": bound.get("questions"),
        "scorer": str(bound.get("grader", "unknown")).partition(",")[0],
        "question texts": bound.get("questions_sha256"),
        "prompts": bound.get("prompts_sha256"),
        "server version": told.get("engine_version"),
        "GPUs": _gpus(told.get("gpus"), None),
    }
    command = told.get("command")
    return Settings(
        facts=_known(facts),
        arguments=_arguments({**told, "command": command} if isinstance(command, list) else {}, bound.get("model")),
        env=told.get("env") if isinstance(command, list) else None,
        sampling=bound.get("sampling"),
    )


def _known(facts: Mapping[str, object]) -> dict[str, str]:
    return {name: str(value) for name, value in facts.items() if value not in (None, "", "unknown")}


def _shown(group: Mapping[str, Any], name: str) -> str:
    if name not in group:
        return GIVEN_NEITHER
    value = group[name]
    return value if isinstance(value, str) else json.dumps(value)


def _worked_examples(task: Mapping[str, Any]) -> str | None:
    """Name them by number and content: five of one set are not five of another."""
    if "fewshot" not in task:
        return None
    content = hashlib.sha256(str(task.get("fewshot_prefix", "")).encode()).hexdigest()[:8]
    return f"{task['fewshot']} ({content})" if task["fewshot"] else "0"


def _share(lease: Mapping[str, Any]) -> str | None:
    share = lease.get("share")
    return None if share is None else f"{share:g}, beside {len(lease.get('neighbours') or ())} others"


def _gpus(gpus: object, platform: object) -> str | None:
    if not isinstance(gpus, list):
        return None
    names = [str(gpu.get("name", "unknown")) if isinstance(gpu, dict) else str(gpu) for gpu in gpus]
    if not names:
        return None if platform is None else f"none ({platform})"
    return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))


def _arguments(server: Mapping[str, Any], model: str | None) -> dict[str, str] | None:
    """Read a server's command line as flag and value, less what is new with every start: port, names, places."""
    if not isinstance(server.get("command"), list) or not server["command"]:
        return None
    models = {model, *(entry.get("root") for entry in server.get("models", ()))} - {None}
    port = str(server.get("base_url", "")).rpartition(":")[2]
    port_in_address = re.compile(rf"(?<=:){port}\b|\b{port}(?=:)") if port.isdecimal() else None
    program, *words = map(str, server["command"])
    plain = [PurePath(program).name]
    for word in words:
        shown = "{model}" if word in models else _CONTAINER.sub("{name}", word)
        plain.append(port_in_address.sub("{port}", shown) if port_in_address else shown)
    return {name: value for name, value in _flags(plain).items() if name not in _OWN_FLAGS}


def _flags(words: Sequence[str]) -> dict[str, str]:
    found: dict[str, list[str]] = {}
    name = "command"
    for word in words:
        if word.startswith("-") and not _NEGATIVE.fullmatch(word):
            flag, equals, value = word.partition("=")
            name = flag.replace("_", "-")
            found.setdefault(name, []).extend([value] if equals else [])
        else:
            found.setdefault(name, []).append(word)
    return {name: " ".join(values) for name, values in found.items()}
