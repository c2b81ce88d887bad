"""How servers are asked for the log probabilities of given tokens: bodies out, replies read and checked; pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Protocol

from harness.backends.base import Json
from harness.backends.openai_http import error_message, excerpt
from harness.backends.tokens import ROUNDING, ScoredPrompt, TokenScores
from harness.errors import ServerError


class ScoringFormat(Protocol):
    """One server's way of scoring several prompts in one request."""

    @property
    def path(self) -> str:
        """Where it is asked, below the server's root."""

    def body(self, model: str, prompts: Sequence[ScoredPrompt]) -> dict[str, Json]:
        """Render the request for these prompts."""

    def read(self, raw: bytes, prompts: Sequence[ScoredPrompt]) -> Sequence[TokenScores]:
        """Read the body of a 200: the scores of each prompt, in their order.

        Raises ValueError for a body that is not what was asked, and ServerError, naming it, where the server ignored
        that log probabilities were asked: it would do so for every request.
        """


class PromptLogprobs:
    """vLLM's `prompt_logprobs`."""

    path = "/v1/completions"

    def body(self, model: str, prompts: Sequence[ScoredPrompt]) -> dict[str, Json]:
        # One likeliest token beside the prompt's own, and not its rank: of two equally likely ones neither has rank 1.
        # vLLM recomputes the whole prompt of such a request, so what its prefix cache holds cannot change a score.
        return {**_request(model, prompts), "prompt_logprobs": 1}

    def read(self, raw: bytes, prompts: Sequence[ScoredPrompt]) -> Sequence[TokenScores]:
        return _read(raw, prompts, self._scores)

    def _scores(self, choice: dict[str, Json], prompt: ScoredPrompt, raw: bytes) -> TokenScores:
        entries = choice.get("prompt_logprobs")
        if entries is None:
            raise ServerError(
                f"the server answered 200 and ignored prompt_logprobs: it cannot score this way; use the format of "
                f"its engine: {excerpt(raw)}"
            )
        if len(entries) != len(prompt.tokens):
            raise ValueError(f"prompt_logprobs of {len(entries)} tokens for a prompt of {len(prompt.tokens)}")
        own, best = [], []
        for position in range(prompt.first, len(prompt.tokens)):
            entry, token = entries[position], str(prompt.tokens[position])
            if entry is None or token not in entry:
                raise ValueError(f"token {position} of the prompt (id {token}) has no log probability: {entry}")
            own.append(_number(entry[token]["logprob"], position))
            best.append(max(_number(told["logprob"], position) for told in entry.values()))
        return TokenScores(logprobs=tuple(own), greedy=own == best)


class Echo:
    """The older OpenAI way, `echo` with `logprobs`, as other servers know it."""

    path = "/v1/completions"

    def body(self, model: str, prompts: Sequence[ScoredPrompt]) -> dict[str, Json]:
        return {**_request(model, prompts), "logprobs": 1, "echo": True}

    def read(self, raw: bytes, prompts: Sequence[ScoredPrompt]) -> Sequence[TokenScores]:
        return _read(raw, prompts, self._scores)

    def _scores(self, choice: dict[str, Json], prompt: ScoredPrompt, raw: bytes) -> TokenScores:
        told = choice.get("logprobs") or {}
        for name in ("token_logprobs", "top_logprobs"):
            if told.get(name) is None:
                raise ServerError(
                    f"the server answered 200 and ignored logprobs ({name} is missing): it cannot score by echo; use "
                    f"the format of its engine: {excerpt(raw)}"
                )
        values, tops = told["token_logprobs"], told["top_logprobs"]
        length = len(prompt.tokens)
        if len(values) == 1:
            raise ServerError(
                "the server answered 200 and ignored echo: only what it generated has log probabilities; use the "
                f"format of its engine: {excerpt(raw)}"
            )
        # The last entry is the generated token; servers leave it out where that ended the text. Without either mark,
        # a list of the prompt's length could as well begin at the second token.
        whole = len(values) == length + 1 or (len(values) == length and values[0] is None)
        if not whole or len(tops) != len(values):
            raise ValueError(f"log probabilities of {len(values)} and {len(tops)} tokens for a prompt of {length}")
        own, best = [], []
        for position in range(prompt.first, length):
            if not isinstance(top := tops[position], dict) or not top:
                raise ValueError(f"token {position} of the prompt has no likeliest token: {top}")
            own.append(_number(values[position], position))
            best.append(max(_number(value, position) for value in top.values()))
        greedy = all(value >= top - ROUNDING for value, top in zip(own, best, strict=True))
        return TokenScores(logprobs=tuple(own), greedy=greedy)


def _request(model: str, prompts: Sequence[ScoredPrompt]) -> dict[str, Json]:
    # One token is generated because servers refuse none.
    tokens = [list(prompt.tokens) for prompt in prompts]
    return {"model": model, "prompt": tokens, "max_tokens": 1, "temperature": 0}


def _read(
    raw: bytes, prompts: Sequence[ScoredPrompt], read: Callable[[dict[str, Json], ScoredPrompt, bytes], TokenScores]
) -> list[TokenScores]:
    try:
        choices = _choices(raw, len(prompts))
        return [read(choice, prompt, raw) for choice, prompt in zip(choices, prompts, strict=True)]
    except (LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"no scores ({type(error).__name__}: {error}): {excerpt(raw)}") from error


def _choices(raw: bytes, number: int) -> list[dict[str, Json]]:
    """Return a completion's choices in the order of the prompts."""
    try:
        reply = json.loads(raw)
    except ValueError as error:
        raise ValueError(f"no JSON: {excerpt(raw)}") from error
    if not isinstance(reply, dict) or not isinstance(reply.get("choices"), list):
        raise ValueError(f"no choices: {error_message(raw)}")
    choices = reply["choices"]
    if sorted(choice.get("index", -1) for choice in choices) != list(range(number)):
        raise ValueError(f"{len(choices)} choices for {number} prompts: {excerpt(raw)}")
    return sorted(choices, key=lambda choice: int(choice["index"]))


def _number(value: Json, position: int) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"token {position} of the prompt has the log probability {value}")
    return float(value)
