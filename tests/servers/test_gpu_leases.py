"""GPU leases between real processes: taken in order, given back by whatever end, told to everybody."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import stat
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from trials import PATIENCE, eventually

from harness.errors import ConfigError, InfrastructureError
from harness.gpus.inventory import Gpu
from harness.gpus.leases import GpuLeases, Lease
from harness.gpus.queue import Granted, Ticket
from harness.gpus.tickets import VARIABLE, GpusBusy, Holder, TicketFolder, lease_folder

RUN = """
import json, os, signal, sys
from pathlib import Path
from harness.gpus.leases import GpuLeases
from harness.gpus.inventory import Gpu

def terminated(*_):
    raise KeyboardInterrupt

signal.signal(signal.SIGTERM, terminated)
options = json.loads(sys.argv[1])
gpus = [Gpu(kind="cuda", index=n, uuid=f"GPU-{n}", name="test", memory_total=None, arch=None, selector=str(n))
        for n in options.pop("gpus")]
turns, folder = options.pop("turns", 0), Path(options.pop("folder"))
leases = GpuLeases(folder)

def say(*words):
    print(*words, flush=True)

for _ in range(turns):
    with leases.lease(gpus, **options) as lease:
        taken = [folder.parent / f"taken-{gpu.index}" for gpu in lease.gpus]
        for path in taken:
            path.touch(exist_ok=False)  # fails where somebody else has it at this moment
        for path in taken:
            path.unlink()
if not turns:
    with leases.lease(gpus, waiting=lambda text: say("waiting:", text), **options) as lease:
        say("got", ",".join(str(gpu.index) for gpu in lease.gpus), "place", lease.place)
        sys.stdin.read()
