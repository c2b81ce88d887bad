"""One POST to a server, sent again where that can help."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from dataclasses import dataclass
from email.utils import parsedate_to_datetime

import aiohttp

from harness.backends.base import Failure, Json
from harness.backends.openai_http import error_message

RETRIED_STATUSES = frozenset({429, 502, 503, 504})


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """How often and after what wait a request is sent again."""

    tries: int = 3
    first_wait: float = 0.5
    """Seconds before the second try, doubled for each further one, jittered by half up and down."""
    longest_wait: float = 60.0
    """Seconds; also the most that a server's Retry-After is honoured for."""

    def wait(self, attempt: int, retry_after: float | None) -> float:
        """Seconds to wait after the given attempt (from 1)."""
        backoff: float = self.first_wait * 2 ** (attempt - 1) * random.uniform(0.5, 1.5)
        return min(self.longest_wait, max(backoff, retry_after or 0.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Posted:
    """The body of a 200."""

    raw: bytes
    latency: float
    """Seconds from sending the successful attempt to its last byte."""
    attempts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Retry:
    """An attempt that failed in a way another may not."""

    failure: Failure
    after: float | None = None


async def post(session: aiohttp.ClientSession, url: str, body: dict[str, Json], retry: RetryPolicy) -> Posted | Failure:
    """Send a body until it is answered, refused, or out of tries; a time-out is not tried again."""
    attempt = 1
    while True:
        outcome = await _attempt(session, url, body, attempt)
        if not isinstance(outcome, _Retry):
            return outcome
        if attempt >= retry.tries:
            return outcome.failure
        await asyncio.sleep(retry.wait(attempt, outcome.after))
        attempt += 1


async def _attempt(
    session: aiohttp.ClientSession, url: str, body: dict[str, Json], attempt: int
) -> Posted | Failure | _Retry:
    started = time.perf_counter()
    try:
        async with session.post(url, json=body) as reply:
            raw = await reply.read()
            latency = time.perf_counter() - started
    except TimeoutError:
        seconds = time.perf_counter() - started
        return Failure(kind="timeout", detail=f"no reply within {seconds:.0f} s", attempts=attempt)
    except (aiohttp.ClientError, OSError) as error:
        detail = f"{type(error).__name__}: {error}"
        return _Retry(failure=Failure(kind="connection", detail=detail, attempts=attempt))
    if reply.status == 200:
        return Posted(raw=raw, latency=latency, attempts=attempt)
    rejected = 400 <= reply.status < 500 and reply.status not in RETRIED_STATUSES
    failure = Failure(
        kind="rejected" if rejected else "status",
        detail=f"HTTP {reply.status}: {error_message(raw)}",
        attempts=attempt,
        status=reply.status,
    )
    if reply.status in RETRIED_STATUSES:
        return _Retry(failure=failure, after=retry_after(reply.headers.get("Retry-After")))
    return failure


def retry_after(header: str | None) -> float | None:
    """Read a Retry-After header (seconds or an HTTP date) as seconds from now, or None."""
    if header is None:
        return None
    with contextlib.suppress(ValueError):
        return max(0.0, float(header))
    with contextlib.suppress(ValueError, TypeError):
        return max(0.0, parsedate_to_datetime(header).timestamp() - time.time())
    return None
