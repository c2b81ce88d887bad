"""ModelConfig: one YAML file, checked."""

from __future__ import annotations

import difflib
import json
import shlex
from collections.abc import Iterator
from decimal import Decimal
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)
from pydantic_core import ErrorDetails, PydanticCustomError

from harness.errors import ConfigError
from harness.yaml_source import YamlSource, read_yaml

GSM8K_TEST_ROWS = 1319
SMOKE_ROWS = 20
OWNED_FLAGS = {"--host": "127.0.0.1", "--port": "a free port", "--api-key": "a random key", "--uds": "TCP"}
OWNED_VARIABLES = ("VLLM_API_KEY", "ACCURACY_GATE_SERVER")


def _share(value: float) -> float:
    if not 0 <= value <= 1:
        hint = f"; did you mean {Decimal(str(value)) / 100:f}?" if 1 < value <= 100 else ""
        raise PydanticCustomError("share", "must lie between 0 and 1{hint}", {"hint": hint})
    return value


def _splits(server_args: str) -> str:
    """Check that the shell words can be read and that what looks like JSON still is."""
    try:
        words = shlex.split(server_args)
    except ValueError as error:
        raise PydanticCustomError(
            "server_args", "cannot be split into arguments: {why}", {"why": str(error)}
        ) from error
    flag = "(no flag)"
    for word in words:
        name, _, inline = word.partition("=") if word.startswith("-") else ("", "", word)
        flag = name or flag
        if name in OWNED_FLAGS:
            said = {"flag": name, "owner": OWNED_FLAGS[name]}
            raise PydanticCustomError("server_args", "{flag} is set by the harness ({owner}): remove it", said)
        if inline.startswith("{") and not _is_json(inline):
            said = {"flag": flag, "value": inline}
            message = (
                "the value after {flag} is not JSON once the shell quoting is read: {value} (put it in single quotes)"
            )
            raise PydanticCustomError("server_args", message, said)
    return server_args


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _one_spelling(env: Any) -> Any:
    """Refuse values that have no single spelling as an environment variable: booleans and nothing."""
    for name, value in env.items() if isinstance(env, dict) else ():
        if isinstance(value, bool) or value is None:
            said = {"name": name, "value": json.dumps(value)}
            raise PydanticCustomError(
                "env",
                'env {name}: {value} has no one spelling as a variable: write "1", "0" or the text, quoted',
                said,
            )
        if name in OWNED_VARIABLES:
            raise PydanticCustomError("env", "env {name} is set by the harness: remove it", {"name": name})
    return env


def check_serve_command(template: str) -> str:
    """Check that a template can be split and says where the server listens.

    Raises PydanticCustomError.
    """
    try:
        words = shlex.split(template)
    except ValueError as error:
        raise PydanticCustomError("serve_command", "cannot be split: {why}", {"why": str(error)}) from error
    missing = [name for name in ("{model}", "{port}", "{args}") if not any(name in word for word in words)]
    if missing or "{args}" not in words:
        said = {"missing": ", ".join(missing) or "{args} as a word of its own"}
        raise PydanticCustomError("serve_command", "must hold {missing}", said)
    return template


ServeCommand = Annotated[str, AfterValidator(check_serve_command)]
Share = Annotated[float, AfterValidator(_share)]
ServerArgs = Annotated[str, AfterValidator(_splits)]
Env = Annotated[dict[str, str], BeforeValidator(_one_spelling)]
Seconds = Annotated[float, Field(gt=0, le=7 * 24 * 3600)]
Count = Annotated[int, Field(ge=1)]


class Scorer(StrEnum):
    """Which reading of a reply decides whether it is right."""

    NUMERIC = "numeric"
    LAST_NUMBER = "last-number"


