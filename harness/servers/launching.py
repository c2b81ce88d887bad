"""What starting any server takes: a model and its names, a command, ports, a key; and the endpoint it becomes."""

from __future__ import annotations

import os
import re
import secrets
import shlex
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from harness.backends.server import root_url
from harness.cache import cache_root
from harness.config import ModelConfig
from harness.errors import ConfigError, DataUnavailable, ModelUnavailable
from harness.redaction import redact_argv, redact_env
from harness.servers.containers import is_container, new_name, remove_container
from harness.servers.embedded_model import embedded_version, is_embedded, model_folder
from harness.servers.endpoint import Endpoint
from harness.servers.ports import PortBlock
from harness.servers.process import ServerProcess, ServerSpec, Take, start_with_retry

HOST = "127.0.0.1"
SERVED_NAME = "--served-model-name"
E = TypeVar("E", bound=Endpoint)


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """What one start of a server is given that no other has."""

    port: int
    engine_port: int
    """The first of the ports that its engine may take for itself."""
    key: str
    name: str
    """For a container."""


@contextmanager
def launched(
    config: ModelConfig,
    log_path: Path,
    *,
    template: str | None,
    argv: Callable[[Seat], tuple[str, ...]],
    env: Callable[[Seat], Mapping[str, str]],
    within: float = float("inf"),
    started_ahead: Take | None = None,
) -> Iterator[ServerProcess]:
    """Run a server until the block is left, whatever happens in it; `env` makes its whole environment.

    `started_ahead` may give a process for it. Raises ServerError where it does not become ready within
    `startup_max_wait_seconds` and `within`.
    """
    name = new_name()
    words = shlex.split(template) if template else []
    in_container = bool(words) and is_container(words)
    key = kept_key() if template is None else secrets.token_urlsafe(24)

    def spec(ports: PortBlock) -> ServerSpec:
        seat = Seat(port=ports.port, engine_port=ports.engine_port, key=key, name=name)
        return ServerSpec(
            argv=argv(seat),
            env=env(seat),
            log_path=log_path,
            base_url=f"http://{HOST}:{seat.port}",
            served_model=served_model(config),
            api_key=key,
            startup_seconds=max(0.0, min(config.startup_max_wait_seconds, within)),
            run_id=log_path.parent.name,
            listens_itself=not in_container,
        )

    with ExitStack() as stack:
        if in_container:
            stack.callback(remove_container, words[0], name)
        process = start_with_retry(spec, started_ahead=started_ahead)
        stack.callback(process.stop)
        yield process


def kept_key() -> str:
    """Return this user's key for servers of our own environment, made once; a new one where it cannot be kept.

    vLLM hashes VLLM_API_KEY into the key of its compile cache (0.24; 0.32 no longer does): with a key per start nothing
    was ever found there, and each start compiled for 12 to 37 s.
    """
    path, fresh = cache_root() / "server.key", secrets.token_urlsafe(24)
    with suppress(OSError, DataUnavailable):
        path.parent.mkdir(parents=True, exist_ok=True)
        with (
            suppress(FileExistsError),
            os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as new,
        ):
            new.write(fresh)
        seen = path.stat()
        kept = path.read_text(encoding="ascii", errors="replace").strip()
        if seen.st_uid == os.getuid() and not seen.st_mode & 0o077 and re.fullmatch(r"[\w-]{32}", kept):
            return kept
    return fresh


def endpoint_of(process: ServerProcess, config: ModelConfig, kind: type[E]) -> E:
    """Say where a server of our own is asked, and what the record holds about it."""
    spec = process.spec
    return kind(
        base_url=spec.base_url,
        model=spec.served_model,
        api_key=spec.api_key,
        startup_seconds=process.startup_seconds,
        death=process.death,
        keep=process.keep,
        description={
            "base_url": spec.base_url,
            "started_by": "this run",
            "command": redact_argv(spec.argv),
            "env": redact_env(config.env),
            "revision": revision(config),
        },
        tokenizer=tokenizer_of(config),
    )


def attached_to(base_url: str, api_key: str | None, config: ModelConfig, kind: type[E]) -> E:
    """Say where a server is asked that somebody else started.

    Raises ConfigError for what is no address.
    """
    try:
        root = root_url(base_url)
    except ValueError as error:
        raise ConfigError(f"--base-url: {error}") from error
    return kind(
        base_url=root,
        model=served_model(config),
        api_key=api_key,
        tokenizer=tokenizer_of(config),
        description={"base_url": root, "started_by": "somebody else", "revision": revision(config)},
    )


def filled(template: str, values: Mapping[str, Any], arguments: Sequence[str]) -> tuple[str, ...]:
    """Fill a template word by word: variables ($HOME), {name} for each of `values`, {args} as words of their own."""
    placeholder = re.compile("|".join(re.escape(f"{{{name}}}") for name in values))
    words: list[str] = []
    for word in shlex.split(template):
        text = placeholder.sub(lambda found: str(values[found.group()[1:-1]]), os.path.expandvars(word))
        words += arguments if word == "{args}" else [text]
    return tuple(words)


def check_template(template: str) -> None:
    """Check that the program which a template starts is there.

    Raises ConfigError.
    """
    program = shlex.split(template)[0]
    if shutil.which(program) is None:
        raise ConfigError(f"serve_command: there is no command {program} here")


def model_path(config: ModelConfig) -> str:
    """Name what an engine is told to load: a hub name, or a folder.

    Raises ModelUnavailable for an embedded model that cannot be made.
    """
    return str(model_folder(config.model_name)) if is_embedded(config.model_name) else config.model_name


def tokenizer_of(config: ModelConfig) -> str | None:
    """Name what the model's tokenizer is loaded from: a hub name or a folder; None where there is none here."""
    flags = (flag_value(config.arguments, flag) for flag in ("--tokenizer", "--tokenizer-path"))
    told = config.tokenizer or next(filter(None, flags), None)
    try:
        return told or model_path(config)
    except (ConfigError, ModelUnavailable):
        return None


def served_model(config: ModelConfig) -> str:
    """Name the model as requests must: the first of `--served-model-name`, else `model_name`."""
    return flag_value(config.arguments, SERVED_NAME) or config.model_name


def served_name(config: ModelConfig, model: str) -> list[str]:
    """Name the model on the command line where it would be served under its folder's path."""
    if model == served_model(config) or flag_value(config.arguments, SERVED_NAME) is not None:
        return []
    return [SERVED_NAME, served_model(config)]


def revision(config: ModelConfig) -> str:
    """Name the model's revision as far as the config tells: a flag's value, or an embedded model's package version."""
    if is_embedded(config.model_name):
        return embedded_version(config.model_name)
    return flag_value(config.arguments, "--revision") or "unknown"


def flag_value(arguments: Sequence[str], flag: str) -> str | None:
    """Find the value after a flag's last mention, in any spelling that vLLM takes: `--a-b V`, `--a-b=V`, `--a_b V`."""
    found = None
    for argument, following in zip(arguments, [*arguments[1:], None], strict=False):
        name, equals, value = argument.partition("=")
        if name.replace("_", "-") == flag:
            found = value if equals else following
    return found
