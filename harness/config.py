"""ModelConfig: one YAML file, checked."""

from __future__ import annotations

import difflib
import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

from harness.backends.registry import flags_of
from harness.config_rules import faults
from harness.config_types import Count, Env, Seconds, ServeCommand, ServerArgs, Share, TaskRows, task_names
from harness.engine_settings import EngineSettings
from harness.errors import ConfigError
from harness.gates.sequential import StopRule
from harness.parallelism import gpus_needed, sglang_gpus_needed
from harness.platforms import (
    Layer,
    Overrides,
    Platform,
    PlatformRequirements,
    SkipRow,
    apply_layers,
    override_layers,
    written_at,
)
from harness.scoring_keys import ScoringKeys
from harness.yaml_source import Location, YamlSource, read_yaml

ROWS = {"gsm8k": 1319, "smoke": 20, "checks": 20, "choice": 40, "perplexity": 30}
"""How many questions each set has that needs no `dataset`."""


class Scorer(StrEnum):
    """Which reading of a reply decides whether it is right."""

    NUMERIC = "numeric"
    LAST_NUMBER = "last-number"


class ModelConfig(ScoringKeys):
    """A model, how it is served, what it is asked and what must hold."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, allow_inf_nan=False, title="accuracy-gate config"
    )

    model_name: str = Field(
        min_length=1, description="What vLLM is told to serve: a hub name, a folder, or embedded:NAME."
    )
    accuracy_threshold: Share = Field(
        default=0.0, description="The accuracy this model is known to reach, 0 to 1; only perplexity can do without."
    )
    tolerance: Share = Field(default=0.08, description="Absolute; the floor is accuracy_threshold - tolerance.")
    task: Literal["gsm8k", "smoke", "checks", "choice", "perplexity"] = Field(
        default="gsm8k", description="Which questions are asked; `checks` are prompts with a check each, in chat."
    )
    backend: str = Field(
        default="vllm",
        min_length=1,
        description="What answers: vllm, vllm-offline, transformers, sglang, sglang-offline, openai, or one of others.",
    )
    engine: EngineSettings = Field(
        default_factory=EngineSettings, description="Settings that engines share, translated to each one's own."
    )
    num_questions: Count | None = Field(default=None, description="The first N questions; all of them where left out.")
    num_fewshot: Annotated[int, Field(ge=0)] = Field(default=5, description="Worked examples put before each question.")
    max_tokens: Count = Field(default=256, description="Longest reply, in tokens.")
    use_chat_completions: bool = Field(
        default=False, description="Ask /v1/chat/completions instead of /v1/completions."
    )
    temperature: Annotated[float, Field(ge=0)] | None = Field(
        default=0.0, description="Sampling temperature; null leaves it to the server."
    )
    seed: int | None = Field(default=42, description="Sampling seed; null leaves it out of the request.")
    top_p: Annotated[float, Field(gt=0, le=1)] | None = Field(
        default=None, description="Left to the server where left out."
    )
    top_k: Annotated[int, Field(ge=-1)] | None = Field(default=None, description="Left to the server where left out.")
    gen_prefix: str = Field(default="", description="Text right after each `Answer:`.")
    stop: list[str] | None = Field(
        default=None,
        description="Stop strings; by default a new question at a line start for completions, none in chat.",
    )
    scorer: Scorer = Field(
        default=Scorer.NUMERIC,
        strict=False,
        description="Which reading gates; `last-number` is vLLM's, with vLLM's stop strings.",
    )
    reasoning_effort: str | None = Field(default=None, description="Chat only: sent as `reasoning_effort`.")
    chat_template_kwargs: dict[str, Any] | None = Field(default=None, description="Chat only: sent as they are.")
    fewshot_as_multiturn: bool = Field(
        default=False, description="Chat only: each worked example is a turn of user and assistant."
    )
    dataset: str | None = Field(default=None, description="Your own questions: a JSONL file, relative to this YAML.")
    fewshot_dataset: str | None = Field(default=None, description="Worked examples for `dataset`, likewise.")
    max_concurrency: Count = Field(default=256, description="Requests under way at once.")
    request_timeout_seconds: Seconds = Field(default=600.0, description="For one request, from when it is sent.")
    startup_max_wait_seconds: Seconds = Field(default=1200.0, description="From the server's start until it is ready.")
    min_acceptance_length: Annotated[float, Field(ge=1)] | None = Field(
        default=None, description="Speculative decoding: 1 + accepted draft tokens / drafts must reach this."
    )
    baseline: str | None = Field(
        default=None, description="A stored baseline to pair this with, relative to this YAML."
    )
    gate: Literal["threshold", "paired"] = Field(
        default="threshold", description="`paired` judges every question against the baseline, beside the floor."
    )
    alpha: Annotated[float, Field(gt=0, le=0.5)] = Field(
        default=0.001, description="How often the paired gate and early stopping may be wrong by chance."
    )
    margin: Share = Field(default=0.005, description="Paired: a loss up to this is let pass.")
    max_repeats: Count = Field(
        default=3, description="Paired: how often the questions are asked where one pass is unclear."
    )
    max_flip_rate: Share | None = Field(
        default=None, description="Answers that may change against the baseline beyond what its own runs show."
    )
    stop_early: StopRule | None = Field(
        default=None,
        strict=False,
        description="Stop asking once the verdict is certain (exact) or all but certain (sequential, to `alpha`).",
    )
    max_error_rate: Share = Field(default=0.0, description="More requests without an answer than this is an outage.")
    server_args: ServerArgs = Field(default="", description="Further arguments of `vllm serve`, as in a shell.")
    env: Env = Field(default_factory=dict, description="Environment variables of the server.")
    max_seconds: Seconds | None = Field(
        default=None, description="For the whole config, start included; an outage when they are over."
    )
    prefix_cache_check: bool = Field(
        default=False,
        description="Ask again with a warm prefix cache: the answers must stay as they were, but for noise.",
    )
    kv_offload_check: bool = Field(
        default=False, description="Ask again from the offloaded KV cache alone: it must be used, and the floor be met."
    )
    startup_rpc_checks: list[str] = Field(
        default_factory=list, description="Worker methods called over vLLM's development endpoint after the start."
    )
    serve_command: ServeCommand | None = Field(
        default=None,
        description="How the server is started, with {model}, {host}, {port} and {args}; `vllm serve` where left out.",
    )
    tasks: TaskRows = Field(
        default_factory=list,
        description="Several tasks on one server: rows of keys that differ from the above, each with a task or name.",
    )
    num_gpus: Count | None = Field(
        default=None, description="GPUs of this machine; by default what the parallel sizes in server_args ask for."
    )
    gpu_share: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        default=None, description="Share of one GPU that is enough, where several configs run at once."
    )
    platforms: PlatformRequirements | None = Field(
        default=None, description="Where this runs: cuda, cuda>=9.0, rocm:gfx942, xpu, tpu, cpu; everywhere by default."
    )
    skip: list[SkipRow] = Field(default_factory=list, description="Where this does not run, and why.")
    overrides: Overrides = Field(default_factory=dict, description="Keys that differ on a platform.")
    rocm_request_timeout_seconds: Seconds | None = Field(
        default=None, description="vLLM's key for overrides: {rocm: {request_timeout_seconds: …}}."
    )
    trust_remote_code: bool = Field(default=True, description="Add --trust-remote-code, as vLLM's own suite does.")

    @model_validator(mode="after")
    def _fits(self) -> Self:
        for fault in faults(self):
            raise fault
        return self

    @property
    def available_questions(self) -> int:
        return ROWS[self.task]

    @property
    def floor(self) -> Decimal:
        """The lowest accuracy that passes, exact."""
        return Decimal(str(self.accuracy_threshold)) - Decimal(str(self.tolerance))

    @property
    def gpus(self) -> int:
        """How many GPUs of this machine the server takes."""
        if self.num_gpus is not None:
            return self.num_gpus
        match flags_of(self.backend):
            case "vllm":
                return gpus_needed(self.arguments)
            case "sglang":
                return sglang_gpus_needed(self.arguments)
            case _:
                return self.engine.tensor_parallel_size or 1

    @property
    def own_arguments(self) -> tuple[str, ...]:
        """`server_args` as the shell would split them."""
        return tuple(shlex.split(self.server_args))

    @property
    def arguments(self) -> tuple[str, ...]:
        """`server_args`, then `engine`, as arguments of the backend's command line; none where it has none."""
        flags = flags_of(self.backend)
        return self.own_arguments + (self.engine.flags(flags) if flags is not None else ())


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigFile:
    """One YAML file, read and checked on every platform it speaks of."""

    source: YamlSource
    raw: Mapping[str, Any]
    config: ModelConfig
    """What holds where no override does."""

    @property
    def path(self) -> Path:
        return self.source.path

    @property
    def task_names(self) -> tuple[str | None, ...]:
        """The names of its tasks; one without a name where `tasks` is left out."""
        return task_names(self.raw.get("tasks") or []) or (None,)

    def on(self, platform: Platform | None, task: str | None = None) -> ModelConfig:
        """Merge the overrides that hold on a platform, and the row of a task.

        Raises ConfigError where an override's requirement cannot be decided there.
        """
        layers = override_layers(self.raw) if platform else ()
        holding = [layer for layer in layers if platform and layer.requirement.matches(platform)]
        return _validated(self.source, self.raw, holding, task)


