"""`accuracy-gate eval`: one evaluation against any running OpenAI-compatible server."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from harness.backends.server import ServerBackend, root_url
from harness.config import ModelConfig
from harness.config_lists import unlisted
from harness.errors import ConfigError, ServerError
from harness.gates.threshold import Verdict
from harness.pipeline import evaluate, raise_for_verdict
from harness.records import ConfigRecord, EvalResult, write_json
from harness.reports.terminal import LiveLine
from harness.serving import RunOptions

NO_MAXIMUM = 1e6
"""Bits per byte: `eval` judges nothing."""
API_KEY_VARIABLES = ("ACCURACY_GATE_API_KEY", "OPENAI_API_KEY", "VLLM_API_KEY")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of vLLM's GSM8K script by their names there, and the project's own."""
    parser.add_argument("--host", default="http://127.0.0.1", help="the server's host (%(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="its port (%(default)s)")
    parser.add_argument("--base-url", help="its whole address instead, with or without /v1")
    parser.add_argument("--model", help="the served model (the only one that /v1/models lists)")
    parser.add_argument("--api-key", help=f"else ${', $'.join(API_KEY_VARIABLES)}")
    tasks = ["gsm8k", "smoke", "choice", "perplexity"]
    parser.add_argument("--task", choices=tasks, default="gsm8k", help="which questions (%(default)s)")
    parser.add_argument("--data-dir", type=Path, help="folder with GSM8K's train.jsonl and test.jsonl")
    parser.add_argument("--num-questions", type=int, help="the first N questions (all of them)")
    parser.add_argument("--num-shots", type=int, default=5, help="worked examples before each (%(default)s)")
    parser.add_argument("--max-tokens", type=int, default=256, help="longest reply (%(default)s)")
    parser.add_argument("--temperature", type=float, help="0; with --use-chat-completions the server's own default")
    parser.add_argument("--seed", type=int, default=42, help="sampling seed (%(default)s)")
    parser.add_argument("--top-p", type=float, help="the server's own default")
    parser.add_argument("--top-k", type=int, help="the server's own default")
    parser.add_argument("--use-chat-completions", action="store_true", help="ask /v1/chat/completions")
    parser.add_argument("--reasoning-effort", help="chat only")
    parser.add_argument("--chat-template-kwargs", type=_json_object, metavar="JSON", help="chat only")
    parser.add_argument("--gen-prefix", default="", help="text right after each `Answer:`")
    parser.add_argument("--scorer", choices=["numeric", "last-number"], default="numeric", help="(%(default)s)")
    parser.add_argument("--max-concurrency", type=int, default=256, help="requests under way at once (%(default)s)")
    parser.add_argument("--request-timeout-seconds", type=float, default=600.0, help="for each request (%(default)s)")
    parser.add_argument("--save-results", type=Path, metavar="FILE", help="write the figures as JSON")
    parser.add_argument("--save-samples", type=Path, metavar="DIR", help="keep every sample in this folder")


def run(arguments: argparse.Namespace) -> int:
    """Evaluate and print the figures.

    Raises ConfigError for options that do not fit, InfrastructureError where the server did not answer.
    """
    address = arguments.base_url or f"{arguments.host}:{arguments.port}"
    try:
        root = root_url(address)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    key = arguments.api_key or api_key()
    if arguments.save_samples is not None and (arguments.save_samples / "samples.jsonl").exists():
        raise ConfigError(f"--save-samples {arguments.save_samples}: holds samples of another run")
    config = _config(arguments, arguments.model or asyncio.run(only_model(root, key)))
    entry = unlisted(config)
    options = RunOptions(base_url=root, api_key=key, data_dir=arguments.data_dir)
    with tempfile.TemporaryDirectory(prefix="accuracy-gate-") as scratch:
        record = ConfigRecord(arguments.save_samples or Path(scratch))
        result = evaluate(entry, record, options, LiveLine(config.model_name))
    if result.verdict is Verdict.INFRASTRUCTURE:
        raise_for_verdict(result)
    figures = _figures(result, config)
    if arguments.save_results is not None:
        write_json(arguments.save_results, figures)
    _print(figures)
    return 0


def api_key() -> str | None:
    """Find a server's key in the usual variables."""
    return next(filter(None, map(os.environ.get, API_KEY_VARIABLES)), None)


def _config(arguments: argparse.Namespace, model: str) -> ModelConfig:
    temperature = arguments.temperature
    if temperature is None and not arguments.use_chat_completions:
        temperature = 0.0
    try:
        return ModelConfig(
            model_name=model,
            accuracy_threshold=0.0,
            max_bits_per_byte=NO_MAXIMUM if arguments.task == "perplexity" else None,
            task=arguments.task,
            num_questions=arguments.num_questions,
            num_fewshot=arguments.num_shots,
            max_tokens=arguments.max_tokens,
            use_chat_completions=arguments.use_chat_completions,
            temperature=temperature,
            seed=arguments.seed,
            top_p=arguments.top_p,
            top_k=arguments.top_k,
            reasoning_effort=arguments.reasoning_effort,
            chat_template_kwargs=arguments.chat_template_kwargs,
            gen_prefix=arguments.gen_prefix,
            scorer=arguments.scorer,
            max_concurrency=arguments.max_concurrency,
            request_timeout_seconds=arguments.request_timeout_seconds,
        )
    except ValidationError as error:
        faults = (f"--{'-'.join(map(str, e['loc'])).replace('_', '-')}: {e['msg']}" for e in error.errors())
        raise ConfigError(*faults) from error


async def only_model(root: str, key: str | None) -> str:
    async with ServerBackend(root, model="", api_key=key, timeout=30.0) as backend:
        names = [str(entry.get("id")) for entry in await backend.models()]
    if len(names) != 1:
        raise ServerError(f"{root} serves {', '.join(names) or 'nothing'}: name one with --model")
    return names[0]


def _figures(result: EvalResult, config: ModelConfig) -> dict[str, Any]:
    """Name the figures as vLLM's script does where they agree."""
    facts, counts = result.to_json(), result.counts
    return {
        "accuracy": facts["accuracy"],
        "invalid_rate": (counts.truncated + counts.unanswered) / counts.graded if counts.graded else None,
        "latency": result.timings.asking,
        "questions_per_second": facts["questions_per_second"],
        "total_output_tokens": result.output_tokens,
        "tokens_per_second": facts["tokens_per_second"],
        "num_questions": counts.asked,
        "num_shots": config.num_fewshot,
        "max_tokens": config.max_tokens,
        "timestamp": time.time(),
        "interval": facts["interval"],
        "unanswered": counts.unanswered,
        "truncated": counts.truncated,
        "errors": counts.errors,
        "retried": counts.retried,
        "scorer": config.scorer.value,
        "model": config.model_name,
        "server_version": result.server.get("version", "unknown"),
        **result.measures,
    }


def _print(figures: Mapping[str, Any]) -> None:
    interval = figures["interval"]
    if figures["accuracy"] is not None:
        print(f"Accuracy: {figures['accuracy']:.4f} (95% interval {interval['low']:.4f} to {interval['high']:.4f})")
    for name in ("bits_per_byte", "token_perplexity", "word_perplexity", "margin_per_byte"):
        if name in figures:
            print(f"{name.replace('_', ' ').capitalize()}: {figures[name]:.4f}")
    print(f"Questions: {figures['num_questions']}, {figures['num_shots']} shots")
    for name in ("unanswered", "truncated", "errors"):
        print(f"{name.capitalize()}: {figures[name]}")
    print(f"Total latency: {figures['latency']:.3f} s")
    print(f"Questions per second: {figures['questions_per_second']:.3f}")
    for label, name, spec in (
        ("Total output tokens", "total_output_tokens", "d"),
        ("Output tokens per second", "tokens_per_second", ".3f"),
    ):
        value = figures[name]
        print(f"{label}: {'unknown' if value is None else format(value, spec)}")


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("not a JSON object")
    return value
