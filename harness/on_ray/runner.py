"""Runs each server's configs as a Ray task, on whichever node has its GPUs; Ray places, this waits and keeps."""

from __future__ import annotations

import importlib
import itertools
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import harness
from harness.config_lists import ListedConfig
from harness.errors import ConfigError, InfrastructureError
from harness.on_ray.evaluation import INTERRUPTED
from harness.on_ray.jobs import MAX_ATTEMPTS, Job, need_of, refuse_several_nodes
from harness.on_ray.node import run_order
from harness.on_ray.orders import gsm8k_files, order_for
from harness.on_ray.results import ArrivingRecord
from harness.records import RunRecord
from harness.serving import RunOptions

WAIT_SECONDS = 1.0
LOOK_SECONDS = 5.0
"""How often it is looked whether what still waits could run at all; a cluster takes longer to miss a node."""
CANCEL_SECONDS = 7.0
"""A server is asked to end for 6 s at most, and CI gives a cancelled job 8; its worker is killed after that."""
BACKPRESSURE = 8
"""Events that a node may be ahead, each at most one chunk of a file."""
RECONNECT = "start a cluster with `ray start --head`, or name one with --address"


@dataclass(frozen=True, slots=True, kw_only=True)
class RaySettings:
    """How configs are put on a cluster."""

    address: str | None = None
    """By default $RAY_ADDRESS, then the cluster that this machine is in."""
    cpus: float = 1.0
    """CPUs that each server takes."""


@dataclass(kw_only=True)
class RayOutcome:
    """What a run came to beside its results."""

    skipped: dict[str, str] = field(default_factory=dict)
    platforms: set[str] = field(default_factory=set)
    gpus: list[Mapping[str, Any]] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    """What went wrong although every config has its result."""
    interrupted: str | None = None


def run_on_ray(
    listed: Sequence[ListedConfig],
    record: RunRecord,
    options: RunOptions,
    settings: RaySettings,
    say: Callable[[str, str], None],
) -> RayOutcome:
    """Run every config and fill the record; `say` is told each change of a config's state.

    An interruption stops the servers on all nodes and is told in the outcome. Raises ConfigError, before anything
    starts, for a server over several nodes and where Ray is not installed; InfrastructureError where there is no
    cluster, RecordUnwritable.
    """
    refuse_several_nodes(listed)
    # Ray takes SIGTERM for itself when it connects.
    with _connected(settings) as ray, _Interruptions() as interruptions:
        jobs = [
            _job(tuple(entries), ray, record, settings, say)
            for _, entries in itertools.groupby(listed, key=lambda entry: entry.server_id)
        ]
        return _RayRun(ray, jobs, options, gsm8k_files(listed, options.data_dir)).run(interruptions)


def ray_module() -> Any:
    """Import Ray; raises ConfigError saying how to install it."""
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise ConfigError(f"--on ray: {error}: pip install 'accuracy-gate[ray]'") from error


@contextmanager
def _connected(settings: RaySettings) -> Iterator[Any]:
    ray = ray_module()
    if (settings.address or "").startswith("ray://"):
        raise ConfigError(
            f"--address {settings.address}: Ray Client cannot stream records back: start this on a node of the "
            "cluster, as `ray job submit` does, or give the address that `ray start` prints"
        )
    try:
        ray.init(
            address=settings.address or "auto",
            # Nodes get this very package, so that they ask and grade as the driver would.
            runtime_env={"py_modules": [str(Path(harness.__file__).resolve().parent)], "excludes": ["**/__pycache__"]},
            log_to_driver=False,
            logging_level="ERROR",
        )
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        where = settings.address or "of this machine or in RAY_ADDRESS"
        raise InfrastructureError(f"no Ray cluster at the address {where}: {error}; {RECONNECT}") from error
    try:
        yield ray
    finally:
        ray.shutdown()


