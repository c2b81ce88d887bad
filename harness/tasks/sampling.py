"""Sampling settings of a config, as requests carry them and as records keep them; pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from harness.backends.base import Sampling
from harness.config import ModelConfig


def sampling_of(config: ModelConfig, *, stop: Sequence[str], max_tokens: int | None = None) -> Sampling:
    """Take the settings from a config; `max_tokens` may be a question's own."""
    return Sampling(
        max_tokens=config.max_tokens if max_tokens is None else max_tokens,
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        seed=config.seed,
        stop=tuple(stop),
    )


def sampling_facts(config: ModelConfig, *, stop: Sequence[str], chat: bool) -> dict[str, Any]:
    """Say how questions are asked, as baselines are bound to it."""
    return {
        **asdict(sampling_of(config, stop=stop)),
        "stop": list(stop),
        "chat": chat,
        "fewshot_as_multiturn": config.fewshot_as_multiturn,
        "reasoning_effort": config.reasoning_effort,
        "chat_template_kwargs": config.chat_template_kwargs,
    }
