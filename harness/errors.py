"""Every error this project raises on purpose.

AccuracyGateError
├── ConfigError            a YAML, list or option is wrong: fix it (exit 4, before anything starts)
│   └── BaselineMismatch       a baseline was made from other questions or settings than the run
├── GateFailed             the model got worse: look at the change (exit 1; also an AssertionError)
└── InfrastructureError    nothing can be said about the model: retry the job (exit 75)
    ├── DataUnavailable        questions are missing, damaged or cannot be fetched
    ├── ModelUnavailable       the embedded model's package is missing
    ├── ServerError            the server did not come up or did not last
    │   ├── ServerExited           it ended before it was ready
    │   ├── ServerNotReady         it was still starting at the deadline
    │   ├── PortTaken              somebody else answers on its port
    │   └── ServerDied             it was ready and then ended while being asked
    ├── RequestsFailed         more requests than allowed got no answer
    ├── GpusMissing            the machine has fewer GPUs than the config needs (--require-gpus)
    ├── GpusBusy               other runs held the GPUs for longer than this one was to wait
    ├── GpuMemoryHeld          a GPU's memory did not come back after a server
    ├── OutOfTime              the config's max_seconds were over
    ├── CountersUnavailable    /metrics could not give what a gate needs
    └── RecordUnwritable       the results folder is full or went away
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


class AccuracyGateError(Exception):
    """Base of the tree."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """Where in a file a fault lies; line and column count from 1."""

    path: Path
    line: int | None = None
    column: int | None = None

    def __str__(self) -> str:
        parts = [str(self.path), *(str(n) for n in (self.line, self.column) if n is not None)]
        return ":".join(parts)


class ConfigError(AccuracyGateError):
    """A config, list or option is wrong; nothing has been started.

    `faults` holds one line per fault, each naming file, line and column where they are known.
    """

    def __init__(self, *faults: str) -> None:
        super().__init__("\n".join(faults))
        self.faults = faults

    @classmethod
    def at(cls, position: Position, message: str) -> ConfigError:
        return cls(f"{position}: {message}")


class BaselineMismatch(ConfigError):
    """A baseline was made from other questions or settings than the run; the message names what differs."""


class GateFailed(AccuracyGateError, AssertionError):
    """A gate was measured and not met: the model got worse."""


class InfrastructureError(AccuracyGateError):
    """Nothing can be said about the model; the same job may succeed when run again."""


class DataUnavailable(InfrastructureError):
    """The questions are missing, damaged, or could not be fetched."""


class ModelUnavailable(InfrastructureError):
    """The embedded model cannot be built on this machine."""


class ServerError(InfrastructureError):
    """The server did not come up or did not last; the message ends with its log's tail."""


class ServerExited(ServerError):
    """The server ended before it was ready."""


class ServerNotReady(ServerError):
    """The server was still starting when its time was up."""


class PortTaken(ServerError):
    """Another process answers on the port the server was given."""


class ServerDied(ServerError):
    """The server was ready and ended while it was being asked."""


class RequestsFailed(InfrastructureError):
    """More requests than `max_error_rate` allows got no answer."""


class CountersUnavailable(InfrastructureError):
    """`/metrics` could not give the counters a gate needs."""


class RecordUnwritable(InfrastructureError):
    """The run record could not be written: no space, or the folder went away."""


class OutOfTime(InfrastructureError):
    """The config's own `max_seconds` were over before all questions were answered."""


class GpuMemoryHeld(InfrastructureError):
    """A GPU still holds memory from before; the message names the processes."""


class GpusMissing(InfrastructureError):
    """This machine has fewer GPUs than the config needs, and --require-gpus was given."""


class GpusBusy(InfrastructureError):
    """Other runs held the GPUs for longer than this one was to wait; the message names them."""
