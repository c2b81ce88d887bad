"""A remote API in OpenAI's format: where it is, by which key, and what it cannot be told."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from harness.backends.openai_client import ENGINE, OpenaiBackend
from harness.config import ModelConfig
from harness.errors import ConfigError
from harness.gates.threshold import Gate
from harness.redaction import redact

KEY_VARIABLES = ("ACCURACY_GATE_API_KEY", "OPENAI_API_KEY")
URL_VARIABLE = "OPENAI_BASE_URL"
OFFICIAL = "https://api.openai.com/v1"


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenaiEngine:
    """A remote API, ready to be asked."""

    base_url: str
    model: str
    api_key: str = field(repr=False)
    key_name: str
    startup_seconds: float | None = None

    @property
    def death(self) -> Callable[[], str | None]:
        """Say nothing: what runs elsewhere is known by its answers alone."""
        return lambda: None

    @property
    def description(self) -> Mapping[str, Any]:
        return {"base_url": redact(self.base_url, [self.api_key]), "engine": ENGINE, "started_by": "somebody else"}

    def backend(self, config: ModelConfig) -> OpenaiBackend:
        """Make what asks it as the config says."""
        return OpenaiBackend(
            self.base_url,
            model=self.model,
            api_key=self.api_key,
            key_name=self.key_name,
            concurrency=config.max_concurrency,
            timeout=config.request_timeout_seconds,
        )

    def check_workers(self, methods: Sequence[str]) -> tuple[Gate, ...]:
        """Call nothing: `check_openai` lets no method through."""
        return ()


@contextmanager
def openai_engine(
    config: ModelConfig, *, base_url: str | None = None, api_key: str | None = None
) -> Iterator[OpenaiEngine]:
    """Make an engine of a remote API; `base_url` and `api_key` come before the config's and the environment's.

    Raises ConfigError, as `check_openai` does.
    """
    check_openai(config, base_url=base_url, api_key=api_key)
    key_name, key = _key(api_key)
    url = api_url(_address(config, base_url))
    yield OpenaiEngine(base_url=url, model=config.model_name, api_key=key, key_name=key_name)


def check_openai(config: ModelConfig, *, base_url: str | None = None, api_key: str | None = None) -> None:
    """Check that there is a key and an address, and nothing that a remote API cannot be told.

    Raises ConfigError.
    """
    _key(api_key)
    api_url(_address(config, base_url))
    engine = config.engine.model_dump(exclude_defaults=True, exclude={"options"})
    senseless = {
        "prefix_cache_check": config.prefix_cache_check,
        "truncate_prompts": config.truncate_prompts,
        **{f"engine.{name}": True for name in engine},
        **{f"engine.options.{name}": True for name in config.engine.options if name != "base_url"},
    }
    for name, value in senseless.items():
        if value:
            raise ConfigError(f"{name} says nothing to backend {ENGINE}, whose engine runs elsewhere: remove it")


def _key(given: str | None) -> tuple[str, str]:
    """Find the key, and say where."""
    if given:
        return next((name for name in KEY_VARIABLES if os.environ.get(name) == given), "--api-key"), given
    found = next(((name, value) for name in KEY_VARIABLES if (value := os.environ.get(name))), None)
    if found is None:
        raise ConfigError(f"backend {ENGINE} needs a key: set {' or '.join(KEY_VARIABLES)}")
    return found


def _address(config: ModelConfig, given: str | None) -> str:
    told = given or config.engine.options.get("base_url") or os.environ.get(URL_VARIABLE) or OFFICIAL
    return str(told)


def api_url(address: str) -> str:
    """Complete an API's address: one without a path lies under `/v1`, any other is taken as it is.

    Raises ConfigError for what is no http address.
    """
    parts = urlsplit(address if "://" in address else f"http://{address}")
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise ConfigError(f"{address!r} is no http:// address of an API")
    path = parts.path.rstrip("/") or "/v1"
    return parts._replace(path=path, query="", fragment="").geturl()
