"""A thread with an event loop of its own, for an engine that answers on one loop alone."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable
from typing import Self, TypeVar

STOP_SECONDS = 10.0
T = TypeVar("T")


class EngineLoop:
    """A thread with the event loop that an engine is made on: it answers on no other, whoever asks.

    It is no main thread, so that SGLang leaves this process's signal handlers alone.
    """

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        # A daemon: an engine whose processes were killed may never come back from what it does.
        self._thread = threading.Thread(target=self._run, name="accuracy-gate-sglang", daemon=True)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(STOP_SECONDS)
        if not self._thread.is_alive():
            for task in asyncio.all_tasks(self._loop):
                task.cancel()
            with contextlib.suppress(RuntimeError):
                self._loop.run_until_complete(asyncio.sleep(0))
            self._loop.close()

    def do(self, work: Callable[[], T]) -> T:
        """Do something in the thread, inside its loop, and wait for it."""

        async def inside() -> T:
            return work()

        return asyncio.run_coroutine_threadsafe(inside(), self._loop).result()

    async def ask(self, work: Callable[[], Awaitable[T]]) -> T:
        """Await something in the thread, from any other loop."""

        async def inside() -> T:
            return await work()

        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(inside(), self._loop))
