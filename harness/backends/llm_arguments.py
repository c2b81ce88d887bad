"""`server_args` as keywords of `vllm.LLM`, read by vLLM's own parser so that every flag keeps its meaning."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, NoReturn

from harness.config import ModelConfig
from harness.errors import ConfigError
from harness.parallelism import read_parallelism

PARSERS = ("vllm.entrypoints.launchers.cli_args", "vllm.entrypoints.openai.cli_args")
"""Where `make_arg_parser` of `vllm serve` lives, newest first."""
NOT_OFFLINE = {
    "--reasoning-parser": "LLM.chat returns reasoning and answer as one text",
    "--lora-modules": "an adapter is a model of its own to a server, and LLM knows none by name",
    "--headless": "it needs a server elsewhere",
}
"""Flags whose loss would change answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LlmArguments:
    """What `vllm serve` would have been told."""

    llm: Mapping[str, Any] = field(default_factory=dict)
    """Keywords of `LLM`, those that are not its engine's defaults."""
    chat: Mapping[str, Any] = field(default_factory=dict)
    """Keywords of `LLM.chat` for every request, which a server takes at its start."""


def check_offline(config: ModelConfig) -> None:
    """Check, without vLLM, that a config can be asked without a server.

    Raises ConfigError.
    """
    if config.serve_command is not None:
        raise ConfigError("backend vllm-offline starts no server: remove serve_command")
    if config.kv_offload_check:
        raise ConfigError("kv_offload_check drops caches over HTTP: use backend vllm")
    names = {argument.partition("=")[0].replace("_", "-") for argument in config.arguments}
    for flag, why in NOT_OFFLINE.items():
        if flag in names and (flag != "--reasoning-parser" or config.use_chat_completions):
            raise ConfigError(f"server_args: {flag} has no meaning for backend vllm-offline ({why}): use backend vllm")
    replicas = read_parallelism(config.arguments).data
    if replicas > 1:
        # vLLM's LLM raises for it too, but only once it is made: its offline replicas are one process and one LLM
        # each (VLLM_DP_RANK or torchrun), which must be given their shares and stepped together.
        raise ConfigError(
            f"server_args: data parallelism of {replicas} in one process is what vLLM's LLM refuses, for it takes a "
            "process with an LLM of its own per replica: use backend vllm, whose server balances them, or "
            "--tensor-parallel-size"
        )


def engine_args(arguments: Sequence[str], model: str, *, trust_remote_code: bool) -> LlmArguments:
    """Read the arguments of `vllm serve` as keywords; flags of the HTTP side alone are read and dropped.

    Imports vLLM. Raises ConfigError for what `vllm serve` would not have taken.
    """
    engine = import_module("vllm.engine.arg_utils").EngineArgs
    added = ["--trust-remote-code"] if trust_remote_code else []
    try:
        parsed = _parser().parse_args([model, *arguments, *added])
        given = engine.from_cli_args(parsed)
    except (ValueError, TypeError, AssertionError, OSError, SystemExit) as error:
        raise ConfigError(f"server_args: {error}") from error
    defaults = engine(model=model)
    keywords = {
        name: value
        for name in (each.name for each in dataclasses.fields(engine))
        if (value := getattr(given, name)) != getattr(defaults, name)
    }
    template = {"chat_template": parsed.chat_template} if parsed.chat_template is not None else {}
    return LlmArguments(
        # LLM keeps no statistics unless told to, a server does unless told not to.
        llm={**keywords, **template, "model": model, "disable_log_stats": given.disable_log_stats},
        chat=_chat(parsed),
    )


def _chat(parsed: Any) -> dict[str, Any]:
    kwargs = getattr(parsed, "default_chat_template_kwargs", None)
    chat = {"chat_template_content_format": parsed.chat_template_content_format}
    return {**chat, "chat_template_kwargs": kwargs} if kwargs else chat


def _parser() -> Any:
    """Make the parser of `vllm serve`, which raises where it would have ended the process."""
    flexible: Any = import_module("vllm.utils.argparse_utils").FlexibleArgumentParser

    class Parser(flexible):  # type: ignore[misc]
        def error(self, message: str) -> NoReturn:
            raise ConfigError(f"server_args: {message}")

    for name in PARSERS:
        try:
            module = import_module(name)
        except ModuleNotFoundError:
            continue
        return module.make_arg_parser(Parser(prog="vllm serve", add_help=False))
    raise ConfigError(f"this vLLM keeps the parser of `vllm serve` in none of {', '.join(PARSERS)}: use backend vllm")