class _Interruptions:
    """Lets SIGTERM, as from a cancelled CI job, end a run as Ctrl-C does, and knows which of them it was."""

    def __init__(self) -> None:
        self.came: str | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._before[number] = signal.signal(number, self._interrupt)
        return self

    def __exit__(self, *exc_info: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _interrupt(self, signum: int, frame: object) -> None:
        # Kept beside the exception, which Ray replaces by one of its own while it waits.
        self.came = signal.Signals(signum).name
        raise KeyboardInterrupt(self.came)


def _job(
    entries: tuple[ListedConfig, ...],
    ray: Any,
    record: RunRecord,
    settings: RaySettings,
    say: Callable[[str, str], None],
) -> Job:
    there = any(node.get("GPU", 0) for node in _nodes(ray))
    need = need_of(entries, cpus=settings.cpus, gpus_there=there)
    return Job(entries=entries, need=need, arriving=ArrivingRecord(record), say=say)


def _nodes(ray: Any) -> list[Mapping[str, float]]:
    """List what each living node has in all."""
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


class _RayRun:
    """All jobs of a run; used once."""

    def __init__(self, ray: Any, jobs: Sequence[Job], options: RunOptions, gsm8k: Mapping[str, bytes] | None) -> None:
        self._ray = ray
        self._jobs = jobs
        self._options = options
        self._gsm8k = ray.put(gsm8k) if gsm8k is not None else None
        self._live: dict[Any, Job] = {}
        self._outcome = RayOutcome()
        self._looked = time.monotonic()

    def run(self, interruptions: _Interruptions) -> RayOutcome:
        try:
            for job in self._jobs:
                self._submit_or_refuse(job)
            while self._live:
                self._step()
                self._refuse_impossible()
        except BaseException as error:
            self._outcome.interrupted = interruptions.came
            self._cancel(f"interrupted: {interruptions.came}" if interruptions.came else f"the run broke off: {error}")
            if interruptions.came is None:
                raise
        for job in self._jobs:
            self._outcome.skipped |= job.skipped
            self._outcome.platforms |= job.platforms
        gpus = {uuid: gpu for job in self._jobs for uuid, gpu in job.gpus.items()}
        self._outcome.gpus = list(gpus.values())
        return self._outcome

    def _submit_or_refuse(self, job: Job) -> None:
        fault = job.need.fault(_nodes(self._ray))
        if fault is None:
            self._submit(job)
        elif self._options.require_gpus or job.lost:
            job.settle("; ".join((fault, *job.lost)))
        else:
            job.skipped |= {entry.id: fault for entry in job.entries}
            job.settle(fault)

    def _submit(self, job: Job) -> None:
        job.begin()
        need = f"{job.need.gpus:g} GPUs" if job.need.gpus else "a node"
        again = f" (attempt {job.attempt} of {MAX_ATTEMPTS})" if job.attempt > 1 else ""
        job.say(job.id, f"waiting for {need}{again}")
        task = self._ray.remote(
            num_gpus=job.need.gpus,
            num_cpus=job.need.cpus,
            max_retries=0,  # a second attempt of Ray's own would go on in the middle of the first one's files
            num_returns="streaming",
            _generator_backpressure_num_objects=BACKPRESSURE,
            name=f"accuracy-gate {job.id}",
        )(run_order)
        self._live[task.remote(order_for(job.owed, self._options), self._gsm8k)] = job

    def _step(self, seconds: float = WAIT_SECONDS) -> None:
        """Take the next event of one job, whichever has one."""
        streams = list(self._live)
        ready, _ = self._ray.wait(streams, num_returns=1, timeout=seconds, fetch_local=False)
        for stream in ready:
            job = self._live.pop(stream)
            try:
                job.take(self._ray.get(next(stream)))
            except StopIteration:
                self._end(job)
            except self._ray.exceptions.RayError as error:
                self._fail(job, error)
            except BaseException:
                self._live[stream] = job
                raise
            else:
                self._live[stream] = job  # last in line, so that none is starved

    def _end(self, job: Job) -> None:
        """Take the result of an attempt whose node is there still."""
        code, said = (job.ended.code, job.ended.output) if job.ended else (1, "")
        if code == INTERRUPTED:
            # Nobody here asked for it: the node is about to go.
            self._lose(job, f"{job.where} was preempted ({'; '.join(job.faults)})")
            return
        reason = "; ".join(job.faults) or f"the evaluation on {job.where} ended with code {code}: {said}"
        if code and not job.owed:
            self._outcome.faults.append(f"{job.id}: {reason}")
        job.settle(reason)

    def _fail(self, job: Job, error: Exception) -> None:
        """Tell the loss of a node, after which it is tried again, from a fault of the task."""
        exceptions = self._ray.exceptions
        text = str(error).strip()
        if isinstance(error, exceptions.RayTaskError):
            job.settle(f"on {job.where}: {getattr(error, 'cause', error)}")
        elif isinstance(error, exceptions.RuntimeEnvSetupError | exceptions.TaskUnschedulableError):
            job.settle(f"Ray could not start it: {text}")
        else:
            self._lose(job, f"{job.where} was lost: {text.splitlines()[0].partition('. ')[0]}")

    def _lose(self, job: Job, why: str) -> None:
        job.say(job.id, why)
        if job.lose(why):
            self._submit_or_refuse(job)
        else:
            job.settle("; ".join(job.lost))

    def _refuse_impossible(self) -> None:
        """Give up what waits for more than any node has now: Ray would wait for ever."""
        if time.monotonic() - self._looked < LOOK_SECONDS:
            return
        self._looked = time.monotonic()
        nodes = _nodes(self._ray)
        for stream, job in list(self._live.items()):
            fault = job.need.fault(nodes) if job.placed is None else None
            if fault is not None:
                del self._live[stream]
                self._ray.cancel(stream, force=True)
                job.settle("; ".join((fault, *job.lost)))

    def _cancel(self, why: str) -> None:
        """Stop the servers on all nodes, politely as far as there is time, and keep what came."""
        for stream, job in self._live.items():
            job.say(job.id, "stopping")
            self._ray.cancel(stream, force=False, recursive=False)
        stopping = list(self._live.values())
        deadline = time.monotonic() + CANCEL_SECONDS
        while self._live and time.monotonic() < deadline:
            self._drain(deadline - time.monotonic())
        for stream in self._live:
            self._ray.cancel(stream, force=True)
        unsettled = [*stopping, *(job for job in self._jobs if job.attempt == 0)]
        for job in dict.fromkeys(unsettled):
            job.settle(why)

    def _drain(self, seconds: float) -> None:
        """Take what a cancelled task had sent; its end is an error, which says that its server is gone."""
        ready, _ = self._ray.wait(list(self._live), num_returns=1, timeout=seconds, fetch_local=False)
        for stream in ready:
            job = self._live.pop(stream)
            try:
                job.take(self._ray.get(next(stream)))
                self._live[stream] = job
            except (StopIteration, self._ray.exceptions.RayError):
                continue
