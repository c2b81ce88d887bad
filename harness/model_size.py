"""How many parameters a model has, as far as its name tells. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import PurePosixPath


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """A model's parameters, in billions."""

    total: float
    active: float | None = None
    """For a mixture of experts, those that one token uses."""

    @property
    def active_or_total(self) -> float:
        return self.total if self.active is None else self.active


_NUMBER = r"(?<![a-z\d.])(\d+(?:\.\d+)?)"
_END = r"(?![a-z\d])"
_UNITS = {"m": 0.001, "b": 1.0, "t": 1000.0}
_FORMS: tuple[tuple[str, Callable[[re.Match[str]], Size]], ...] = (
    # 8x7B: eight experts, two of which answer.
    (
        rf"(?<![a-z\d.])(\d+)x(\d+(?:\.\d+)?)b{_END}",
        lambda m: Size(total=int(m[1]) * float(m[2]), active=2 * float(m[2])),
    ),
    # 30B-A3B.
    (rf"{_NUMBER}([bt])-a(\d+(?:\.\d+)?)b{_END}", lambda m: Size(total=float(m[1]) * _UNITS[m[2]], active=float(m[3]))),
    # 17B-16E: active parameters and experts, of which most of a token's parameters are shared.
    (rf"{_NUMBER}b-(\d+)e{_END}", lambda m: Size(total=float(m[1]) * (1 + int(m[2]) / 3), active=float(m[1]))),
    # MoE-A2.7B: nothing is said of the whole, which tends to be five times as large.
    (rf"(?<![a-z\d])a(\d+(?:\.\d+)?)b{_END}", lambda m: Size(total=5 * float(m[1]), active=float(m[1]))),
    (rf"{_NUMBER}([bt]){_END}", lambda m: Size(total=float(m[1]) * _UNITS[m[2]])),
    (rf"{_NUMBER}(m){_END}", lambda m: Size(total=float(m[1]) * _UNITS[m[2]])),
    # Names without a number whose size is widely known.
    (r"deepseek-(?:coder-)?v2-lite", lambda m: Size(total=15.7, active=2.4)),
    (r"deepseek-(?:r1|v3)", lambda m: Size(total=671.0, active=37.0)),
)


def model_size(model_name: str) -> Size | None:
    """Read a model's size off its name, of which the last part counts first; None where it says nothing."""
    path = PurePosixPath(model_name.lower().replace(":", "/"))
    for part in reversed(path.parts):
        for pattern, size in _FORMS:
            if found := re.search(pattern, part.replace("_", "-")):
                return size(found)
    return None