def load_config_file(path: Path) -> ConfigFile:
    """Read one YAML file; every override and every task must make a valid config, on whatever machine it is read.

    Raises ConfigError with one line per fault: file, line, column, key, and the nearest valid key for an unknown one.
    """
    source = read_yaml(path)
    raw = _with_env_as_written(source)
    file = ConfigFile(source=source, raw=raw, config=_validated(source, raw, ()))
    for task in file.task_names:
        for layer in ((), *((layer,) for layer in override_layers(raw))):
            _validated(source, raw, layer, task)
    return file


def load_config(path: Path) -> ModelConfig:
    """Read one YAML file as it holds where no override does; see `load_config_file`."""
    return load_config_file(path).config


def _validated(
    source: YamlSource, raw: Mapping[str, Any], layers: Sequence[Layer], task: str | None = None
) -> ModelConfig:
    merged = apply_layers(raw, layers) if layers else dict(raw)
    row: Location = ()
    if task is not None:
        index = task_names(merged["tasks"]).index(task)
        row = ("tasks", index)
        merged = {**merged, **{key: v for key, v in merged["tasks"][index].items() if key != "name"}, "tasks": []}
    try:
        return ModelConfig.model_validate(merged)
    except ValidationError as error:
        raise ConfigError(*_faults(error, source, layers, row)) from error


