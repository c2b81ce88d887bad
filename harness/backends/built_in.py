"""The project's own kinds of engine; what each needs is imported when one is started."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from harness.backends.base import RequestKind
from harness.backends.llm_arguments import check_offline
from harness.backends.process_shares import launched_several
from harness.backends.registry import BackendType, Start
from harness.config import ModelConfig
from harness.errors import ConfigError
from harness.servers.endpoint import Endpoint, Engine
from harness.servers.launching import attached_to
from harness.servers.vllm import check_command, vllm_server

TRANSFORMERS_OPTIONS = ("device", "device_map", "revision", "batch_size", "compile")
UNKNOWN_TO_TRANSFORMERS = {
    "gpu_memory_fraction": "it takes what the weights and a batch need",
    "max_batched_tokens": "use options: {batch_size: N}",
    "tensor_parallel_size": "use num_gpus and options: {device_map: auto}",
    "input": "it loads the text model alone",
}
ALL_KINDS = frozenset(RequestKind)


@contextmanager
def _vllm(config: ModelConfig, start: Start) -> Iterator[Engine]:
    if start.base_url is not None:
        yield attached_to(start.base_url, start.api_key, config, Endpoint)
        return
    with vllm_server(
        config,
        start.log_path,
        serve_command=start.serve_command,
        env=start.env,
        within=start.within,
        started_ahead=start.started_ahead,
    ) as server:
        yield server


def _check_vllm(config: ModelConfig, start: Start) -> None:
    if start.base_url is None:
        check_command(config.serve_command or start.serve_command)


@contextmanager
def _vllm_offline(config: ModelConfig, start: Start) -> Iterator[Engine]:
    from harness.backends.offline_engine import offline_engine

    with offline_engine(config, start.log_path, env=start.env, within=start.within) as engine:
        yield engine


@contextmanager
def _transformers(config: ModelConfig, start: Start) -> Iterator[Engine]:
    from harness.backends.transformers_engine import transformers_engine

    options = _transformers_options(config)
    with transformers_engine(config, start.log_path, env=start.env, within=start.within, **options) as engine:
        yield engine


def _transformers_options(config: ModelConfig) -> dict[str, Any]:
    """Translate `engine`; an option that is not one of ours is a keyword of `from_pretrained`."""
    settings = config.engine
    named = {"dtype": settings.dtype, "max_model_len": settings.max_model_len, "seed": settings.seed}
    ours = {name: value for name, value in settings.options.items() if name in TRANSFORMERS_OPTIONS}
    theirs = {name: value for name, value in settings.options.items() if name not in TRANSFORMERS_OPTIONS}
    return {name: value for name, value in named.items() if value is not None} | ours | {"from_pretrained": theirs}


def _check_transformers(config: ModelConfig, start: Start) -> None:
    if launched_several():
        raise ConfigError(
            "backend transformers: the suite is one process: start it without torchrun and use options: {device_map: "
            "auto}, or ask a TransformersBackend in a script of your own"
        )
    for name, remedy in UNKNOWN_TO_TRANSFORMERS.items():
        if getattr(config.engine, name) is not None:
            raise ConfigError(f"engine.{name}: transformers has no such setting: {remedy}")
    if importlib.util.find_spec("transformers") is None or importlib.util.find_spec("torch") is None:
        raise ConfigError(
            "backend transformers needs torch and transformers: pip install 'accuracy-gate[transformers]'"
        )


@contextmanager
def _sglang(config: ModelConfig, start: Start) -> Iterator[Engine]:
    from harness.servers.sglang import attached, sglang_server

    if start.base_url is not None:
        yield attached(config, start.base_url, start.api_key)
        return
    with sglang_server(
        config, start.log_path, serve_command=start.serve_command, env=start.env, within=start.within
    ) as server:
        yield server


def _check_sglang(config: ModelConfig, start: Start) -> None:
    from harness.servers.sglang import check_sglang

    if start.base_url is None:
        check_sglang(config.serve_command or start.serve_command)


@contextmanager
def _sglang_offline(config: ModelConfig, start: Start) -> Iterator[Engine]:
    from harness.backends.sglang_offline import sglang_engine

    with sglang_engine(config, start.log_path, env=start.env, within=start.within) as engine:
        yield engine


def _check_sglang_offline(config: ModelConfig, start: Start) -> None:
    from harness.backends.sglang_offline import check_sglang_offline

    check_sglang_offline(config)


@contextmanager
def _openai(config: ModelConfig, start: Start) -> Iterator[Engine]:
    from harness.backends.openai_api import openai_engine

    with openai_engine(config, base_url=start.base_url, api_key=start.api_key) as engine:
        yield engine


def _check_openai(config: ModelConfig, start: Start) -> None:
    from harness.backends.openai_api import check_openai

    check_openai(config, base_url=start.base_url, api_key=start.api_key)


VLLM = BackendType(name="vllm", kinds=ALL_KINDS, start=_vllm, check=_check_vllm, attaches=True, flags="vllm")
VLLM_OFFLINE = BackendType(
    name="vllm-offline",
    kinds=ALL_KINDS,
    start=_vllm_offline,
    check=lambda config, start: check_offline(config),
    flags="vllm",
)
TRANSFORMERS = BackendType(name="transformers", kinds=ALL_KINDS, start=_transformers, check=_check_transformers)
SGLANG = BackendType(name="sglang", kinds=ALL_KINDS, start=_sglang, check=_check_sglang, attaches=True, flags="sglang")
SGLANG_OFFLINE = BackendType(
    name="sglang-offline", kinds=ALL_KINDS, start=_sglang_offline, check=_check_sglang_offline, flags="sglang"
)
OPENAI = BackendType(
    name="openai",
    kinds=frozenset({RequestKind.GENERATE}),
    start=_openai,
    check=_check_openai,
    attaches=True,
    local=False,
)
