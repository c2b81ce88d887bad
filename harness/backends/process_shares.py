"""One evaluation by several processes: each takes its share, and all tell each other after every batch."""

from __future__ import annotations

import atexit
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, TypeVar

from harness.backends.base import Response
from harness.errors import ConfigError, ServerDied, ServerError

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """What a process tells the others after a batch."""

    total: int
    """Requests that it was given, all shares together."""
    answers: Mapping[int, Response] = field(default_factory=dict)
    left: int = 0
    """Rows that it has still to ask."""
    stopped: bool = False
    """Nobody waits for its answers any more."""
    fault: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Processes:
    """The processes that share the work; one alone where nothing launched several."""

    rank: int = 0
    count: int = 1
    group: Any = None
    """torch's, over gloo: answers are no tensors, and NCCL would need a GPU each."""

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def share(self, items: Sequence[Item]) -> list[Item]:
        """Take this process's share of items in an order that all processes have in common."""
        return list(items[self.rank :: self.count])

    def exchange(self, told: Round) -> list[Round]:
        """Tell the others, and learn what each says; waits for the slowest.

        Raises ServerDied where a process is gone or its model failed, ServerError where they were asked unlike things.
        """
        if self.count == 1:
            return [told]
        import torch.distributed

        rounds: list[Any] = [None] * self.count
        try:
            torch.distributed.all_gather_object(rounds, told, group=self.group)
        except RuntimeError as error:
            raise ServerDied(f"process {self.rank} of {self.count} lost the others: {error}") from error
        for rank, other in enumerate(rounds):
            if other.fault is not None:
                raise ServerDied(f"process {rank} of {self.count}: {other.fault}")
        totals = [other.total for other in rounds]
        if len(set(totals)) > 1:
            raise ServerError(f"the processes were given unlike numbers of requests: {totals}")
        return rounds


def launched_several() -> bool:
    """Tell whether `accelerate launch` or torchrun started several processes, of which this is one."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


@contextmanager
def launched_processes() -> Iterator[Processes]:
    """Join the processes that were launched together, if any; all of them must come here.

    Raises ConfigError where accelerate is missing.
    """
    if not launched_several():
        yield Processes()
        return
    import torch.distributed

    join_launched()
    group = torch.distributed.new_group(backend="gloo")
    try:
        yield Processes(rank=torch.distributed.get_rank(), count=torch.distributed.get_world_size(), group=group)
    finally:
        torch.distributed.destroy_process_group(group)


def join_launched() -> None:
    """Set up what the launched processes talk through, once in each process's life, unless somebody else did."""
    import torch

    if torch.distributed.is_initialized():
        return
    try:
        state = import_module("accelerate").PartialState
    except ImportError as error:
        raise ConfigError("asking with several processes needs accelerate: pip install accelerate") from error
    state(cpu=not torch.accelerator.is_available())
    atexit.register(_leave)


def _leave() -> None:
    import torch.distributed

    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