def _with_env_as_written(source: YamlSource) -> dict[str, Any]:
    """Numbers in `env` reach the server spelled as the file spells them: `1.10` stays 1.10."""
    data = dict(source.data)
    if isinstance(data.get("env"), dict):
        data["env"] = _as_written(source, data["env"], ("env",))
    overrides = data.get("overrides")
    if isinstance(overrides, dict):
        data["overrides"] = {
            key: {**keys, "env": _as_written(source, keys["env"], ("overrides", key, "env"))}
            if isinstance(keys, dict) and isinstance(keys.get("env"), dict)
            else keys
            for key, keys in overrides.items()
        }
    return data


def _as_written(source: YamlSource, env: Mapping[str, Any], location: Location) -> dict[str, Any]:
    return {
        name: source.texts[(*location, name)] if isinstance(value, int | float) and value is not bool(value) else value
        for name, value in env.items()
    }


def _faults(error: ValidationError, source: YamlSource, layers: Sequence[Layer], row: Location) -> Iterator[str]:
    for detail in error.errors(include_url=False):
        where = detail["loc"] or (detail["type"],)  # a rule over several keys is typed by the key to look at
        in_row = (*row, *where)
        place = in_row if row and in_row[:3] in source.positions else written_at(where, layers)
        yield f"{source.position(place)}: {_explain(detail)}"


def _explain(detail: ErrorDetails) -> str:
    key = ".".join(str(part) for part in detail["loc"])
    fields = ModelConfig.model_fields if len(detail["loc"]) < 2 else SkipRow.model_fields
    if detail["type"] == "extra_forbidden":
        near = difflib.get_close_matches(str(detail["loc"][-1]), fields, n=1)
        remedy = f"did you mean {near[0]}?" if near else f"known: {', '.join(sorted(fields))}"
        return f"unknown key {key}; {remedy}"
    if detail["type"] == "missing":
        return f"{key} is missing: every {'config' if fields is ModelConfig.model_fields else 'row'} needs it"
    if not detail["loc"] or detail["type"] == "env":
        return detail["msg"]
    return (
        f"{key}: {detail['msg'][:1].lower()}{detail['msg'][1:]}, got {json.dumps(detail['input'], default=str)[:200]}"
    )


def schema() -> str:
    """Render configs/schema.json, which editors use to complete and check the YAMLs."""
    body = ModelConfig.model_json_schema()
    document = {"$schema": "https://json-schema.org/draft/2020-12/schema", **body}
    return json.dumps(document, indent=2, sort_keys=False) + "\n"
