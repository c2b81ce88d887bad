"""Where a context ends and a continuation begins, in tokens: cuts, prefixes, windows and truncation; pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from harness.backends.base import (
    ContinuationScore,
    LoglikelihoodRequest,
    Loglikelihoods,
    RollingLoglikelihood,
    RollingRequest,
)

CLAMPED = -9999.0
"""What vLLM sends for minus infinity, which is no JSON."""
ROUNDING = 1e-6
"""How far above zero, in nats, rounding in the engine may put the log probability of a certain token."""
PROBE = "a"
"""Encoded with and without special tokens, it shows which ones the tokenizer puts around a prompt."""

Encoded = Mapping["Piece", Sequence[int]]


class DoesNotFit(ValueError):
    """What must be scored is longer than the model or its window; no other request of the kind makes it shorter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A text that must be encoded."""

    text: str
    special: bool
    """Whether the tokenizer may add its special tokens, as it does to a prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """What the rules must know of a tokenizer and its model."""

    bos: int | None
    eos: int | None
    max_model_len: int
    """Tokens of prompt and reply together."""

    @property
    def prefix(self) -> int | None:
        """What a text is conditioned on that has nothing before it: BOS, else EOS."""
        return self.bos if self.bos is not None else self.eos


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredPrompt:
    """Tokens to send, of which those from `first` on are scored."""

    tokens: tuple[int, ...]
    first: int
    """Index of the first scored token, at least 1: nothing scores the first token of a prompt."""
    cut: int = 0
    """Tokens cut from the left."""
    fallback: str | None = None

    @property
    def scored(self) -> tuple[int, ...]:
        """The tokens that are scored."""
        return self.tokens[self.first :]


def pieces(request: LoglikelihoodRequest | RollingRequest) -> tuple[Piece, ...]:
    """List the texts that `prompts` needs encoded."""
    if isinstance(request, RollingRequest):
        return (Piece(text=request.text, special=False),)
    context, continuations = _texts(request)
    if not context:
        return tuple(Piece(text=text, special=False) for text in continuations)
    probes = (Piece(text=PROBE, special=True), Piece(text=PROBE, special=False))
    if request.pairwise:
        rest = [Piece(text=text, special=False) for text in continuations]
    else:
        rest = [Piece(text=context + text, special=True) for text in continuations]
    return (*probes, Piece(text=context, special=True), *rest)


def prompts(
    request: LoglikelihoodRequest | RollingRequest, encoded: Encoded, vocabulary: Vocabulary
) -> tuple[ScoredPrompt, ...]:
    """Make the prompts that score a request: one a continuation, or one a window.

    Each leaves room for the one token that engines insist on generating. Raises ValueError for what cannot be
    scored: a continuation that is empty or longer than the model, a text without tokens.
    """
    if isinstance(request, RollingRequest):
        tokens = tuple(encoded[Piece(text=request.text, special=False)])
        return tuple(_windows(tokens, window_of(request, vocabulary), request.context, vocabulary))
    if not request.continuations or not all(request.continuations):
        raise ValueError("a continuation to score is empty")
    context, continuations = _texts(request)
    if not context:
        joined = [_unconditioned(encoded[Piece(text=text, special=False)], vocabulary) for text in continuations]
    elif request.pairwise:
        start = _prompted(context, encoded, vocabulary)
        joined = [_apart(start, encoded[Piece(text=text, special=False)], vocabulary) for text in continuations]
    else:
        wholes = [_prompted(context + text, encoded, vocabulary) for text in continuations]
        joined = _split(_prompted(context, encoded, vocabulary), wholes, vocabulary)
    for text, prompt in zip(request.continuations, joined, strict=True):
        if not prompt.scored:
            raise ValueError(f"the continuation {text[:40]!r} adds no token that could be scored")
    return tuple(_fitted(prompt, vocabulary) for prompt in joined)


def _texts(request: LoglikelihoodRequest) -> tuple[str, tuple[str, ...]]:
    """Return context and continuations once whitespace has moved from the former's end to the latter's beginning."""
    context = request.context.rstrip() if request.move_spaces else request.context
    moved = request.context[len(context) :]
    return context, tuple(moved + text for text in request.continuations)


