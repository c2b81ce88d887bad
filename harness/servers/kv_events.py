"""vLLM's KV events over ZeroMQ: how many blocks were stored anywhere but on the GPU."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Self

DEFAULT_ENDPOINT = "tcp://*:5557"
NO_EVENTS = "no KV events are published"


@dataclass(frozen=True, slots=True, kw_only=True)
class EventAddresses:
    """Where the engines of one server publish, as a subscriber must spell it."""

    addresses: Sequence[str] = ()
    bind: bool = False
    """The engines connect, so the subscriber binds."""
    topic: str = ""
    why_none: str = NO_EVENTS


def event_addresses(written: str | None, *, host: str, ranks: int = 1) -> EventAddresses:
    """Read the value of `--kv-events-config`; each further data-parallel rank publishes one port higher."""
    try:
        said = json.loads(written or "{}")
        if not isinstance(said, dict) or not said.get("enable_kv_cache_events") or said.get("publisher") == "null":
            return EventAddresses()
        endpoint, topic = str(said.get("endpoint") or DEFAULT_ENDPOINT), str(said.get("topic") or "")
        if endpoint.startswith("ipc://"):
            return EventAddresses(addresses=(endpoint,), topic=topic)
        address, _, port = endpoint.rpartition(":")
        if not address.startswith("tcp://") or not int(port):
            return EventAddresses(why_none=f"KV events at {endpoint} cannot be reached from here")
        # vLLM binds wildcards and connects to whatever else it is given.
        binds = "*" in address or "::" in address
        base = f"tcp://{host}" if binds else address
        addresses = tuple(f"{base}:{int(port) + rank}" for rank in range(ranks))
    except ValueError:
        return EventAddresses(why_none=f"--kv-events-config {written} could not be read")
    return EventAddresses(addresses=addresses, bind=not binds, topic=topic)


class KvEvents:
    """A context manager that is subscribed while it is entered; without addresses or pyzmq it hears nothing."""

    def __init__(self, source: EventAddresses) -> None:
        self._source = source
        self._socket: Any = None
        self._decode: Any = None
        self._undecodable: type[Exception] = ValueError
        self._stack = ExitStack()
        self._blocks = 0
        self.heard = 0
        """Batches of events."""
        self.silence = source.why_none
        """Why nothing was heard, for a message."""

    def __enter__(self) -> Self:
        if not self._source.addresses:
            return self
        try:
            import msgspec
            import zmq
        except ImportError:
            self.silence = "KV events could not be heard (pip install 'accuracy-gate[kv-events]')"
            return self
        self.silence = "no KV event came"
        self._decode, self._undecodable = msgspec.msgpack.decode, msgspec.MsgspecError
        context = self._stack.enter_context(zmq.Context())
        self._socket = self._stack.enter_context(context.socket(zmq.SUB))
        self._socket.linger = 0
        self._socket.rcvhwm = 0  # a pass publishes thousands of batches before anybody reads them
        self._socket.setsockopt(zmq.SUBSCRIBE, self._source.topic.encode())
        for address in self._source.addresses:
            try:
                (self._socket.bind if self._source.bind else self._socket.connect)(address)
            except zmq.ZMQError as error:
                self.silence = f"KV events at {address} could not be heard: {error}"
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()
        self._socket = None

    def stored_blocks(self) -> int:
        """Read what has come since, and count all blocks stored outside the GPU so far."""
        while self._socket is not None and self._socket.poll(0):
            *_, payload = self._socket.recv_multipart()
            try:
                self._blocks += blocks_stored_outside(self._decode(payload))
                self.heard += 1
            except self._undecodable:
                self.silence = "what came on the port of the KV events could not be read"
        return self._blocks


def blocks_stored_outside(batch: Any) -> int:
    """Count the blocks that a decoded batch says were stored anywhere but on the GPU.

    vLLM writes a batch as `[time, events, rank]` and an event as a map with its `type`, or in older releases as
    `[type, block hashes, parent, tokens, block size, LoRA, medium]`.
    """
    events = batch[1] if isinstance(batch, list) and len(batch) > 1 else ()
    return sum(_stored_outside(event) for event in events)


def _stored_outside(event: Any) -> int:
    if isinstance(event, dict):
        kind, hashes, medium = event.get("type"), event.get("block_hashes"), event.get("medium")
    elif isinstance(event, list) and len(event) > 6:
        kind, hashes, medium = event[0], event[1], event[6]
    else:
        return 0
    outside = kind == "BlockStored" and medium not in (None, "GPU")
    return len(hashes) if outside and isinstance(hashes, list) else 0
