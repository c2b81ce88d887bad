"""Many requests under way at once: each answer is handed on as it comes, and the engine is watched meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from typing import TypeVar

from harness.backends.base import Response
from harness.errors import ServerDied

PROBE_SECONDS = 0.5
"""How often the engine is looked at while it is asked: a death ends the run well inside 5 s."""
T = TypeVar("T")


async def answers(
    requests: Sequence[T],
    ask: Callable[[T], Awaitable[Response]],
    *,
    concurrency: int,
    death: Callable[[], str | None] = lambda: None,
) -> AsyncGenerator[tuple[int, Response], None]:
    """Yield `(index, response)` as each completes, at most `concurrency` under way.

    Raises whatever `ask` raises, and ServerDied with what `death` says once it says anything.
    """
    done: asyncio.Queue[tuple[int, Response]] = asyncio.Queue()
    todo = iter(enumerate(requests))
    workers = [asyncio.create_task(_work(todo, ask, done)) for _ in range(min(concurrency, len(requests)))]
    try:
        for _ in requests:
            yield await _next(done, workers, death)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)


async def _work(
    todo: Iterator[tuple[int, T]], ask: Callable[[T], Awaitable[Response]], done: asyncio.Queue[tuple[int, Response]]
) -> None:
    for index, request in todo:
        await done.put((index, await ask(request)))


async def _next(
    done: asyncio.Queue[tuple[int, Response]], workers: Sequence[asyncio.Task[None]], death: Callable[[], str | None]
) -> tuple[int, Response]:
    while True:
        with contextlib.suppress(TimeoutError):
            return await asyncio.wait_for(done.get(), PROBE_SECONDS)
        if (how := death()) is not None:
            raise ServerDied(how)
        for worker in workers:
            if worker.done() and not worker.cancelled() and (fault := worker.exception()) is not None:
                raise fault