def _prompted(text: str, encoded: Encoded, vocabulary: Vocabulary) -> tuple[int, ...]:
    """Return a text's tokens as a prompt's: without what the tokenizer puts at the end, and with one BOS at most.

    A text that spells its BOS out, as one rendered from a chat template does, gets a second from the tokenizer.
    """
    tokens = tuple(encoded[Piece(text=text, special=True)])
    tail = _added_at_end(encoded)
    if tail and tokens[-len(tail) :] == tail:
        tokens = tokens[: -len(tail)]
    while vocabulary.bos is not None and tokens[:2] == (vocabulary.bos, vocabulary.bos):
        tokens = tokens[1:]
    return tokens


def _added_at_end(encoded: Encoded) -> tuple[int, ...]:
    probed = tuple(encoded[Piece(text=PROBE, special=True)])
    plain = tuple(encoded[Piece(text=PROBE, special=False)])
    for end in range(len(probed), len(plain) - 1, -1):
        if probed[end - len(plain) : end] == plain:
            return probed[end:]
    return ()


def _unconditioned(tokens: Sequence[int], vocabulary: Vocabulary) -> ScoredPrompt:
    """Put the prefix before tokens that have nothing before them, unless they begin with it themselves."""
    prefix = _prefix(vocabulary)
    own = bool(tokens) and tokens[0] == prefix
    return ScoredPrompt(tokens=tuple(tokens) if own else (prefix, *tokens), first=1)


def _prefix(vocabulary: Vocabulary) -> int:
    if vocabulary.prefix is None:
        raise ValueError(
            "the tokenizer names neither a BOS nor an EOS token, so nothing can stand before the first token: "
            "give the request a context, or set bos_token in the tokenizer's configuration"
        )
    return vocabulary.prefix


def _apart(context: tuple[int, ...], continuation: Sequence[int], vocabulary: Vocabulary) -> ScoredPrompt:
    if not context:
        return _unconditioned(continuation, vocabulary)
    return ScoredPrompt(tokens=(*context, *continuation), first=len(context))


def _split(context: tuple[int, ...], wholes: Sequence[tuple[int, ...]], vocabulary: Vocabulary) -> list[ScoredPrompt]:
    """Split each whole at the context's length, or all of them earlier where the boundary lies inside a token.

    Where a token holds the context's end and a continuation's beginning, splitting at the context's length would
    score that continuation without its beginning. All of the request's continuations are then scored from the last
    boundary that they share with the context: each covers the same few characters of the context more, all in
    the tokens that the model knows, so that choices stay comparable. Encoding apart instead would ask for a
    sequence that no tokenizer makes.
    """
    first = min(_shared(context, whole) for whole in wholes)
    fallback = None
    if first < len(context):
        fallback = (
            f"a continuation merges with the context's end: scored from token {first} of the prompt, "
            f"{len(context) - first} before the context's end"
        )
    if first == 0:
        whole_prompts = [_unconditioned(whole, vocabulary) for whole in wholes]
        return [replace(prompt, fallback=fallback) for prompt in whole_prompts]
    return [ScoredPrompt(tokens=whole, first=first, fallback=fallback) for whole in wholes]


