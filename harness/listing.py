"""What a list would run: GPUs, queue and duration of each config, and how all are dealt over CI jobs."""

from __future__ import annotations

import difflib
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from harness.backends.registry import build_backend
from harness.config import ModelConfig
from harness.config_lists import ListedConfig
from harness.durations import Duration, Durations, guessed, key_of
from harness.errors import ConfigError
from harness.platforms import Platform, PlatformKind, Requirement
from harness.shards import shards

ANY = "any"
"""What `platforms:` says where it is left out."""
SEPARATOR = ","
_SIGNS = {">=": "-ge-", "<=": "-le-", "==": "-", "<": "-lt-", ">": "-gt-"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Queues:
    """How a job's queue, or a runner's label, is named after the GPUs that it needs."""

    template: str = "gpu-{count}-{type}"
    cpu: str = "cpu"
    """For what needs no GPU."""
    types: Mapping[str, str] = field(default_factory=dict)
    """Names for requirements as `platforms:` spells them, or for ANY."""

    def requirement(self, config: ModelConfig) -> Requirement | None:
        """Choose among `platforms:`: the first that has a name here, else the first."""
        named = [one for one in config.platforms or () if str(one) in self.types]
        return next(iter([*named, *(config.platforms or ())]), None)

    def type_of(self, requirement: Requirement | None) -> str:
        text = ANY if requirement is None else str(requirement)
        return self.types.get(text) or _label(text)

    def name(self, gpus: int, gpu_type: str) -> str:
        return self.template.format(count=gpus, type=gpu_type) if gpus else self.cpu


def _label(requirement: str) -> str:
    """Spell a requirement with what queue names may hold: cuda>=9.0 becomes cuda-ge-9-0."""
    worded = re.sub(r">=|<=|==|<|>", lambda sign: _SIGNS[sign.group()], requirement)
    return re.sub(r"[^A-Za-z0-9]+", "-", worded).strip("-")


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """One config and what running it takes."""

    entry: ListedConfig
    gpus: int
    gpu_type: str
    queue: str
    duration: Duration


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The configs that one CI job runs, one after the other."""

    id: str
    """Fit for file names: 03-of-08."""
    queue: str
    gpus: int
    """As many as the neediest of its configs takes."""
    gpu_type: str
    configs: tuple[Planned, ...]

    @property
    def ids(self) -> tuple[str, ...]:
        return tuple(planned.entry.id for planned in self.configs)

    @property
    def seconds(self) -> float:
        return sum(_seconds([p for p in self.configs if p.entry.server_id == server]) for server in self._servers)

    @property
    def measured(self) -> bool:
        """False where any of its durations is a guess."""
        return all(planned.duration.measured for planned in self.configs)

    @property
    def _servers(self) -> Sequence[str]:
        return list(dict.fromkeys(planned.entry.server_id for planned in self.configs))


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """When CI stops a job: `minimum` minutes, and its expected duration `factor` times."""

    factor: float = 3.0
    minimum: float = 30.0
    """Longer than a server may take to start by default, so that the suite itself says which one hung."""

    def minutes(self, job: Job) -> int:
        return math.ceil(self.minimum + self.factor * job.seconds / 60)


def plan_configs(
    listed: Sequence[ListedConfig], queues: Queues, durations: Durations | None = None
) -> tuple[Planned, ...]:
    """Say of each config what it takes; without measured durations all are guessed, the same on every machine."""
    return tuple(_planned(entry, queues, durations) for entry in listed)


def _planned(entry: ListedConfig, queues: Queues, durations: Durations | None) -> Planned:
    requirement = queues.requirement(entry.config)
    config = _as_it_holds(entry, requirement)
    on_cpu = requirement is not None and requirement.kind is PlatformKind.CPU
    gpus = 0 if on_cpu or not build_backend(config.backend).local else config.gpus
    gpu_type = queues.type_of(requirement) if gpus else "cpu"
    return Planned(
        entry=entry,
        gpus=gpus,
        gpu_type=gpu_type,
        queue=queues.name(gpus, gpu_type),
        duration=_duration(entry, config, durations),
    )


def _duration(entry: ListedConfig, config: ModelConfig, durations: Durations | None) -> Duration:
    return guessed(config) if durations is None else durations.estimate(key_of(entry, None), config)


def _as_it_holds(entry: ListedConfig, requirement: Requirement | None) -> ModelConfig:
    """Apply the overrides of the platform that a config asks for; what cannot be decided from afar is left out."""
    if requirement is None:
        return entry.config
    bounds = [".".join(map(str, bound)) for sign, bound in requirement.bounds if sign in (">=", "==")]
    archs = (requirement.arch,) if requirement.arch is not None else tuple(bounds[:1])
    try:
        return entry.file.on(Platform(kind=requirement.kind, archs=archs), entry.task)
    except ConfigError:
        return entry.config


def plan_jobs(planned: Sequence[Planned], n: int | None = None) -> tuple[Job, ...]:
    """Deal configs over at most `n` jobs, each of one queue, so that all finish at about the same time.

    One job for each server where `n` is None. All tasks of a server are in one job, and every config in exactly one.
    Raises ConfigError where there are more queues than jobs, and for an id that cannot be handed to a job.
    """
    for one in planned:
        if SEPARATOR in one.entry.id:
            raise ConfigError(f"{one.entry.listed_at}: a job cannot be given {one.entry.id}: rename it without a comma")
    queues = _by_queue(planned)
    dealt = [
        (queue, ids)
        for queue, count in _jobs_of_queues(queues, n).items()
        for ids in shards([(server, _seconds(tasks)) for server, tasks in queues[queue].items()], count)
    ]
    width = len(str(len(dealt)))
    jobs = tuple(
        _job(f"{number:0{width}}-of-{len(dealt)}", queue, [task for server in ids for task in queues[queue][server]])
        for number, (queue, ids) in enumerate(dealt, start=1)
    )
    check_partition(jobs, planned)
    return jobs


def _by_queue(planned: Sequence[Planned]) -> dict[str, dict[str, list[Planned]]]:
    """Group by the queue of a server's first task, then by server."""
    queue_of: dict[str, str] = {}
    groups: dict[str, dict[str, list[Planned]]] = {}
    for one in planned:
        queue = queue_of.setdefault(one.entry.server_id, one.queue)
        groups.setdefault(queue, {}).setdefault(one.entry.server_id, []).append(one)
    return groups


def _jobs_of_queues(queues: Mapping[str, Mapping[str, Sequence[Planned]]], n: int | None) -> dict[str, int]:
    """Give each queue a job, and each further job to the queue whose jobs would take longest."""
    if n is None:
        return {queue: len(servers) for queue, servers in queues.items()}
    if n < len(queues):
        raise ConfigError(
            f"--shards {n}: the list needs {len(queues)} queues ({', '.join(queues)}): ask for {len(queues)} or more, "
            "or give a --queue that does not tell them apart"
        )
    seconds = {queue: sum(map(_seconds, servers.values())) for queue, servers in queues.items()}
    counts = dict.fromkeys(queues, 1)
    for _ in range(n - len(queues)):
        open_to_more = [queue for queue in queues if counts[queue] < len(queues[queue])]
        if not open_to_more:
            break
        counts[max(open_to_more, key=lambda queue: seconds[queue] / counts[queue])] += 1
    return counts


def _job(job_id: str, queue: str, configs: Sequence[Planned]) -> Job:
    neediest = max(configs, key=lambda planned: planned.gpus)
    return Job(id=job_id, queue=queue, gpus=neediest.gpus, gpu_type=neediest.gpu_type, configs=tuple(configs))


def _seconds(tasks: Sequence[Planned]) -> float:
    """Add up one server's tasks, which share its start."""
    return max(task.duration.startup for task in tasks) + sum(task.duration.asking for task in tasks)


def check_partition(jobs: Sequence[Job], planned: Sequence[Planned]) -> None:
    """Raise RuntimeError unless every config is in exactly one job: a lost one would look like one that passed."""
    dealt = Counter(config_id for job in jobs for config_id in job.ids)
    listed = Counter(one.entry.id for one in planned)
    if dealt != listed:
        wrong = sorted({*(dealt - listed), *(listed - dealt)})
        raise RuntimeError(f"these configs are not in exactly one job: {', '.join(wrong)}")


def chosen(listed: Sequence[ListedConfig], ids: str) -> tuple[ListedConfig, ...]:
    """Take the configs that `--configs ID,ID` names, in the list's order; an id without its task names all of them.

    Raises ConfigError for an id that the lists do not have.
    """
    wanted = [name for name in (part.strip() for part in ids.split(SEPARATOR)) if name]
    known = {name for entry in listed for name in (entry.id, entry.server_id)}
    faults = [f"--configs {name}: no list names it{_near(name, known)}" for name in wanted if name not in known]
    if faults or not wanted:
        raise ConfigError(*(faults or [f"--configs {ids!r}: names no config: give ids with commas between them"]))
    return tuple(entry for entry in listed if not {entry.id, entry.server_id}.isdisjoint(wanted))


def _near(name: str, known: set[str]) -> str:
    near = difflib.get_close_matches(name, sorted(known), n=1)
    return f"; did you mean {near[0]}?" if near else ""


def parse_shard(text: str) -> tuple[int, int]:
    """Read `K/N`, the K-th of N shards, from 1; raises ConfigError."""
    found = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", text)
    if not found or not 1 <= int(found[1]) <= int(found[2]):
        raise ConfigError(f"--shard {text}: must be K/N with K from 1 to N, as in 2/8")
    return int(found[1]), int(found[2])


def shard_of(
    listed: Sequence[ListedConfig], k: int, n: int, durations: Durations | None = None
) -> tuple[ListedConfig, ...]:
    """Take the k-th of n shards, from 1, of machines that are all alike.

    Shards are disjoint only where every machine sees the same durations; without any that is so wherever the lists and
    YAMLs are the same. Raises ConfigError where a shard would be empty.
    """
    planned = plan_configs(listed, Queues(), durations)
    servers: dict[str, list[Planned]] = {}
    for one in planned:
        servers.setdefault(one.entry.server_id, []).append(one)
    if n > len(servers):
        raise ConfigError(f"--shard {k}/{n}: there are {len(servers)} servers: ask for so many shards at most")
    mine = set(shards([(server, _seconds(tasks)) for server, tasks in servers.items()], n)[k - 1])
    return tuple(entry for entry in listed if entry.server_id in mine)
