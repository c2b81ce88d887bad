"""Where vLLM keeps what its engine is told."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Self


@dataclasses.dataclass
class EngineArgs:
    """Some of vLLM's, and a fault."""

    model: str
    max_model_len: int | None = None
    trust_remote_code: bool = False
    disable_log_stats: bool = False
    fault: str | None = None

    @classmethod
    def from_cli_args(cls, arguments: argparse.Namespace) -> Self:
        names = [each.name for each in dataclasses.fields(cls)]
        return cls(**{name: getattr(arguments, name) for name in names})
