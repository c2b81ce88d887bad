"""What is ready to be asked: a server, whoever started it, or an engine in this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from harness.backends.base import Backend, BackendInfo, Request
from harness.backends.scoring_formats import Echo, PromptLogprobs
from harness.backends.server import ServerBackend
from harness.config import ModelConfig, Scorer
from harness.gates.threshold import Gate
from harness.metrics import Counters
from harness.servers.rpc_checks import run_rpc_checks


class CountingBackend(Backend, Protocol):
    """A backend that also counts what its engine does, and knows the length of its context."""

    async def check_context(self, requests: Sequence[Request], info: BackendInfo) -> None: ...

    async def counters(self) -> Counters: ...


class Engine(Protocol):
    """Something that answers for one model, and can tell that it is gone."""

    @property
    def model(self) -> str: ...

    @property
    def startup_seconds(self) -> float | None: ...

    @property
    def death(self) -> Callable[[], str | None]: ...

    @property
    def description(self) -> Mapping[str, Any]: ...

    def backend(self, config: ModelConfig) -> CountingBackend: ...

    def check_workers(self, methods: Sequence[str]) -> tuple[Gate, ...]: ...


def _lives() -> str | None:
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """A server: where to ask, for which model, and how to learn that it is gone."""

    base_url: str
    model: str
    api_key: str | None
    startup_seconds: float | None = None
    """None where somebody else started it."""
    death: Callable[[], str | None] = _lives
    """How the process ended, with its log's tail, or None while it lives."""
    keep: Callable[[], str] | None = None
    """Leaves the server running and says how to stop it; None where somebody else started it."""
    description: Mapping[str, Any] = field(default_factory=dict)
    tokenizer: str | None = None
    """The folder or the hub's name of the model's tokenizer; the server's own is asked where None."""

    def backend(self, config: ModelConfig) -> ServerBackend:
        """Make what asks it as the config says."""
        scoring = Echo() if config.scoring_format == "echo" else PromptLogprobs()
        return ServerBackend(self.base_url, scoring=scoring, **self.settings(config))

    def settings(self, config: ModelConfig) -> dict[str, Any]:
        """Say how any server is asked as the config says, beside where."""
        return {
            "model": self.model,
            "api_key": self.api_key,
            "concurrency": config.max_concurrency,
            "timeout": config.request_timeout_seconds,
            "death": self.death,
            "name_model": config.scorer is not Scorer.LAST_NUMBER,
            "tokenizer": self.tokenizer,
            "trust_remote_code": config.trust_remote_code,
        }

    def check_workers(self, methods: Sequence[str]) -> tuple[Gate, ...]:
        """Call each method of `startup_rpc_checks` on all workers.

        Raises ServerError where one cannot be called.
        """
        return run_rpc_checks(methods, self.base_url, self.api_key)