class ModelConfig(BaseModel):
    """A model, how it is served, what it is asked and what must hold."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, allow_inf_nan=False, title="accuracy-gate config"
    )

    model_name: str = Field(
        min_length=1, description="What vLLM is told to serve: a hub name, a folder, or embedded:NAME."
    )
    accuracy_threshold: Share = Field(description="The accuracy this model is known to reach, 0 to 1.")
    tolerance: Share = Field(default=0.08, description="Absolute; the floor is accuracy_threshold - tolerance.")
    task: Literal["gsm8k", "smoke"] = Field(default="gsm8k", description="Which questions are asked.")
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
    max_error_rate: Share = Field(default=0.0, description="More requests without an answer than this is an outage.")
    server_args: ServerArgs = Field(default="", description="Further arguments of `vllm serve`, as in a shell.")
    env: Env = Field(default_factory=dict, description="Environment variables of the server.")
    max_seconds: Seconds | None = Field(
        default=None, description="For the whole config, start included; an outage when they are over."
    )
    startup_rpc_checks: list[str] = Field(
        default_factory=list, description="Worker methods called over vLLM's development endpoint after the start."
    )
    serve_command: ServeCommand | None = Field(
        default=None,
        description="How the server is started, with {model}, {host}, {port} and {args}; `vllm serve` where left out.",
    )
    trust_remote_code: bool = Field(default=True, description="Add --trust-remote-code, as vLLM's own suite does.")

    @model_validator(mode="after")
    def _fits(self) -> Self:
        for key in ("reasoning_effort", "chat_template_kwargs", "fewshot_as_multiturn"):
            if getattr(self, key) and not self.use_chat_completions:
                raise PydanticCustomError(key, "{key} needs use_chat_completions: true", {"key": key})
        if self.fewshot_dataset is not None and self.dataset is None:
            raise PydanticCustomError("fewshot_dataset", "fewshot_dataset needs a dataset of your own beside it")
        if self.dataset is None and self.num_questions is not None and self.num_questions > self.available_questions:
            said = {"task": self.task, "rows": self.available_questions}
            raise PydanticCustomError("num_questions", "num_questions: {task} has {rows} questions", said)
        return self

    @property
    def available_questions(self) -> int:
        return GSM8K_TEST_ROWS if self.task == "gsm8k" else SMOKE_ROWS

    @property
    def floor(self) -> Decimal:
        """The lowest accuracy that passes, exact."""
        return Decimal(str(self.accuracy_threshold)) - Decimal(str(self.tolerance))

    @property
    def arguments(self) -> tuple[str, ...]:
        """`server_args` as the shell would split them."""
        return tuple(shlex.split(self.server_args))


def load_config(path: Path) -> ModelConfig:
    """Read one YAML file.

    Raises ConfigError with one line per fault: file, line, column, key, and the nearest valid key for an unknown one.
    """
    source = read_yaml(path)
    try:
        return ModelConfig.model_validate(_with_env_as_written(source))
    except ValidationError as error:
        raise ConfigError(*_faults(error, source)) from error


def _with_env_as_written(source: YamlSource) -> dict[str, Any]:
    """Numbers in `env` reach the server spelled as the file spells them: `1.10` stays 1.10."""
    env = source.data.get("env")
    if not isinstance(env, dict):
        return source.data
    written = {
        name: source.texts[("env", name)] if isinstance(value, int | float) and not isinstance(value, bool) else value
        for name, value in env.items()
    }
    return {**source.data, "env": written}


def _faults(error: ValidationError, source: YamlSource) -> Iterator[str]:
    for detail in error.errors(include_url=False):
        where = detail["loc"] or (detail["type"],)  # a rule over several keys is typed by the key to look at
        yield f"{source.position(where)}: {_explain(detail)}"


def _explain(detail: ErrorDetails) -> str:
    key = ".".join(str(part) for part in detail["loc"])
    if detail["type"] == "extra_forbidden":
        near = difflib.get_close_matches(key, ModelConfig.model_fields, n=1)
        remedy = f"did you mean {near[0]}?" if near else f"known: {', '.join(sorted(ModelConfig.model_fields))}"
        return f"unknown key {key}; {remedy}"
    if detail["type"] == "missing":
        return f"{key} is missing: every config needs it"
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
