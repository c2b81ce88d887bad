"""Which worker of pytest-xdist runs which config: one config's tasks on one worker, the longest first.

A worker of pytest-xdist begins a test only when it knows the next one, so that it would sit on a second config while it
runs the first and another worker stands idle. So each config is followed by a pause, an item that only the workers know
(`harness.pytest_servers.Pauses`): the next config goes to whoever is free first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import pytest
from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]


class Worker(Protocol):
    """What is used of pytest-xdist's handle of a worker."""

    @property
    def shutting_down(self) -> bool: ...

    def send_runtest_some(self, indices: Sequence[int]) -> None: ...

    def shutdown(self) -> None: ...


class ConfigScheduling(LoadScopeScheduling):  # type: ignore[misc]
    """Hands out configs, one at a time to each worker."""

    collection: list[str] | None

    def __init__(self, config: pytest.Config, log: Any, seconds: Mapping[str, tuple[str, float]]) -> None:
        """`seconds` gives, by the name of a test as parametrized, its server and how long all tests of it take."""
        super().__init__(config, log)
        self._seconds = seconds
        self._scopes: dict[str, str] = {}

    def schedule(self) -> None:
        """Give each worker without work its next config; the first time, put them in order."""
        if self.collection is None:
            if not self._check_nodes_have_same_collection():
                return
            self.collection = list(next(iter(self.registered_collections.values())))
            self._fill_queue(self.collection)
        for node in self.nodes:
            self._reschedule(node)

    def mark_test_complete(self, node: Worker, item_index: int, duration: float = 0) -> None:
        """Note a test that ended; a pause ends when its worker has more to do."""
        if item_index < len(self.registered_collections[node]):
            super().mark_test_complete(node, item_index, duration)

    def remove_node(self, node: Worker) -> str | None:
        """Take a worker's unfinished tests back, all but the one that it died of."""
        unfinished = {
            scope: {test: False for test, done in tests.items() if not done}
            for scope, tests in self.assigned_work.pop(node).items()
        }
        died_of = next((test for tests in unfinished.values() for test in tests), None)
        for scope, tests in reversed(unfinished.items()):
            left = {test: done for test, done in tests.items() if test != died_of}
            if left:
                self.workqueue[scope] = left
                self.workqueue.move_to_end(scope, last=False)
        for other in self.nodes:
            self._reschedule(other)
        return died_of

    def _fill_queue(self, collection: Sequence[str]) -> None:
        units: dict[str, dict[str, bool]] = {}
        seconds: dict[str, float] = {}
        for test in collection:
            scope, longest = self._server_of(test)
            self._scopes[test] = scope
            units.setdefault(scope, {})[test] = False
            seconds[scope] = longest
        for scope in sorted(units, key=lambda scope: -seconds[scope]):  # sorting keeps the list's order among equals
            self.workqueue[scope] = units[scope]

    def _server_of(self, test: str) -> tuple[str, float]:
        """Find a test's server by the name between brackets, for plugins may rewrite the rest of the node id."""
        named = [name for name in self._seconds if f"[{name}]" in test]
        if not named:
            return test.partition("::")[0], 0.0
        return self._seconds[max(named, key=len)]

    def _split_scope(self, nodeid: str) -> str:
        return self._scopes[nodeid]

    def _reschedule(self, node: Worker) -> None:
        if node.shutting_down or node not in self.registered_collections or self._pending_of(self.assigned_work[node]):
            return
        if self.workqueue:
            self._assign_work_unit(node)
        else:
            node.shutdown()

    def _assign_work_unit(self, node: Worker) -> None:
        scope, tests = self.workqueue.popitem(last=False)
        self.assigned_work[node][scope] = tests
        collection = self.registered_collections[node]
        pause = len(collection)
        node.send_runtest_some([*(collection.index(test) for test, done in tests.items() if not done), pause])