def _shared(one: Sequence[int], other: Sequence[int]) -> int:
    """Count the tokens that two sequences begin with alike."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _fitted(prompt: ScoredPrompt, vocabulary: Vocabulary) -> ScoredPrompt:
    """Cut the context from the left until the prompt and one generated token fit into the model."""
    scored = len(prompt.scored)
    if scored + 1 >= vocabulary.max_model_len:
        raise DoesNotFit(
            f"a continuation of {scored} tokens, one token before it and the one that is generated do not fit into "
            f"max_model_len {vocabulary.max_model_len}: raise max_model_len or drop the question"
        )
    kept, cut = left_truncated(
        prompt.tokens, max_new_tokens=1, max_model_len=vocabulary.max_model_len, bos=vocabulary.bos
    )
    return replace(prompt, tokens=kept, first=prompt.first - cut, cut=cut) if cut else prompt


def window_of(request: RollingRequest, vocabulary: Vocabulary) -> int:
    """Return how many tokens a window may hold, its context included.

    Raises ValueError where its context leaves no room for a token to score.
    """
    longest = vocabulary.max_model_len - 1
    window = longest if request.max_window is None else min(request.max_window, longest)
    if request.context < 1:
        raise ValueError(f"context {request.context}: each window must see at least 1 token before those it scores")
    if request.context >= window:
        raise DoesNotFit(
            f"a context of {request.context} tokens leaves nothing to score in a window of {window}: lower context, "
            f"or raise max_window or max_model_len ({vocabulary.max_model_len})"
        )
    return window


def _windows(tokens: tuple[int, ...], window: int, context: int, vocabulary: Vocabulary) -> Iterator[ScoredPrompt]:
    """Cut a text into windows that score each of its tokens once; its own BOS is its prefix and no token of it."""
    whole = _unconditioned(tokens, vocabulary).tokens
    if len(whole) < 2:
        raise ValueError("the text has no token that could be scored")
    done = 1
    while done < len(whole):
        seen = 1 if done == 1 else context
        end = min(done - seen + window, len(whole))
        yield ScoredPrompt(tokens=whole[done - seen : end], first=seen)
        done = end


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenScores:
    """What an engine said of the scored tokens of one prompt."""

    logprobs: tuple[float, ...]
    """One per scored token, in nats."""
    greedy: bool
    """Whether each was the likeliest."""


def answer(
    request: LoglikelihoodRequest | RollingRequest,
    asked: Sequence[ScoredPrompt],
    scores: Sequence[TokenScores],
    *,
    latency: float,
    attempts: int = 1,
) -> Loglikelihoods | RollingLoglikelihood:
    """Sum the scores of a request's prompts.

    Raises ValueError naming the token for a value that is NaN, infinite, clamped or above zero beyond rounding, and
    for a number of values that is not the number of scored tokens.
    """
    if len(scores) != len(asked):
        raise ValueError(f"scores of {len(scores)} prompts where {len(asked)} were asked")
    values = [_checked(prompt, score) for prompt, score in zip(asked, scores, strict=True)]
    if isinstance(request, RollingRequest):
        return RollingLoglikelihood(
            logprob=math.fsum(value for window in values for value in window),
            tokens=sum(map(len, values)),
            bytes=len(request.text.encode()),
            windows=len(asked),
            latency=latency,
            attempts=attempts,
        )
    summed = tuple(
        ContinuationScore(logprob=math.fsum(value), tokens=len(value), bytes=len(text.encode()), greedy=score.greedy)
        for text, value, score in zip(request.continuations, values, scores, strict=True)
    )
    return Loglikelihoods(
        scores=summed,
        latency=latency,
        attempts=attempts,
        context_tokens_cut=max(prompt.cut for prompt in asked),
        fallbacks=tuple(dict.fromkeys(prompt.fallback for prompt in asked if prompt.fallback is not None)),
    )


def _checked(prompt: ScoredPrompt, score: TokenScores) -> list[float]:
    if len(score.logprobs) != len(prompt.scored):
        raise ValueError(f"{len(score.logprobs)} log probabilities for {len(prompt.scored)} scored tokens")
    for position, (token, value) in enumerate(zip(prompt.scored, score.logprobs, strict=True), prompt.first):
        # A clamped or infinite value would decide a sum by itself; no comparison with NaN is true.
        if not CLAMPED < value <= ROUNDING:
            raise ValueError(f"token {position} of the prompt (id {token}) has the log probability {value}")
    return [min(value, 0.0) for value in score.logprobs]


def left_truncated(
    tokens: Sequence[int], *, max_new_tokens: int, max_model_len: int, bos: int | None = None
) -> tuple[tuple[int, ...], int]:
    """Cut a prompt from the left so that `max_new_tokens` fit after it; return it and how many tokens were cut.

    A prompt that begins with `bos` still does. Raises ValueError where not even one token of it would be left.
    """
    room = max_model_len - max_new_tokens
    if room < 1:
        raise DoesNotFit(
            f"max_tokens {max_new_tokens} leave no room for a prompt in max_model_len {max_model_len}: "
            "raise max_model_len or lower max_tokens"
        )
    cut = len(tokens) - room
    if cut <= 0:
        return tuple(tokens), 0
    if bos is not None and tokens[0] == bos:
        return (bos, *tokens[cut + 1 :]), cut
    return tuple(tokens[cut:]), cut
