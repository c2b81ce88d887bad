"""A server that is ready to be asked, whoever started it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


def _lives() -> str | None:
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where to ask, for which model, and how to learn that the server is gone."""

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
