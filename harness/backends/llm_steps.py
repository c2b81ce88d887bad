"""A thread that feeds a `vllm.LLM` requests and steps its engine, and tells each answer as it comes."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from harness.backends.base import ChatMessage, Failure, GenerateRequest, Generation, Response, Sampling
from harness.errors import ServerDied

TAKEN_FROM_DEFAULTS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "stop_token_ids",
)
"""What a server takes from the model's generation_config.json where a request does not say."""

ENDED: Literal["ended"] = "ended"
News = tuple[int, Response] | BaseException | Literal["ended"]
"""An answer, the fault that ended the thread, or its last word."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _UnderWay:
    """A request that the engine has."""

    index: int
    """Its place among the requests."""
    since: float


class LlmSteps:
    """Answers requests through one LLM; while it runs nobody else may step that LLM."""

    def __init__(
        self,
        llm: Any,
        requests: Sequence[GenerateRequest],
        *,
        chat: Mapping[str, Any],
        concurrency: int,
        timeout: float,
        tell: Callable[[News], None],
    ) -> None:
        """`chat` holds keywords for every `LLM.chat`; `tell` is called in the thread."""
        self._llm = llm
        self._todo = deque(enumerate(requests))
        self._chat = dict(chat)
        self._concurrency = concurrency
        self._timeout = timeout
        self._tell = tell
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
            while not self._stopping and (self._todo or self._under_way):
                self._fill()
                self._step()
                self._expire()
        except BaseException as fault:  # noqa: BLE001 - raised again where the answers are awaited
            self._tell(fault)
        finally:
            self._abort(self._under_way)
            self._tell(ENDED)

    def _fill(self) -> None:
        while self._todo and len(self._under_way) < self._concurrency and not self._stopping:
            index, request = self._todo.popleft()
            since = time.perf_counter()
            try:
                name = self._enqueue(request)
            except _request_faults() as error:
                self._tell((index, Failure(kind="rejected", detail=str(error), attempts=1)))
            except Exception as error:
                raise ServerDied(f"the engine took no more requests: {type(error).__name__}: {error}") from error
            else:
                self._under_way[name] = _UnderWay(index=index, since=since)
            self._came_back = time.monotonic()

    def _enqueue(self, request: GenerateRequest) -> str:
        """Hand one request over alone, so that its fault is nobody else's; return the name its output will bear."""
        parameters = sampling_params(self._llm, request.sampling)
        if isinstance(request.prompt, str):
            (name,) = self._llm.enqueue([request.prompt], parameters, use_tqdm=False)
        else:
            defaults = self._chat.get("chat_template_kwargs")
            chat = {**self._chat, "chat_template_kwargs": template_kwargs(request, defaults)}
            (name,) = self._llm.enqueue_chat([_messages(request.prompt)], parameters, use_tqdm=False, **chat)
        # What comes back is that name and a suffix, which vLLM can be told to leave out.
        return str(name).rpartition("-")[0] or str(name)

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
            request = self._under_way.pop(output.request_id, None) if output.finished else None
            if request is not None:
                self._tell((request.index, read_output(output, latency=now - request.since)))

    def _expire(self) -> None:
        limit = time.perf_counter() - self._timeout
        for name in [name for name, request in self._under_way.items() if request.since < limit]:
            self._abort([name])
            detail = f"no answer within {self._timeout:.0f} s"
            self._tell((self._under_way.pop(name).index, Failure(kind="timeout", detail=detail, attempts=1)))

    def _abort(self, names: Iterable[str]) -> None:
        with contextlib.suppress(Exception):  # A dead engine has nothing left to abort.
            self._llm.llm_engine.abort_request(list(names))


def _request_faults() -> tuple[type[Exception], ...]:
    """Name what vLLM raises for a request that it will not take."""
    client_error = getattr(sys.modules.get("vllm.exceptions"), "VLLMClientError", ValueError)
    return (ValueError, TypeError, client_error)


def sampling_params(llm: Any, sampling: Sampling) -> Any:
    """Make vLLM's SamplingParams as its server would: what is None comes from the model's generation config."""
    defaults = llm.get_default_sampling_params()
    settings = {name: getattr(defaults, name) for name in TAKEN_FROM_DEFAULTS}
    given = {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k}
    settings |= {name: value for name, value in given.items() if value is not None}
    cap = _token_cap(llm)
    return type(defaults)(
        **settings,
        max_tokens=sampling.max_tokens if cap is None else min(cap, sampling.max_tokens),
        seed=sampling.seed,
        stop=list(sampling.stop),
    )


def _token_cap(llm: Any) -> int | None:
    """Find the longest reply that a server would allow: one that was set on purpose, not the model's own default."""
    config = llm.model_config
    if getattr(config, "generation_config", "auto") not in ("auto", "vllm"):
        return (llm.default_sampling_params or {}).get("max_tokens")
    return (getattr(config, "override_generation_config", None) or {}).get("max_new_tokens")


def template_kwargs(request: GenerateRequest, defaults: Mapping[str, Any] | None) -> dict[str, Any]:
    """Merge the chat template's arguments as vLLM's server does, which turns an effort into thinking or none."""
    given = dict(request.chat_template_kwargs or {})
    effort = request.reasoning_effort
    if effort is not None:
        given.setdefault("enable_thinking", effort != "none")
        given["reasoning_effort"] = effort
    return {**(defaults or {}), **given}


def _messages(turns: Sequence[ChatMessage]) -> list[dict[str, str]]:
    return [{"role": turn.role, "content": turn.content} for turn in turns]


def read_output(output: Any, *, latency: float) -> Response:
    """Read a finished RequestOutput; one that the engine aborted is a Failure."""
    reply = output.outputs[0]
    if reply.finish_reason in {"abort", "error"}:
        return Failure(kind="aborted", detail=f"the engine ended it: {reply.finish_reason}", attempts=1)
    return Generation(
        text=reply.text,
        finish_reason=reply.finish_reason,
        generated_tokens=len(reply.token_ids),
        prompt_tokens=len(output.prompt_token_ids) if output.prompt_token_ids is not None else None,
        latency=latency,
    )