say("left")
"""


def gpus(count: int) -> tuple[Gpu, ...]:
    return tuple(
        Gpu(kind="cuda", index=n, uuid=f"GPU-{n}", name="test", memory_total=None, arch=None, selector=str(n))
        for n in range(count)
    )


class Run:
    """A process that leases GPUs and keeps them until it is told to leave."""

    def __init__(self, folder: Path, what: str, on: list[int], **options: object) -> None:
        self.said_path = folder.with_name(f"{what}.out")
        words = json.dumps({"folder": str(folder), "what": what, "gpus": on, **options})
        with self.said_path.open("wb") as out:
            self.process = subprocess.Popen([sys.executable, "-c", RUN, words], stdin=subprocess.PIPE, stdout=out)

    @property
    def said(self) -> str:
        return self.said_path.read_text()

    @property
    def holds(self) -> str | None:
        """The indices of its GPUs and its place, as in "0,1 place 0"."""
        line = next((line for line in self.said.splitlines() if line.startswith("got ")), None)
        return line and line.removeprefix("got ")

    def got(self) -> str:
        assert eventually(lambda: self.holds), f"never got a GPU: {self.said}"
        return str(self.holds)

    def waits(self) -> None:
        assert eventually(lambda: "waiting:" in self.said), f"never waited: {self.said}"

    def leave(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        assert self.process.wait(PATIENCE) == 0

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        if self.process.stdin is not None:
            self.process.stdin.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "leases"


@pytest.fixture
def start(folder: Path) -> Iterator[Callable[..., Run]]:
    """Start a process that leases; whatever runs at the end is killed."""
    runs: list[Run] = []

    def begin(what: str, on: list[int], **options: object) -> Run:
        runs.append(Run(folder, what, on, **options))
        return runs[-1]

    yield begin
    for run in runs:
        run.end()


def take(folder: Path, count: int = 1, of: int = 1, share: float | None = None) -> Lease:
    """Take a lease now or not at all, and give it back at once."""
    with GpuLeases(folder).lease(gpus(of), count=count, share=share, what="a test", timeout=0) as lease:
        return lease


def left_in(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name != ".lock"]


def ticket_of(holder: Holder, **changes: object) -> bytes:
    return json.dumps({**asdict(holder), **changes}).encode()


def holder_of_gpu_0(what: str = "by hand") -> Holder:
    granted = Granted(gpus=("GPU-0",))
    return Holder.this_process(what, Ticket(number=1, candidates=("GPU-0",), granted=granted))


def test_the_second_waits_for_the_first(start: Callable[..., Run], folder: Path) -> None:
    """One GPU serves one run at a time; the other says for whom it waits, and goes on when that one leaves."""
    first = start("first", [0])
    assert first.got() == "0 place 0"
    second = start("second", [0])
    second.waits()
    assert f"1 whole GPU among 0: pid {first.process.pid} (first) holds GPU 0" in second.said
    first.leave()
    assert second.got() == "0 place 0"
    second.leave()
    assert left_in(folder) == []


def test_runs_spread_over_free_gpus(start: Callable[..., Run]) -> None:
    """Whoever comes takes GPUs that are free now, within those that the run may use."""
    assert start("one", [0, 1, 2, 3]).got() == "0 place 0"
    assert start("two", [0, 1, 2, 3], count=2).got() == "1,2 place 0"
    assert start("elsewhere", [5]).got() == "5 place 0"
    assert start("last", [0, 1, 2, 3]).got() == "3 place 0"


def test_first_come_first_served(start: Callable[..., Run]) -> None:
    """Those who wait are served in the order in which they came."""
    runs = [start("first", [0])]
    runs[0].got()
    for name in ("second", "third", "fourth"):
        runs.append(start(name, [0]))
        runs[-1].waits()
    for run, later in zip(runs, [runs[n + 1 :] for n in range(len(runs))], strict=True):
        run.got()
        assert [one.holds for one in later] == [None] * len(later)
        run.leave()


def test_small_ones_do_not_starve_a_big_one(start: Callable[..., Run]) -> None:
    """While one waits for two GPUs, the free one of them is kept for it; other GPUs are not."""
    first = start("first", [0, 1])
    first.got()
    big = start("big", [0, 1], count=2)
    big.waits()
    small = start("small", [0, 1])
    small.waits()
    assert f"pid {big.process.pid} (big) is before it in line" in small.said
    assert start("elsewhere", [0, 1, 2]).got() == "2 place 0"
    first.leave()
    assert big.got() == "0,1 place 0"
    assert small.holds is None
    big.leave()
    assert small.got() == "0 place 0"


def test_shares_of_one_gpu(start: Callable[..., Run], folder: Path) -> None:
    """Shares fill one GPU, each with a place of its own, before they touch the next; nobody gets it whole meanwhile."""
    runs = [start(f"quarter-{n}", [0, 1], share=0.25) for n in range(4)]
    assert sorted(run.got() for run in runs) == [f"0 place {place}" for place in range(4)]
    assert start("fifth", [0, 1], share=0.25).got() == "1 place 0"
    whole = start("whole", [0, 1])
    whole.waits()
    for run in runs:
        run.leave()
    assert whole.got() == "0 place 0"
    with pytest.raises(GpusBusy, match=r"0\.5 of a GPU among 0: pid \d+ \(whole\) holds GPU 0"):
        take(folder, share=0.5)


def test_a_killed_holders_gpu_is_free_within_two_seconds(start: Callable[..., Run]) -> None:
    """A lease dies with its process, however that ended."""
    seconds = []
    for attempt in range(3):
        holder = start(f"holder-{attempt}", [attempt])
        holder.got()
        next_one = start(f"next-{attempt}", [attempt])
        next_one.waits()
        began = time.monotonic()
        holder.process.kill()
        next_one.got()
        seconds.append(time.monotonic() - began)
    assert min(seconds) < 2


def test_a_zombie_holds_nothing(start: Callable[..., Run], folder: Path) -> None:
    """A process that was killed but not collected by its parent holds nothing any more."""
    holder = start("holder", [0])
    holder.got()
    with pytest.raises(GpusBusy):
        take(folder)
    os.kill(holder.process.pid, signal.SIGKILL)  # a zombie until this test collects it
    assert eventually(lambda: GpuLeases(folder).table() == ())
    assert take(folder).gpus == gpus(1)


def test_a_stopped_holder_keeps_its_gpu(start: Callable[..., Run], folder: Path) -> None:
    """A process that is suspended still has its server on the GPU."""
    holder = start("holder", [0])
    holder.got()
    os.kill(holder.process.pid, signal.SIGSTOP)
    with pytest.raises(GpusBusy, match="holder"):
        take(folder)
    os.kill(holder.process.pid, signal.SIGCONT)
    holder.leave()
    assert take(folder).gpus == gpus(1)


def test_nobody_waits_for_one_that_was_suspended_in_line(start: Callable[..., Run]) -> None:
    """Ctrl-Z on a waiting run does not stop the whole machine's line; the run goes on when it is continued."""
    first = start("first", [0])
    first.got()
    suspended = start("suspended", [0])
    suspended.waits()
    third = start("third", [0])
    third.waits()
    os.kill(suspended.process.pid, signal.SIGSTOP)
    first.leave()
    third.got()
    os.kill(suspended.process.pid, signal.SIGCONT)
    third.leave()
    suspended.got()


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_whoever_ends_while_waiting_leaves_the_line(
    start: Callable[..., Run], folder: Path, ending: signal.Signals
) -> None:
    """A wait that is cancelled leaves no ticket, so that those behind it move up; so does one that is killed."""
    first = start("first", [0])
    first.got()
    waiter = start("waiter", [0])
    waiter.waits()
    third = start("third", [0])
    third.waits()
    os.kill(waiter.process.pid, ending)
    waiter.process.wait(PATIENCE)
    first.leave()
    third.got()
    third.leave()
    assert take(folder).gpus == gpus(1)
    assert left_in(folder) == []


