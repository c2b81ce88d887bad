"""Rules over several keys of a config: what does not go together, and why."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from pydantic_core import PydanticCustomError

from harness.backends.base import RequestKind
from harness.backends.registry import BUILT_IN, build_backend, flags_of, names
from harness.errors import ConfigError
from harness.parallelism import gpus_needed

if TYPE_CHECKING:
    from harness.config import ModelConfig

SCORING_TASKS = {"choice": RequestKind.LOGLIKELIHOOD, "perplexity": RequestKind.ROLLING}
GENERATION_KEYS = (
    *("use_chat_completions", "gen_prefix", "fewshot_as_multiturn", "min_acceptance_length", "stop"),
    *("prefix_cache_check", "kv_offload_check", "truncate_prompts"),
)
ABLE = {
    "serve_command": ("vllm", "sglang"),
    "kv_offload_check": ("vllm",),
    "scoring_format": ("vllm",),
    "startup_rpc_checks": ("vllm", "vllm-offline"),
}
"""Which of our own backends know what to do with a key."""
WITHOUT_ACCURACY = ("stop_early", "gate", "max_flip_rate", "fewshot_dataset")
FOR_TASK = {
    "choice": ("choice_score", "pairwise_tokenization", "move_trailing_spaces"),
    "perplexity": ("max_window", "window_context", "max_bits_per_byte", "max_bits_per_byte_increase"),
}


def faults(config: ModelConfig) -> Iterator[PydanticCustomError]:
    """Name each rule that a config breaks, typed by the key to look at."""
    for rule in RULES:
        yield from rule(config)


def _fault(key: str, message: str, **values: Any) -> PydanticCustomError:
    return PydanticCustomError(key, message, {"key": key, **values})


def _said(config: ModelConfig, key: str) -> bool:
    """Whether a key has another value than where nothing is said."""
    return bool(getattr(config, key) != type(config).model_fields[key].get_default(call_default_factory=True))


def _threshold(config: ModelConfig) -> Iterator[PydanticCustomError]:
    needed = config.task != "perplexity" and not config.tasks
    if needed and "accuracy_threshold" not in config.model_fields_set:
        yield _fault("accuracy_threshold", "{key} is missing: every config needs it")
    if config.task == "perplexity" and not config.tasks:
        held = (config.max_bits_per_byte, config.max_bits_per_byte_increase)
        if held == (None, None):
            yield _fault("max_bits_per_byte", "{key} is missing: task: perplexity needs it, or a baseline and increase")


def _chat(config: ModelConfig) -> Iterator[PydanticCustomError]:
    for key in ("reasoning_effort", "chat_template_kwargs", "fewshot_as_multiturn"):
        if getattr(config, key) and not (config.use_chat_completions or config.task == "checks"):
            yield _fault(key, "{key} needs use_chat_completions: true")


def _checks(config: ModelConfig) -> Iterator[PydanticCustomError]:
    if config.task != "checks":
        return
    for key in ("fewshot_dataset", "fewshot_as_multiturn", "gen_prefix"):
        if getattr(config, key):
            yield _fault(key, "{key} says nothing to task: checks: remove it there")
    if _said(config, "scorer"):
        yield _fault("scorer", "scorer: with task: checks each row has its own check: remove it there")


def _scoring(config: ModelConfig) -> Iterator[PydanticCustomError]:
    task = config.task
    for key in GENERATION_KEYS if task in SCORING_TASKS else ():
        if _said(config, key):
            yield _fault(key, "{key} says nothing to task: {task}, which generates nothing: remove it there", task=task)
    for key in WITHOUT_ACCURACY if task == "perplexity" else ():
        if _said(config, key):
            yield _fault(key, "{key} says nothing to task: perplexity, which has no right or wrong", task=task)
    for owner, keys in FOR_TASK.items():
        for key in keys if task != owner and not config.tasks else ():
            if _said(config, key):
                yield _fault(key, "{key} is for task: {owner}: remove it here", owner=owner)
    if config.max_window is not None and config.window_context >= config.max_window:
        yield _fault("window_context", "{key}: a window of {size} tokens has no room for it", size=config.max_window)
    if config.truncate_prompts and config.use_chat_completions:
        yield _fault("truncate_prompts", "{key} is for completions: a conversation has no left end to cut")


def _backend(config: ModelConfig) -> Iterator[PydanticCustomError]:
    if config.backend not in names():
        known = ", ".join(names())
        yield _fault(
            "backend", "backend {name}: there is none of that name; known: {known}", name=config.backend, known=known
        )
        return
    asked = SCORING_TASKS.get(config.task)
    if asked is not None and asked not in build_backend(config.backend).kinds:
        message = "backend {name} cannot answer task: {task}, which asks for {asked}"
        yield _fault("backend", message, name=config.backend, task=config.task, asked=asked.value)
    for key, able in ABLE.items() if config.backend in BUILT_IN else ():
        if _said(config, key) and config.backend not in able:
            yield _fault(
                key,
                "{key} is for backend {able} alone, and not for {name}",
                name=config.backend,
                able=" or ".join(able),
            )
    try:
        flags = flags_of(config.backend)
    except ConfigError as error:
        yield _fault("backend", "{why}", why=str(error))
        return
    if flags is None and config.server_args:
        yield _fault(
            "server_args", "server_args: backend {name} has no command line: use engine.options", name=config.backend
        )
    if flags is not None and (twice := config.engine.said_twice(flags, config.own_arguments)) is not None:
        yield _fault("server_args", "server_args: {flag} is said by engine, too: remove one", flag=twice)


def _baseline(config: ModelConfig) -> Iterator[PydanticCustomError]:
    for key in ("gate", "max_flip_rate", "max_bits_per_byte_increase"):
        if getattr(config, key) not in (None, "threshold") and config.baseline is None:
            yield _fault(key, "{key} needs a baseline")
    for key in ("baseline", "prefix_cache_check", "kv_offload_check"):
        if config.stop_early is not None and getattr(config, key):
            yield PydanticCustomError(
                "stop_early", "stop_early: {key} compares question by question: all are asked", {"key": key}
            )


def _gpus(config: ModelConfig) -> Iterator[PydanticCustomError]:
    if config.num_gpus is None and config.backend in BUILT_IN and flags_of(config.backend) == "vllm":
        try:
            gpus_needed(config.arguments)
        except ValueError as error:
            yield _fault("server_args", "server_args: {why}", why=str(error))
            return
    if config.gpu_share is not None and config.gpus > 1:
        yield _fault("gpu_share", "{key} is of one GPU, and this config takes {gpus}", gpus=config.gpus)


def _rocm(config: ModelConfig) -> Iterator[PydanticCustomError]:
    overridden = "request_timeout_seconds" in config.overrides.get("rocm", {})
    if config.rocm_request_timeout_seconds is not None and overridden:
        said = "rocm_request_timeout_seconds: overrides.rocm.request_timeout_seconds says it too: remove one"
        yield PydanticCustomError("rocm_request_timeout_seconds", said)


def _questions(config: ModelConfig) -> Iterator[PydanticCustomError]:
    if config.fewshot_dataset is not None and config.dataset is None:
        yield _fault("fewshot_dataset", "{key} needs a dataset of your own beside it")
    rows = config.available_questions
    if config.dataset is None and config.num_questions is not None and config.num_questions > rows:
        yield _fault("num_questions", "{key}: {task} has {rows} questions", task=config.task, rows=rows)


RULES: tuple[Callable[[ModelConfig], Iterator[PydanticCustomError]], ...] = (
    _threshold,
    _chat,
    _checks,
    _scoring,
    _backend,
    _baseline,
    _gpus,
    _rocm,
    _questions,
)
