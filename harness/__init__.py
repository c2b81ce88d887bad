"""Accuracy regression gate for served language models: config, server, questions, verdict, record."""

from __future__ import annotations

from typing import Any

__all__ = ["__version__", "evaluate_offline"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Import `evaluate_offline` when it is first asked for, so that importing the package stays light."""
    if name == "evaluate_offline":
        from harness.offline import evaluate_offline

        return evaluate_offline
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