def test_an_error_gives_the_gpus_back(folder: Path) -> None:
    """Whatever ends the config, its GPUs are free."""
    leases = GpuLeases(folder)
    with pytest.raises(ZeroDivisionError), leases.lease(gpus(1), what="a test"):
        _ = 1 / (len(leases.table()) - 1)
    assert leases.table() == ()
    assert left_in(folder) == []


def test_a_forked_child_gives_nothing_back(folder: Path) -> None:
    """A child that ends with the parent's frames on its stack does not end the parent's lease."""
    forking = "child = os.fork() or sys.exit(); os.waitpid(child, 0); say(len(leases.table()))"
    script = RUN.replace("sys.stdin.read()", forking).replace('say("left")', "")
    words = json.dumps({"folder": str(folder), "what": "parent", "gpus": [0]})
    done = subprocess.run([sys.executable, "-c", script, words], capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "1"
    assert left_in(folder) == []


def test_the_wait_has_an_end(start: Callable[..., Run], folder: Path) -> None:
    """Out of time, the error names what was wanted and who has it, and no ticket stays."""
    holder = start("holder", [0])
    holder.got()
    with (
        pytest.raises(GpusBusy, match=rf"a test: not within 0\.3 s: .*pid {holder.process.pid} \(holder\) holds GPU 0"),
        GpuLeases(folder).lease(gpus(1), what="a test", timeout=0.3),
    ):
        pass
    assert len(GpuLeases(folder).table()) == 1


def test_many_runs_never_share_a_whole_gpu(start: Callable[..., Run], folder: Path) -> None:
    """Five processes that come and go all the time never hold one GPU at the same time, and all of them get through."""
    runs = [start(f"run-{n}", [0, 1], count=1 + n % 2, turns=4) for n in range(5)]
    assert [run.process.wait(PATIENCE * 2) for run in runs] == [0] * len(runs)
    assert left_in(folder) == []


def test_a_pid_that_is_used_again_holds_nothing(folder: Path) -> None:
    """The process that has a dead holder's pid now started at another time."""
    folder.mkdir()
    holder = holder_of_gpu_0()
    (folder / "old.ticket").write_bytes(ticket_of(holder, start=holder.start - 1))
    assert take(folder).gpus == gpus(1)
    assert left_in(folder) == []


def test_a_holder_in_another_container_is_known_by_its_lock(folder: Path) -> None:
    """Where a pid means another process, the lock on the ticket's companion says whether its process lives."""
    elsewhere = TicketFolder(folder)
    with elsewhere.locked():
        elsewhere.write("theirs", replace(holder_of_gpu_0("in a container"), space="another", pid=1, start=1))
    with pytest.raises(GpusBusy, match=r"pid 1 \(in a container\) holds GPU 0"):
        take(folder)
    os.close(elsewhere._lives["theirs"])  # as the kernel does at the process' end
    assert take(folder).gpus == gpus(1)
    assert left_in(folder) == []


DAMAGE = {
    "empty": lambda whole: b"",
    "torn": lambda whole: whole[: len(whole) // 2],
    "no JSON": lambda whole: b"\x00\xff" * 20,
    "a list": lambda whole: b"[]",
    "no ticket": lambda whole: b'{"pid": 1}',
    "wrong types": lambda whole: whole.replace(b'"count": 1', b'"count": "one"'),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_ticket_is_put_aside(folder: Path, damage: Callable[[bytes], bytes]) -> None:
    """What cannot be read stops nobody: it is explained and kept for whoever looks into it."""
    folder.mkdir()
    content = damage(ticket_of(holder_of_gpu_0()))
    (folder / "bad.ticket").write_bytes(content)
    with pytest.warns(UserWarning, match=r"bad\.ticket: no ticket for GPUs .* put aside as bad\.damaged"):
        assert take(folder).gpus == gpus(1)
    assert (folder / "bad.damaged").read_bytes() == content
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert take(folder).gpus == gpus(1)


def test_what_a_crash_while_writing_leaves_is_swept(folder: Path) -> None:
    """A half-written file and a companion without its ticket are removed by whoever looks."""
    folder.mkdir()
    (folder / "crashed.part").write_bytes(ticket_of(holder_of_gpu_0())[:40])
    (folder / "crashed.alive").touch()
    assert take(folder).gpus == gpus(1)
    assert left_in(folder) == []


def test_a_ticket_that_was_swept_away_is_written_again(start: Callable[..., Run], folder: Path) -> None:
    """Whoever waits keeps its place even if somebody cleans up the folder."""
    holder = start("holder", [0])
    holder.got()
    waiter = start("waiter", [0])
    waiter.waits()
    for path in folder.glob("*.ticket"):
        if Holder.parse(path.read_bytes()).waits:
            path.unlink()
    assert eventually(lambda: [one.what for one in GpuLeases(folder).table()] == ["holder", "waiter"])


def test_a_stuck_lock_is_named(folder: Path) -> None:
    """Where a process keeps the folder's lock, the error says which file and how to find it."""
    take(folder)
    with (folder / ".lock").open("rb+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(GpusBusy, match=r"\.lock: held for over .*lslocks"):
            take(folder)
    assert take(folder).gpus == gpus(1)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    """Leases that cannot be kept are an outage that names the folder and the variable."""
    (tmp_path / "file").touch()
    with pytest.raises(InfrastructureError, match=rf"file/leases: leases of GPUs cannot be kept there.*{VARIABLE}"):
        take(tmp_path / "file" / "leases")


def test_others_can_read_tickets_and_use_the_lock(folder: Path) -> None:
    """In a folder that several users share, a strict umask hides no ticket and locks nobody out."""
    before = os.umask(0o077)
    try:
        with GpuLeases(folder).lease(gpus(1), what="a test"):
            modes = {path.suffix or path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
    finally:
        os.umask(before)
    assert modes == {".lock": 0o666, ".alive": 0o644, ".ticket": 0o644}


def test_a_cpu_needs_no_lease(folder: Path) -> None:
    """Without GPUs, or for a config that takes none, there is nothing to wait for and nothing is written."""
    assert take(folder, of=0) == Lease()
    assert take(folder, count=0, of=2) == Lease()
    assert take(folder, share=0.5, of=0) == Lease()
    assert not folder.exists()


@pytest.mark.parametrize(
    ("count", "share", "message"),
    [
        (3, None, "3 GPUs are needed and the run may use 2"),
        (1, 0.0, "gpu_share: 0: must lie above 0"),
        (1, 1.5, "gpu_share: 1.5: must lie above 0"),
        (2, 0.5, "gpu_share: 0.5: is a share of one GPU, but 2 GPUs are needed"),
    ],
)
def test_what_can_never_be_granted_is_refused_at_once(
    folder: Path, count: int, share: float | None, message: str
) -> None:
    """A wish that no waiting can fulfil is a mistake in the config."""
    with pytest.raises(ConfigError, match=message):
        take(folder, count=count, share=share, of=2)


def test_the_table_lists_holders_then_those_in_line(start: Callable[..., Run], folder: Path) -> None:
    """Everybody can see who has what since when, and who waits."""
    began = time.time()
    start("holder", [0, 1], count=2).got()
    start("shares", [2], share=0.5).got()
    for name in ("first", "second"):
        start(name, [0, 1, 2]).waits()
    table = GpuLeases(folder).table()
    assert [(one.what, one.waits) for one in table] == [
        ("holder", False),
        ("shares", False),
        ("first", True),
        ("second", True),
    ]
    assert table[0].ticket.granted == Granted(gpus=("GPU-0", "GPU-1"))
    assert table[1].ticket.share == 0.5
    assert all(began - 1 <= one.since <= time.time() + 1 for one in table)


def test_all_checkouts_and_jobs_of_a_user_share_one_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Neither the working directory nor a job's own temporary or cache folder splits the line."""
    monkeypatch.delenv(VARIABLE, raising=False)
    first = lease_folder()
    monkeypatch.chdir(tmp_path)
    for name in ("TMPDIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    assert lease_folder() == first == Path(f"/tmp/accuracy-gate-gpus-{os.getuid()}")
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    assert lease_folder() == tmp_path
    monkeypatch.setenv(VARIABLE, "leases")
    with pytest.raises(ConfigError, match="must be an absolute path"):
        lease_folder()
