"""`sglang.launch_server`: its command line, its readiness, and the running server."""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from types import MappingProxyType

import requests

from harness.backends.sglang_http import SglangBackend
from harness.config import ModelConfig
from harness.errors import ConfigError, ServerError, ServerExited, ServerNotReady
from harness.gates.threshold import Gate
from harness.own_environment import users_environment
from harness.servers.endpoint import Endpoint
from harness.servers.launching import (
    HOST,
    Seat,
    attached_to,
    check_template,
    endpoint_of,
    filled,
    flag_value,
    launched,
    model_path,
    served_name,
)
from harness.servers.process import ServerProcess

FIRST_TOKEN_PAUSE = 0.5
REMEDY = "pip install sglang, or name another environment's with serve_command"


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangEndpoint(Endpoint):
    """An SGLang server."""

    installed: str = "unknown"
    """The version of the package that it was started from."""

    def backend(self, config: ModelConfig) -> SglangBackend:
        """Make what asks it as the config says."""
        return SglangBackend(self.base_url, installed=self.installed, **self.settings(config))

    def check_workers(self, methods: Sequence[str]) -> tuple[Gate, ...]:
        """Call nothing; raises ServerError where a method is named, for SGLang's workers cannot be asked."""
        if methods:
            raise ServerError(f"startup_rpc_checks: {methods[0]}: SGLang's workers cannot be asked: use backend vllm")
        return ()


@contextmanager
def sglang_server(
    config: ModelConfig,
    log_path: Path,
    *,
    serve_command: str | None = None,
    env: Mapping[str, str] = MappingProxyType({}),
    within: float = float("inf"),
) -> Iterator[SglangEndpoint]:
    """Run a config's SGLang server until the block is left; arguments and errors are those of `vllm_server`."""
    template = config.serve_command or serve_command
    check_sglang(template)
    deadline = time.monotonic() + min(config.startup_max_wait_seconds, within)
    model = model_path(config)
    with launched(
        config,
        log_path,
        template=template,
        argv=lambda seat: command(config, model, seat, template=template),
        env=lambda seat: {**users_environment(), **env, **config.env},
        within=within,
    ) as process:
        await_first_token(process, deadline)
        installed = "unknown" if template else installed_version()
        yield replace(endpoint_of(process, config, SglangEndpoint), installed=installed)


def attached(config: ModelConfig, base_url: str, api_key: str | None) -> SglangEndpoint:
    """Make the endpoint of an SGLang server that somebody else started."""
    return attached_to(base_url, api_key, config, SglangEndpoint)


def command(config: ModelConfig, model: str, seat: Seat, *, template: str | None = None) -> tuple[str, ...]:
    """Build the command line: the config's own arguments as the shell would split them, then what is added.

    The key can be told in no other way; it is new for each server and masked wherever the command is shown.
    """
    added = ["--enable-metrics", "--api-key", seat.key, *served_name(config, model)]
    if config.trust_remote_code:
        added.append("--trust-remote-code")
    if flag_value(config.arguments, "--nccl-port") is None:
        # Left alone it is drawn at random near the HTTP port, where another server's ports may lie.
        added += ["--nccl-port", str(seat.engine_port)]
    arguments = (*config.arguments, *added)
    if template is not None:
        return filled(template, {"model": model, "host": HOST, "port": seat.port, "name": seat.name}, arguments)
    place = ("--host", HOST, "--port", str(seat.port))
    return (sys.executable, "-m", "sglang.launch_server", "--model-path", model, *place, *arguments)


def check_sglang(template: str | None) -> None:
    """Check that there is something to start.

    Raises ConfigError.
    """
    if template is not None:
        check_template(template)
    elif importlib.util.find_spec("sglang") is None:
        raise ConfigError(f"backend sglang: there is no sglang in {sys.executable}: {REMEDY}")


def await_first_token(process: ServerProcess, deadline: float) -> None:
    """Wait until a token went through the engine: `/health` and `/v1/models` may answer before one can.

    Raises ServerExited or ServerNotReady.
    """
    key = process.spec.api_key
    with requests.Session() as session:
        session.trust_env = False
        session.headers.update({"Authorization": f"Bearer {key}"} if key else {})
        while (ground := _generates(session, process, deadline)) is not None:
            if (how := process.death()) is not None:
                raise ServerExited(how)
            if time.monotonic() >= deadline:
                tail = process.log_tail()
                said = f"the server listens but no token came through its engine: {ground}"
                raise ServerNotReady(f"{process.spec.served_model}: {said}; the end of its log:\n{tail}")
            time.sleep(min(FIRST_TOKEN_PAUSE, max(0.0, deadline - time.monotonic())))


def _generates(session: requests.Session, process: ServerProcess, deadline: float) -> str | None:
    """Say why no token comes through; None when one did."""
    try:
        left = max(1.0, deadline - time.monotonic())
        status = session.get(f"{process.spec.base_url}/health_generate", timeout=min(left, 60.0)).status_code
    except requests.RequestException as error:
        return f"/health_generate: {type(error).__name__}"
    return None if status == 200 else f"/health_generate answers {status}"


def installed_version() -> str:
    """Name the version of this environment's sglang."""
    try:
        return metadata.version("sglang")
    except metadata.PackageNotFoundError:
        return "unknown"
