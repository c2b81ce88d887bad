"""A thread that feeds a `vllm.LLM` requests and steps its engine, and tells each answer as it comes."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from harness.backends.base import Failure, FailureKind, GenerateRequest, Generation, Request, Response
from harness.backends.llm_prompts import LlmPrompt, LlmPrompts, enqueue, read_output, request_faults
from harness.backends.tokens import ScoredPrompt, TokenScores, answer
from harness.errors import ServerDied

ENDED: Literal["ended"] = "ended"
News = tuple[int, Response] | BaseException | Literal["ended"]
"""An answer, the fault that ended the thread, or its last word."""


@dataclass(slots=True, kw_only=True)
class _Asked:
    """A request whose prompts the engine gets; it is answered when the last of them is done."""

    index: int
    """Its place among the requests."""
    request: Request
    prompts: tuple[LlmPrompt, ...]
    since: float
    """When the first prompt was handed over."""
    scores: dict[int, TokenScores] = field(default_factory=dict)
    """By the place of their prompt."""

    def answer(self, now: float) -> Response:
        """Sum the scores of all prompts; values that are none make a Failure."""
        assert not isinstance(self.request, GenerateRequest)
        asked: list[ScoredPrompt] = [prompt.scored for prompt in self.prompts if prompt.scored is not None]
        try:
            return answer(
                self.request, asked, [self.scores[place] for place in range(len(asked))], latency=now - self.since
            )
        except ValueError as error:
            return _failure("invalid_response", str(error))


@dataclass(frozen=True, slots=True, kw_only=True)
class _UnderWay:
    """A prompt that the engine has."""

    asked: _Asked
    place: int
    """Its place among the request's prompts."""
    since: float

    @property
    def prompt(self) -> LlmPrompt:
        return self.asked.prompts[self.place]


class LlmSteps:
    """Answers requests through one LLM; while it runs nobody else may step that LLM."""

    def __init__(
        self,
        llm: Any,
        requests: Sequence[Request],
        *,
        chat: Mapping[str, Any],
        concurrency: int,
        timeout: float,
        tell: Callable[[News], None],
    ) -> None:
        """`chat` holds keywords for every `LLM.chat`, `concurrency` counts prompts; `tell` is called in the thread."""
        self._llm = llm
        self._todo = deque(enumerate(requests))
        self._prompts = LlmPrompts(llm, chat)
        self._concurrency = concurrency
        self._timeout = timeout
        self._tell = tell
        self._opened: _Asked | None = None
        self._places: deque[int] = deque()
        """The prompts of the opened request that the engine does not have yet."""
        self._under_way: dict[str, _UnderWay] = {}
        """By the names that the engine's outputs bear."""
        self._stopping = False
        self._came_back = time.monotonic()
        # A daemon: an engine that was killed leaves its step waiting for ever.
        self._thread = threading.Thread(target=self._run, name="accuracy-gate-llm-steps", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Let it end after the step it is in; what the engine still has is aborted."""
        self._stopping = True

    def silent_seconds(self) -> float:
        """Return how long the engine has not come back from a call."""
        return time.monotonic() - self._came_back

    def _run(self) -> None:
        try:
            while not self._stopping and (self._todo or self._places or self._under_way):
                self._fill()
                self._step()
                self._expire()
        except BaseException as fault:  # noqa: BLE001 - raised again where the answers are awaited
            self._tell(fault)
        finally:
            self._abort(self._under_way)
            self._tell(ENDED)

    def _fill(self) -> None:
        while (self._todo or self._places) and len(self._under_way) < self._concurrency and not self._stopping:
            try:
                self._feed()
            except Exception as error:
                raise ServerDied(f"the engine took no more requests: {type(error).__name__}: {error}") from error
            self._came_back = time.monotonic()

    def _feed(self) -> None:
        """Hand over one more prompt of the opened request, or else open the next."""
        if self._places and self._opened is not None:
            self._hand_over(self._opened, self._places.popleft())
        else:
            self._open(*self._todo.popleft())

    def _open(self, index: int, request: Request) -> None:
        """Make a request's prompts, which the engine gets next."""
        since = time.perf_counter()
        try:
            prompts = self._prompts.of(request)
        except request_faults() as error:
            self._tell((index, _failure("rejected", str(error))))
            return
        self._opened = _Asked(index=index, request=request, prompts=prompts, since=since)
        self._places = deque(range(len(prompts)))

    def _hand_over(self, asked: _Asked, place: int) -> None:
        since = time.perf_counter()
        try:
            name = enqueue(self._llm, asked.prompts[place])
        except request_faults() as error:
            self._fail(asked, _failure("rejected", str(error)))
        else:
            self._under_way[name] = _UnderWay(asked=asked, place=place, since=since)

    def _step(self) -> None:
        if not self._under_way:
            return
        try:
            outputs = self._llm.llm_engine.step()
        except Exception as error:
            raise ServerDied(f"the engine failed in a step: {type(error).__name__}: {error}") from error
        self._came_back = time.monotonic()
        now = time.perf_counter()
        for output in outputs:
            prompt = self._under_way.pop(output.request_id, None) if output.finished else None
            if prompt is not None:
                self._take(prompt, output, now)

    def _take(self, done: _UnderWay, output: Any, now: float) -> None:
        """Read one prompt's output, and tell the answer if it was the request's last."""
        asked = done.asked
        read = read_output(done.prompt, output, latency=now - asked.since)
        match read:
            case TokenScores():
                asked.scores[done.place] = read
                if len(asked.scores) == len(asked.prompts):
                    self._tell((asked.index, asked.answer(now)))
            case Generation():
                self._tell((asked.index, read))
            case Failure():
                self._fail(asked, read)

    def _fail(self, asked: _Asked, failure: Failure) -> None:
        """Tell that a request has no answer, and leave its other prompts unasked."""
        if self._opened is asked:
            self._places.clear()
        others = [name for name, prompt in self._under_way.items() if prompt.asked is asked]
        if others:
            self._abort(others)
        for name in others:
            del self._under_way[name]
        self._tell((asked.index, failure))

    def _expire(self) -> None:
        limit = time.perf_counter() - self._timeout
        failure = _failure("timeout", f"no answer within {self._timeout:.0f} s")
        late = [prompt for prompt in self._under_way.values() if prompt.since < limit]
        for asked in {prompt.asked.index: prompt.asked for prompt in late}.values():
            self._fail(asked, failure)

    def _abort(self, names: Iterable[str]) -> None:
        with contextlib.suppress(Exception):  # A dead engine has nothing left to abort.
            self._llm.llm_engine.abort_request(list(names))


def _failure(kind: FailureKind, detail: str) -> Failure:
    return Failure(kind=kind, detail=detail, attempts=1)
