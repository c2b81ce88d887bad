"""Asks an `sglang.Engine` many requests at once, on the event loop that the engine lives on."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, Self, TypeVar

from harness.backends.base import (
    BackendInfo,
    ChatMessage,
    Failure,
    GenerateRequest,
    Generation,
    Json,
    LoglikelihoodRequest,
    Request,
    RequestKind,
    Response,
    RollingRequest,
    Sampling,
)
from harness.backends.engine_loop import EngineLoop
from harness.backends.hf_tokenizer import HfTokenizer
from harness.backends.in_flight import answers
from harness.backends.llm_context import check_room
from harness.backends.sglang_http import HEADROOM, ONE_TOKEN, SCORING, TOLD, aborted, read_scores
from harness.backends.tokens import (
    Piece,
    ScoredPrompt,
    TokenScores,
    Vocabulary,
    answer,
    left_truncated,
    pieces,
    prompts,
)
from harness.errors import CountersUnavailable
from harness.metrics import Counters

ENGINE = "sglang-offline"
T = TypeVar("T")


class SglangOfflineBackend:
    """Asks an engine; see `harness.backends.base.Backend` for the contract.

    The engine stays its owner's: leaving the context does not end it. Written to recorded replies of SGLang 0.5.16's
    engine; not run against the package itself.
    """

    kinds = frozenset(RequestKind)

    def __init__(
        self,
        engine: Any,
        loop: EngineLoop,
        *,
        model: str,
        version: str = "unknown",
        concurrency: int = 256,
        timeout: float = 600.0,
        death: Callable[[], str | None] = lambda: None,
    ) -> None:
        """`timeout` in seconds counts from when the engine is given a prompt; `death` says how the engine ended."""
        self.model = model
        self._engine = engine
        self._loop = loop
        self._version = version
        self._concurrency = concurrency
        self._timeout = timeout
        self._death = death

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        return

    async def run(self, requests: Sequence[Request]) -> AsyncGenerator[tuple[int, Response], None]:
        """Yield `(index, response)` as each completes, at most `concurrency` prompts under way.

        Raises ServerDied when the engine ends, and ServerError where it does not score.
        """
        self._slots = asyncio.Semaphore(self._concurrency)
        found = answers(requests, self._ask, concurrency=self._concurrency, death=self._death)
        async with contextlib.aclosing(found):
            async for one in found:
                yield one

    async def _ask(self, request: Request) -> Response:
        if isinstance(request, GenerateRequest):
            return await self._generate(request)
        return await self._score(request)

    async def _generate(self, request: GenerateRequest) -> Response:
        try:
            prompt, cut = await self._loop.ask(lambda: _now(lambda: self._prompt(request)))
        except ValueError as error:
            return Failure(kind="rejected", detail=str(error), attempts=1)
        reply = await self._send({**prompt, "sampling_params": self._sampling(request.sampling)})
        return reply if isinstance(reply, Failure) else read_reply(*reply, cut=cut)

    async def _score(self, request: LoglikelihoodRequest | RollingRequest) -> Response:
        began = time.perf_counter()
        try:
            asked = await self._loop.ask(lambda: _now(lambda: self._scored(request)))
        except ValueError as error:
            return Failure(kind="rejected", detail=str(error), attempts=1)
        scores = await asyncio.gather(*map(self._send_scored, asked))
        failures = [score for score in scores if isinstance(score, Failure)]
        if failures:
            return failures[0]
        told = [score for score in scores if isinstance(score, TokenScores)]
        try:
            return answer(request, asked, told, latency=time.perf_counter() - began)
        except ValueError as error:
            return Failure(kind="invalid_response", detail=str(error), attempts=1)

    async def _send_scored(self, prompt: ScoredPrompt) -> TokenScores | Failure:
        reply = await self._send({"input_ids": [list(prompt.tokens)], "sampling_params": {**ONE_TOKEN}, **SCORING})
        if isinstance(reply, Failure):
            return reply
        try:
            return read_scores(reply[0], prompt)
        except ValueError as error:
            return Failure(kind="invalid_response", detail=str(error), attempts=1)

    async def _send(self, keywords: Mapping[str, Any]) -> tuple[Any, float] | Failure:
        """Have one prompt answered; return the reply and its latency."""
        async with self._slots:
            began = time.perf_counter()
            try:
                async with asyncio.timeout(self._timeout):
                    (reply,) = await self._loop.ask(lambda: self._engine.async_generate(**keywords))
            except TimeoutError:
                return Failure(kind="timeout", detail=f"no answer within {self._timeout:.0f} s", attempts=1)
            except (ValueError, TypeError) as error:
                return Failure(kind="rejected", detail=str(error), attempts=1)
            except Exception as error:  # noqa: BLE001 - whatever the engine raises for one prompt is that prompt's
                return Failure(kind="aborted", detail=f"{type(error).__name__}: {error}", attempts=1)
            return reply, time.perf_counter() - began

    def _prompt(self, request: GenerateRequest) -> tuple[dict[str, Any], int]:
        """Make what the engine gets, always a batch of one: replies of batches are what was recorded."""
        if not isinstance(request.prompt, str):
            return {"input_ids": [self._conversation(request.prompt, request)]}, 0
        if request.truncate_prompt:
            piece = Piece(text=request.prompt, special=True)
            kept, cut = left_truncated(
                self._tokens.encoded([piece])[piece],
                max_new_tokens=request.sampling.max_tokens,
                max_model_len=self._vocabulary.max_model_len,
                bos=self._vocabulary.bos,
            )
            if cut:
                return {"input_ids": [list(kept)]}, cut
        return {"prompt": [request.prompt]}, 0

    def _conversation(self, turns: Sequence[ChatMessage], request: GenerateRequest) -> list[int]:
        effort = {"reasoning_effort": request.reasoning_effort} if request.reasoning_effort is not None else {}
        messages = [{"role": turn.role, "content": turn.content} for turn in turns]
        text = self._tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, **{**effort, **(request.chat_template_kwargs or {})}
        )
        # The template writes the special tokens itself.
        piece = Piece(text=text, special=False)
        return list(self._tokens.encoded([piece])[piece])

    def _scored(self, request: LoglikelihoodRequest | RollingRequest) -> tuple[ScoredPrompt, ...]:
        return prompts(request, self._tokens.encoded(pieces(request)), self._vocabulary)

    def _sampling(self, sampling: Sampling) -> dict[str, Any]:
        """Make the sampling parameters as SGLang's server would: what is None comes from the model's own."""
        settings = dict(self._engine.tokenizer_manager.model_config.get_default_sampling_params())
        given = {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k}
        settings |= {name: value for name, value in given.items() if value is not None}
        settings["max_new_tokens"] = sampling.max_tokens
        if sampling.stop:
            settings["stop"] = list(sampling.stop)
        if sampling.seed is not None and getattr(self._engine.server_args, "enable_deterministic_inference", False):
            settings["sampling_seed"] = sampling.seed  # It has no effect elsewhere.
        return settings

    @property
    def _tokenizer(self) -> Any:
        return self._engine.tokenizer_manager.tokenizer

    def get_tokenizer(self) -> Any:
        """Return the engine's tokenizer, under the name by which `check_room` asks for it."""
        return self._tokenizer

    @cached_property
    def _tokens(self) -> HfTokenizer:
        return HfTokenizer(self._tokenizer)

    @cached_property
    def _vocabulary(self) -> Vocabulary:
        return self._tokens.vocabulary(self._context)

    @property
    def _context(self) -> int:
        """Tokens of a prompt and its reply that the engine surely takes."""
        return int(self._engine.tokenizer_manager.model_config.context_len) - HEADROOM

    async def describe(self) -> BackendInfo:
        """Say what the engine was told and found; what it does not tell is left out."""
        told = self._engine.server_args
        details: dict[str, Json] = {name: getattr(told, name) for name in TOLD if hasattr(told, name)}
        details["max_model_len"] = self._context + HEADROOM
        return BackendInfo(engine=ENGINE, version=self._version, model=self.model, details=details)

    async def check_context(self, requests: Sequence[Request], info: BackendInfo) -> None:
        """Check that the longest requests fit into the engine's context; raises ServerError with the remedy."""
        await self._loop.ask(lambda: _now(lambda: check_room(self, requests, self._context)))

    async def counters(self) -> Counters:
        """Raise CountersUnavailable: in process SGLang serves no metrics."""
        raise CountersUnavailable("an sglang.Engine in process serves no /metrics: use backend sglang")


async def _now(work: Callable[[], T]) -> T:
    return work()


def read_reply(reply: Any, latency: float, *, cut: int = 0) -> Generation | Failure:
    """Read what the engine says to one prompt."""
    try:
        text, about = reply["text"], reply["meta_info"]
        if (why := aborted(about)) is not None:
            return Failure(kind="aborted", detail=f"the engine ended it: {why}", attempts=1)
        reason = about["finish_reason"]["type"]
        generated, prompt = about["completion_tokens"], about["prompt_tokens"]
    except (LookupError, TypeError, AttributeError) as error:
        detail = f"no reply ({type(error).__name__}: {error}): {str(reply)[:300]}"
        return Failure(kind="invalid_response", detail=detail, attempts=1)
    return Generation(
        text=text,
        finish_reason=reason,
        generated_tokens=generated,
        prompt_tokens=prompt,
        latency=latency,
        prompt_tokens_cut=cut,
    )
