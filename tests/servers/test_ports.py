"""Choosing ports, and telling whose they are."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import pytest
from trials import eventually

from harness.errors import InfrastructureError
from harness.servers import ports
from harness.servers.ports import BLOCK, PortBlock, PortOwner, free_port, is_free, port_owner

HOLDER = "from harness.servers.ports import PortBlock as B; import sys; held = B.reserve(*map(int, sys.argv[1:])); "


@pytest.fixture
def block() -> Iterator[PortBlock]:
    """A block that no other test has; a test that gives it back may find it taken by another."""
    with PortBlock.reserve() as block:
        yield block


def listening(
    address: str, port: int, *, shared: bool = False, family: int = socket.AF_INET, backlog: int = 128
) -> socket.socket:
    server = socket.socket(family)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, int(shared))
    server.bind((address, port))
    server.listen(backlog)
    return server


def test_block_is_promised_once(block: PortBlock) -> None:
    """Two servers never get the same ports, however few there are."""
    with pytest.raises(InfrastructureError, match=f"between {block.first} and"):
        PortBlock.reserve(block.first, block.first + BLOCK)
    with pytest.raises(InfrastructureError):
        free_port(block.first, block.first + BLOCK)


def test_parts_of_a_block(block: PortBlock) -> None:
    """The engine counts up from a port that is not the one for HTTP, within the block."""
    assert block.port == block.first
    assert block.first < block.engine_port < block.first + BLOCK


def test_promise_of_another_process(block: PortBlock) -> None:
    """What another process was promised is not given out while it lives, and is the moment it is killed."""
    code = HOLDER + "print(flush=True); input()"
    area = (block.first, block.first + BLOCK)
    block.release()
    with subprocess.Popen(
        [sys.executable, "-c", code, *map(str, area)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"\n"
        with pytest.raises(InfrastructureError):
            PortBlock.reserve(*area)
        holder.kill()
        holder.wait()
        holder.stdout.close()
        with PortBlock.reserve(*area) as mine:
            assert mine.first == block.first


@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0"])
@pytest.mark.parametrize("offset", [0, 1, BLOCK - 1])
def test_block_with_a_port_in_use(block: PortBlock, address: str, offset: int) -> None:
    """A block of which any port is in use is not promised."""
    with listening(address, block.first + offset):
        block.release()
        with pytest.raises(InfrastructureError):
            PortBlock.reserve(block.first, block.first + BLOCK)


def test_port_that_is_bound_but_silent(block: PortBlock) -> None:
    """A port that a loading server has bound and does not listen on yet is in use."""
    assert is_free(block.port)
    with socket.socket() as loading:
        loading.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        loading.bind(("0.0.0.0", block.port))
        assert not is_free(block.port)


def test_free_port_is_free() -> None:
    """A free port lies in its range and can be bound."""
    port = free_port(20_000, 30_000)
    assert 20_000 <= port < 30_000


def test_owner_of_a_port(block: PortBlock) -> None:
    """A port belongs to nobody, to one of the processes named, or to a stranger."""
    assert port_owner(block.port, [os.getpid()]) is PortOwner.NOBODY
    with listening("127.0.0.1", block.port):
        assert port_owner(block.port, [os.getpid()]) is PortOwner.OURS
        assert port_owner(block.port, [os.getppid()]) is PortOwner.FOREIGN
        assert port_owner(block.port, []) is PortOwner.FOREIGN
        assert port_owner(block.port + 1, [os.getpid()]) is PortOwner.NOBODY
    assert port_owner(block.port, [os.getpid()]) is PortOwner.NOBODY


def test_a_port_on_which_nobody_listens_costs_no_look_at_processes(
    block: PortBlock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As long as a server does not listen neither the kernel's list of sockets nor a process is looked at."""

    def none_read(port: int) -> Iterator[int]:
        raise AssertionError(port)

    def none_asked() -> Iterator[int]:
        raise AssertionError
        yield

    monkeypatch.setattr(ports, "_listening_inodes", none_read)
    assert port_owner(block.port, none_asked()) is PortOwner.NOBODY


def test_a_listener_that_accepts_nobody_still_owns_its_port(block: PortBlock) -> None:
    """A full line of waiting connections, in which one more has to wait, is not taken for nobody."""
    with listening("127.0.0.1", block.port, backlog=0), ExitStack() as waiting:
        for _ in range(3):
            client = waiting.enter_context(socket.socket())
            client.setblocking(False)
            with suppress(BlockingIOError):
                client.connect(("127.0.0.1", block.port))
        assert port_owner(block.port, [os.getpid()]) is PortOwner.OURS


@pytest.mark.parametrize(
    ("address", "family", "owner"),
    [
        pytest.param("0.0.0.0", socket.AF_INET, PortOwner.OURS, id="every address"),
        pytest.param("::", socket.AF_INET6, PortOwner.OURS, id="every address of IPv6"),
        pytest.param("::ffff:127.0.0.1", socket.AF_INET6, PortOwner.OURS, id="IPv4 in IPv6"),
        pytest.param("127.0.0.2", socket.AF_INET, PortOwner.NOBODY, id="another address"),
        pytest.param("::1", socket.AF_INET6, PortOwner.NOBODY, id="loopback of IPv6"),
    ],
)
def test_addresses_that_count(block: PortBlock, address: str, family: int, owner: PortOwner) -> None:
    """What takes no connections to 127.0.0.1 does not own the port there."""
    if family == socket.AF_INET6 and not socket.has_dualstack_ipv6():
        pytest.skip("no IPv6 here")
    with listening(address, block.port, family=family):
        assert port_owner(block.port, [os.getpid()]) is owner


def test_port_shared_with_a_stranger(block: PortBlock) -> None:
    """A port on which a stranger listens beside us, as SO_REUSEPORT allows, is not ours: the kernel deals to both."""
    code = (
        "import socket, sys\n"
        "s = socket.socket(); s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)\n"
        "s.bind(('127.0.0.1', int(sys.argv[1]))); s.listen(); print(flush=True); input()"
    )
    with (
        listening("127.0.0.1", block.port, shared=True),
        subprocess.Popen(
            [sys.executable, "-S", "-c", code, str(block.port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as stranger,
    ):
        assert stranger.stdout is not None
        assert stranger.stdout.readline() == b"\n"
        assert port_owner(block.port, [os.getpid()]) is PortOwner.FOREIGN
        assert port_owner(block.port, [os.getpid(), stranger.pid]) is PortOwner.OURS
        stranger.kill()
        stranger.wait()
        assert eventually(lambda: port_owner(block.port, [os.getpid()]) is PortOwner.OURS)


def test_range_without_ports() -> None:
    """A range in which no block fits is an error that names it."""
    with pytest.raises(InfrastructureError, match="between 20000 and 20010"):
        PortBlock.reserve(20_000, 20_010)
