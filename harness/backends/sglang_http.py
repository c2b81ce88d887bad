"""SGLang over HTTP: its native scoring of prompts, and what its server tells of itself."""

from __future__ import annotations

import asyncio
import contextlib
import json
import operator
import time
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp

from harness.backends.base import BackendInfo, Json
from harness.backends.openai_http import error_message, excerpt
from harness.backends.server import ServerBackend
from harness.backends.tokens import ScoredPrompt, TokenScores
from harness.errors import ServerError

ENGINE = "sglang"
HEADROOM = 6
"""SGLang takes no prompt of which fewer than so many tokens of its context would be left over, whatever is asked."""
FLUSH_SECONDS = 60.0
FLUSH_PAUSE = 0.2
SCORING: Mapping[str, Json] = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 1}
"""From the first token on, with the likeliest beside each."""
ONE_TOKEN: Mapping[str, Json] = {"max_new_tokens": 1, "temperature": 0.0}
"""SGLang refuses to generate nothing."""
TOLD = (
    *("dtype", "quantization", "kv_cache_dtype", "revision", "context_length", "attention_backend", "device"),
    *("tp_size", "dp_size", "speculative_algorithm", "enable_deterministic_inference"),
)
"""What the record keeps of the hundreds of fields of `/server_info`, of which one is the server's key."""


class SglangNative:
    """Scores over `/generate`: `prompt_logprobs` of completions is ignored with status 200.

    See `harness.backends.scoring_formats.ScoringFormat` for the contract.
    """

    path = "/generate"

    def body(self, model: str, prompts: Sequence[ScoredPrompt]) -> dict[str, Json]:
        """Render one batch; the native format has no place for a model's name."""
        return {"input_ids": [list(prompt.tokens) for prompt in prompts], "sampling_params": {**ONE_TOKEN}, **SCORING}

    def read(self, raw: bytes, prompts: Sequence[ScoredPrompt]) -> Sequence[TokenScores]:
        """Read the scores of a batch, in its order.

        Raises ValueError where they are not of the prompts that were sent, and ServerError where the server did not
        do what it was asked for.
        """
        replies = json.loads(raw)
        if not isinstance(replies, list) or len(replies) != len(prompts):
            raise ValueError(f"not {len(prompts)} replies to {len(prompts)} prompts: {excerpt(raw)}")
        return [read_scores(reply, prompt) for reply, prompt in zip(replies, prompts, strict=True)]


def read_scores(reply: Any, prompt: ScoredPrompt) -> TokenScores:
    """Read the scores of one prompt from what SGLang answers, over HTTP or in process alike; raises as `read` does."""
    about = reply.get("meta_info") if isinstance(reply, dict) else None
    if not isinstance(about, dict):
        raise ValueError(f"a reply without meta_info: {excerpt(repr(reply).encode())}")
    if (why := aborted(about)) is not None:
        raise ValueError(f"the engine ended it: {why}")
    scored = _entries(about, "input_token_logprobs", "return_logprob", prompt)
    likeliest = _entries(about, "input_top_logprobs", "top_logprobs_num", prompt)
    sent, scores = list(prompt.tokens), [_pair(entry) for entry in scored]
    if (echoed := [token for _, token in scores]) != sent:
        place = next(index for index, token in enumerate(sent) if echoed[index] != token)
        raise ValueError(f"the scores are of other tokens: number {place} is {echoed[place]}, {sent[place]} was sent")
    logprobs = [_number(logprob, index, sent) for index, (logprob, _) in enumerate(scores) if index >= prompt.first]
    best = [_best(entries, index, sent) for index, entries in enumerate(likeliest) if index >= prompt.first]
    # Of two equally likely tokens either is what greedy decoding would have written.
    return TokenScores(logprobs=tuple(logprobs), greedy=all(map(operator.ge, logprobs, best)))


def aborted(about: Mapping[str, Any]) -> str | None:
    """Say why the engine gave a request up; None where it did not."""
    reason = about.get("finish_reason")
    if not isinstance(reason, dict) or reason.get("type") not in {"abort", "error"}:
        return None
    return str(reason.get("message") or reason["type"])


def _entries(about: Mapping[str, Any], key: str, asked: str, prompt: ScoredPrompt) -> list[Any]:
    entries = about.get(key)
    if not isinstance(entries, list):
        raise ServerError(f"SGLang ignored {asked}: its reply has no {key}; this version cannot score")
    if len(entries) != len(prompt.tokens):
        raise ServerError(
            f"SGLang scored {len(entries)} of {len(prompt.tokens)} tokens ({key}): it ignored logprob_start_len or cut "
            "the prompt"
        )
    return entries


def _pair(entry: Any) -> tuple[Any, Any]:
    try:
        logprob, token, *_ = entry
    except (TypeError, ValueError) as error:
        raise ValueError(f"{entry!r} is not [log probability, token, …]") from error
    return logprob, token


def _best(entries: Any, index: int, sent: Sequence[int]) -> float:
    if not isinstance(entries, list) or not entries:
        raise ValueError(f"token {sent[index]}, number {index} of the prompt, has no likeliest token beside it")
    return max(_number(_pair(entry)[0], index, sent) for entry in entries)


def _number(value: Any, index: int, sent: Sequence[int]) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    raise ValueError(f"token {sent[index]}, number {index} of the prompt, has the log probability {value!r}")


class SglangBackend(ServerBackend):
    """Asks an SGLang server: OpenAI's format for text, SGLang's own for scores."""

    def __init__(self, base_url: str, *, installed: str = "unknown", **how: Any) -> None:
        """`installed` is the version where the server does not tell its own; the rest is as for any server."""
        super().__init__(base_url, scoring=SglangNative(), **how)
        self._installed = installed

    def _context(self, models: Sequence[Mapping[str, Json]]) -> int | None:
        length = super()._context(models)
        return None if length is None else length - HEADROOM

    async def describe(self) -> BackendInfo:
        """Ask the server who it is; what it does not tell is "unknown".

        Raises ServerError where it does not serve our model: SGLang answers a request for any other with 200.
        """
        info = await super().describe()
        told = await self._server_info()
        details = {**info.details, **{name: told[name] for name in TOLD if name in told}}
        version = str(told.get("version") or self._installed)
        return BackendInfo(engine=ENGINE, version=version, model=self.model, details=details)

    async def _server_info(self) -> Mapping[str, Json]:
        with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError, ValueError):
            async with self._session.get(self.root + "/server_info") as reply:
                told = await reply.json(content_type=None) if reply.status == 200 else None
                return told if isinstance(told, dict) else {}
        return {}

    async def drop_prefix_cache(self) -> None:
        """Drop the prefix cache, once nothing that the server has under way holds it any more.

        Raises ServerError where the server cannot or will not.
        """
        url, deadline = self.root + "/flush_cache", time.monotonic() + FLUSH_SECONDS
        while True:
            try:
                async with self._session.post(url) as reply:
                    raw = await reply.read()
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                raise ServerError(f"{url}: {type(error).__name__}: {error}") from error
            if reply.status == 200:
                return
            # It refuses while it has requests, and says so with 400.
            if reply.status != 400 or time.monotonic() > deadline:
                raise ServerError(f"{url}: HTTP {reply.status}: {error_message(raw)}")
            await asyncio.sleep(FLUSH_PAUSE)
