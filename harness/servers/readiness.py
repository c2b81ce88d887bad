"""Asks a starting server whether it serves the model; quickly, and never through a proxy."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from enum import StrEnum
from types import TracebackType
from typing import Self

import requests

POLL_SECONDS = 2.0
"""The longest one poll may take."""
LAST_SECONDS = 0.5
"""What a poll has at least, also at the deadline: a healthy server is not called silent for one slow moment."""
LARGEST_ANSWER = 1024 * 1024


class State(StrEnum):
    """What a poll showed."""

    READY = "ready"
    STARTING = "starting"
    REFUSED = "refused"
    """It does not know our key."""
    OTHER_MODEL = "other model"


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """One poll's outcome, and its ground in words."""

    state: State
    ground: str


class Probe:
    """Polls `/health` and `/v1/models` of one server."""

    def __init__(self, base_url: str, *, model: str, api_key: str | None) -> None:
        self._base_url = base_url.rstrip("/")
        self._model = model
        self._session = requests.Session()
        self._session.trust_env = False
        self._session.headers["Connection"] = "close"
        if api_key:
            self._session.headers["Authorization"] = f"Bearer {api_key}"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._session.close()

    def look(self, seconds: float) -> Look:
        """Poll once, within that many seconds, or half of one, whatever the server does."""
        deadline = time.monotonic() + max(LAST_SECONDS, min(seconds, POLL_SECONDS))
        try:
            with self._get("/health", deadline) as response:
                if response.status_code != 200:
                    return Look(state=State.STARTING, ground=f"/health answers {response.status_code}")
            with self._get("/v1/models", deadline) as response:
                return self._judge(response.status_code, _body(response, deadline))
        except (requests.RequestException, TimeoutError) as error:
            return Look(state=State.STARTING, ground=f"no answer over HTTP ({type(error).__name__})")

    def _get(self, path: str, deadline: float) -> requests.Response:
        left = max(0.05, deadline - time.monotonic())
        return self._session.get(self._base_url + path, timeout=left, allow_redirects=False, stream=True)

    def _judge(self, status: int, body: bytes) -> Look:
        if status in (401, 403):
            return Look(state=State.REFUSED, ground=f"/v1/models answers {status} to the key given to it")
        if status != 200:
            return Look(state=State.STARTING, ground=f"/v1/models answers {status}")
        served = _model_ids(body)
        if self._model in served:
            return Look(state=State.READY, ground=f"serves {self._model}")
        if served:
            return Look(state=State.OTHER_MODEL, ground=f"serves {', '.join(served)}, expected {self._model}")
        return Look(state=State.STARTING, ground="/v1/models lists no model")


def _body(response: requests.Response, deadline: float) -> bytes:
    """Read byte by byte: a server that drips would outlast a timeout, which counts from the last byte."""
    body = bytearray()
    for byte in response.iter_content(1):
        body += byte
        if len(body) > LARGEST_ANSWER or time.monotonic() > deadline:
            raise TimeoutError(response.url)
    return bytes(body)


def _model_ids(body: bytes) -> list[str]:
    try:
        answer = json.loads(body)
    except ValueError:
        return []
    models = answer.get("data") if isinstance(answer, dict) else None
    if not isinstance(models, list):
        return []
    return [model["id"] for model in models if isinstance(model, dict) and isinstance(model.get("id"), str)]
