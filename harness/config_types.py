"""What single values of a config may be: shares, shell words, variables, commands."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from decimal import Decimal
from pathlib import PurePath
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_core import PydanticCustomError

from harness.servers.containers import is_container

OWNED_FLAGS = {"--host": "127.0.0.1", "--port": "a free port", "--api-key": "a random key", "--uds": "TCP"}
OWNED_VARIABLES = (
    "VLLM_API_KEY",
    "ACCURACY_GATE_SERVER",
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "ZE_AFFINITY_MASK",
)


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
    """Refuse values that have no single spelling as an environment variable; an `env` left empty is none."""
    if env is None:
        return {}
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
    if is_container(words) and not any("{name}" in word for word in words):
        raise PydanticCustomError("serve_command", "must hold --name {name}: a container is stopped by its name")
    return template


ServeCommand = Annotated[str, AfterValidator(check_serve_command)]
Share = Annotated[float, AfterValidator(_share)]
ServerArgs = Annotated[str, BeforeValidator(lambda value: "" if value is None else value), AfterValidator(_splits)]
Env = Annotated[dict[str, str], BeforeValidator(_one_spelling)]
Seconds = Annotated[float, Field(gt=0, le=7 * 24 * 3600)]
Count = Annotated[int, Field(ge=1)]

SERVER_KEYS = frozenset(
    {
        *("model_name", "server_args", "env", "trust_remote_code", "serve_command", "startup_max_wait_seconds"),
        *("startup_rpc_checks", "max_seconds", "num_gpus", "platforms", "skip", "overrides", "tasks"),
        *("kv_offload_check", "backend", "engine", "gpu_share", "tokenizer"),
    }
)
"""What holds for a server, and so for all tasks asked of it."""


def task_names(rows: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Name each row of `tasks`: its `name`, else its dataset's, else its task."""
    return tuple(str(row.get("name") or PurePath(row.get("dataset") or row.get("task") or "").stem) for row in rows)


def _task_rows(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    names = task_names(rows)
    for row, name in zip(rows, names, strict=True):
        if not re.fullmatch(r"[\w.+-]+", name):
            raise PydanticCustomError("tasks", "each row needs a task, a dataset or a plain name of its own")
        if names.count(name) > 1:
            raise PydanticCustomError("tasks", "two rows are named {name}: give each a name", {"name": name})
        for key in SERVER_KEYS & row.keys():
            raise PydanticCustomError("tasks", "{key} holds for the server: move it out of the row", {"key": key})
    return rows


TaskRows = Annotated[list[dict[str, Any]], AfterValidator(_task_rows)]
