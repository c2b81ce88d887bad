"""What a `vllm.LLM` is given for a request, and what its outputs say: texts, conversations, and tokens to score."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from harness.backends.base import ChatMessage, Failure, GenerateRequest, Generation, Request, Sampling
from harness.backends.hf_tokenizer import HfTokenizer
from harness.backends.tokens import (
    Piece,
    ScoredPrompt,
    TokenScores,
    Vocabulary,
    left_truncated,
    pieces,
    prompts,
)

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


@dataclass(frozen=True, slots=True, kw_only=True)
class LlmPrompt:
    """What the engine gets in one piece."""

    content: Any
    """A text, `{"prompt_token_ids": …}`, or the messages of a conversation."""
    parameters: Any
    chat: Mapping[str, Any] | None = None
    """Keywords of `LLM.enqueue_chat`; None for what is no conversation."""
    scored: ScoredPrompt | None = None
    """None where text is asked for."""
    cut: int = 0
    """Tokens cut from the prompt's left."""


class LlmPrompts:
    """Makes the prompts of requests, with the LLM's own tokenizer and sampling defaults."""

    def __init__(self, llm: Any, chat: Mapping[str, Any]) -> None:
        """`chat` holds keywords for every `LLM.enqueue_chat`."""
        self._llm = llm
        self._chat = dict(chat)

    @cached_property
    def _tokenizer(self) -> HfTokenizer:
        return HfTokenizer(self._llm.get_tokenizer())

    @cached_property
    def _vocabulary(self) -> Vocabulary:
        return self._tokenizer.vocabulary(int(self._llm.model_config.max_model_len))

    def of(self, request: Request) -> tuple[LlmPrompt, ...]:
        """Make a request's prompts: one for text, one a continuation or window for scores.

        Raises ValueError for what cannot be scored, and for a prompt of which truncation would leave nothing.
        """
        if isinstance(request, GenerateRequest):
            return (self._text(request),)
        encoded = self._tokenizer.encoded(pieces(request))
        parameters = scoring_params(self._llm)
        return tuple(
            LlmPrompt(content=_token_prompt(prompt.tokens), parameters=parameters, scored=prompt)
            for prompt in prompts(request, encoded, self._vocabulary)
        )

    def _text(self, request: GenerateRequest) -> LlmPrompt:
        parameters = sampling_params(self._llm, request.sampling)
        if not isinstance(request.prompt, str):
            defaults = self._chat.get("chat_template_kwargs")
            chat = {**self._chat, "chat_template_kwargs": template_kwargs(request, defaults)}
            return LlmPrompt(content=_messages(request.prompt), parameters=parameters, chat=chat)
        kept, cut = self._truncated(request.prompt, request.sampling) if request.truncate_prompt else ((), 0)
        return LlmPrompt(content=_token_prompt(kept) if cut else request.prompt, parameters=parameters, cut=cut)

    def _truncated(self, text: str, sampling: Sampling) -> tuple[tuple[int, ...], int]:
        piece = Piece(text=text, special=True)
        return left_truncated(
            self._tokenizer.encoded([piece])[piece],
            max_new_tokens=sampling.max_tokens,
            max_model_len=self._vocabulary.max_model_len,
            bos=self._vocabulary.bos,
        )


def enqueue(llm: Any, prompt: LlmPrompt) -> str:
    """Hand one prompt over alone, so that its fault is nobody else's; return the name its output will bear."""
    if prompt.chat is None:
        (name,) = llm.enqueue([prompt.content], prompt.parameters, use_tqdm=False)
    else:
        (name,) = llm.enqueue_chat([prompt.content], prompt.parameters, use_tqdm=False, **prompt.chat)
    # What comes back is that name and a suffix, which vLLM can be told to leave out.
    return str(name).rpartition("-")[0] or str(name)


def request_faults() -> tuple[type[Exception], ...]:
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


def scoring_params(llm: Any) -> Any:
    """Make the SamplingParams that score a prompt's tokens.

    vLLM never answers these from its prefix cache: asking for `prompt_logprobs` alone sets its
    `skip_reading_prefix_cache`, since a cached token's scores were never computed. `read_scores` relies on nothing
    of that: it counts them.
    """
    # With one alternative a token, the likeliest is there with rank 1, also where two are equally likely.
    parameters = type(llm.get_default_sampling_params())
    return parameters(max_tokens=1, temperature=0.0, prompt_logprobs=1, detokenize=False)


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


def _token_prompt(tokens: Sequence[int]) -> dict[str, list[int]]:
    return {"prompt_token_ids": list(tokens)}


def read_output(prompt: LlmPrompt, output: Any, *, latency: float) -> Generation | TokenScores | Failure:
    """Read a finished RequestOutput; one that the engine aborted is a Failure, as are scores that are not all there."""
    reply = output.outputs[0]
    if reply.finish_reason in {"abort", "error"}:
        return Failure(kind="aborted", detail=f"the engine ended it: {reply.finish_reason}", attempts=1)
    if prompt.scored is not None:
        try:
            return read_scores(prompt.scored, output.prompt_logprobs)
        except ValueError as error:
            return Failure(kind="invalid_response", detail=str(error), attempts=1)
    return Generation(
        text=reply.text,
        finish_reason=reply.finish_reason,
        generated_tokens=len(reply.token_ids),
        prompt_tokens=len(output.prompt_token_ids) if output.prompt_token_ids is not None else None,
        latency=latency,
        prompt_tokens_cut=prompt.cut,
    )


def read_scores(prompt: ScoredPrompt, given: Sequence[Mapping[int, Any] | None] | None) -> TokenScores:
    """Read a RequestOutput's `prompt_logprobs`, of which there is one entry a token of the prompt.

    Raises ValueError where they are not all there.
    """
    found = len(given) if given is not None else 0
    if given is None or found != len(prompt.tokens):
        raise ValueError(f"the engine scored {found} tokens of a prompt of {len(prompt.tokens)}")
    scores = [
        _score(entries, token, place)
        for place, (entries, token) in enumerate(zip(given, prompt.tokens, strict=True))
        if place >= prompt.first
    ]
    return TokenScores(
        logprobs=tuple(float(score.logprob) for score in scores), greedy=all(score.rank == 1 for score in scores)
    )


def _score(entries: Mapping[int, Any] | None, token: int, place: int) -> Any:
    if not entries or token not in entries:
        raise ValueError(f"the engine gave no score for token {token}, number {place} of the prompt")
    return entries[token]
