"""One server's configs on their way through a cluster: what they ask for, and how far each attempt has come."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from harness.backends.registry import flags_of
from harness.config_lists import ListedConfig
from harness.errors import ConfigError
from harness.on_ray.orders import Ended, Event, Piece, Placed, Placement, Told
from harness.on_ray.results import ArrivingRecord
from harness.parallelism import read_parallelism

MAX_ATTEMPTS = 2
"""A node that is lost says nothing of the model; one that is lost twice says something of the config."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What Ray must find on one node."""

    gpus: float
    cpus: float

    def fault(self, nodes: Sequence[Mapping[str, float]]) -> str | None:
        """Say why no node can ever have it; `nodes` are the resources of those that are alive."""
        if any(self.gpus <= node.get("GPU", 0) and self.cpus <= node.get("CPU", 0) for node in nodes):
            return None
        most = max((node.get("GPU", 0) for node in nodes), default=0)
        if most < self.gpus:
            return f"needs {self.gpus:g} GPUs, the largest of {len(nodes)} nodes has {most:g}"
        return f"needs {self.gpus:g} GPUs and {self.cpus:g} CPUs, which none of {len(nodes)} nodes has together"


def need_of(entries: Sequence[ListedConfig], *, cpus: float, gpus_there: bool) -> Need:
    """Read what a server takes; where no node has a GPU, servers may be of the CPU's builds and take none."""
    config = entries[0].config
    if not gpus_there:
        return Need(gpus=0.0, cpus=cpus)
    return Need(gpus=config.gpu_share or float(config.gpus), cpus=cpus)


def refuse_several_nodes(listed: Sequence[ListedConfig]) -> None:
    """Raise ConfigError for servers over several machines: their parts would have to start together."""
    faults = (_several_nodes(entry) for entry in listed)
    if found := [fault for fault in dict.fromkeys(faults) if fault is not None]:
        raise ConfigError(*found)


def _several_nodes(entry: ListedConfig) -> str | None:
    config = entry.config
    remedy = "--on ray puts each server on one node: make it fit, or start it yourself and use --base-url"
    if flags_of(config.backend) == "sglang" and _sglang_nodes(config.arguments) > 1:
        return f"{entry.path}: --nnodes asks for several machines: {remedy}"
    if flags_of(config.backend) != "vllm" or config.num_gpus is not None:
        return None
    elsewhere = read_parallelism(config.arguments).gpus_elsewhere
    return f"{entry.path}: needs {elsewhere} GPUs of other machines: {remedy}" if elsewhere else None


def _sglang_nodes(arguments: Sequence[str]) -> int:
    nodes = 1
    for word, following in zip(arguments, [*arguments[1:], ""], strict=True):
        flag, equals, value = word.partition("=")
        if flag == "--nnodes":
            nodes = int(value if equals else following)
    return nodes


@dataclass(kw_only=True, eq=False)
class Job:
    """The tasks of one server; what they have learnt so far survives the loss of their node."""

    entries: tuple[ListedConfig, ...]
    need: Need
    arriving: ArrivingRecord
    say: Callable[[str, str], None]
    """Told of a config, by id, what has become of it."""
    skipped: dict[str, str] = field(default_factory=dict)
    platforms: set[str] = field(default_factory=set)
    gpus: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    """By UUID, those of the nodes it ran on."""
    attempt: int = 0
    lost: list[str] = field(default_factory=list)
    placed: Placed | None = None
    ended: Ended | None = None
    faults: list[str] = field(default_factory=list)

    @property
    def id(self) -> str:
        return self.entries[0].server_id

    @property
    def owed(self) -> tuple[ListedConfig, ...]:
        """The tasks without a result."""
        return tuple(e for e in self.entries if e.id not in self.skipped and self.arriving.verdict(e) is None)

    @property
    def where(self) -> str:
        if self.placed is None:
            return "no node"
        gpus = f" (GPU {', '.join(self.placed.gpus)})" if self.placed.gpus else ""
        return f"node {self.placed.node[:8]} on {self.placed.host}{gpus}"

    def begin(self) -> None:
        """Begin an attempt."""
        self.attempt += 1
        self.placed, self.ended, self.faults = None, None, []

    def take(self, event: Event) -> None:
        """Note what the node says. Raises RecordUnwritable."""
        match event:
            case Placed():
                self.placed = event
                self.say(self.id, f"on {self.where}")
            case Piece():
                self.arriving.take(event)
            case Told():
                for line in event.lines:
                    self._hear(line)
            case Ended():
                self.ended = event

    def _hear(self, line: Mapping[str, Any]) -> None:
        match line:
            case {"config": str(config_id), "stage": str(stage)}:
                self.say(config_id, stage)
            case {"config": str(config_id), "skipped": str(reason)}:
                self.skipped[config_id] = reason
            case {"fault": str(fault)}:
                self.faults.append(fault)
            case {"interrupted": str(why)}:
                self.faults.append(f"interrupted: {why}")
            case {"platform": str(platform), "gpus": [*gpus]}:
                self.platforms.add(platform)
                self.gpus |= {gpu["uuid"]: gpu for gpu in gpus}
            case {"note": str(note)}:
                self.say(self.id, note)

    def lose(self, why: str) -> bool:
        """Note that the attempt came to nothing for its node's sake; True where another one is due."""
        self.lost.append(f"attempt {self.attempt}: {why}")
        if self.attempt >= MAX_ATTEMPTS:
            return False
        final = (None, "infrastructure")
        self.arriving.put_away([e for e in self.entries if self.arriving.verdict(e) in final], self.attempt)
        return bool(self.owed)

    def settle(self, reason: str) -> None:
        """Complete the results, and say each."""
        placed = self.placed or Placed(node="unknown", host="unknown", gpus=(), record="")
        placement = Placement(
            node=placed.node,
            host=placed.host,
            gpus=placed.gpus,
            attempt=self.attempt,
            attempts=MAX_ATTEMPTS,
            lost=tuple(self.lost),
        )
        for entry in self.entries:
            if entry.id in self.skipped:
                self.say(entry.id, f"skipped: {self.skipped[entry.id]}")
                continue
            self.arriving.settle(entry, placement, reason, elsewhere=placed.record)
            self.say(entry.id, f"{self.arriving.verdict(entry)}: {self.arriving.reason(entry).partition(chr(10))[0]}")
