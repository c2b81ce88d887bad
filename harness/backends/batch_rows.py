"""From requests to rows of tokens that a batch is made of, and from their scores back to answers."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from harness.backends.base import (
    Failure,
    FailureKind,
    GenerateRequest,
    LoglikelihoodRequest,
    Request,
    Response,
    RollingRequest,
    Sampling,
)
from harness.backends.batch_generation import GenerationRow
from harness.backends.causal_model import CausalModel
from harness.backends.forward_scoring import ScoringRow
from harness.backends.llm_prompts import template_kwargs
from harness.backends.tokens import Piece, ScoredPrompt, TokenScores, answer, left_truncated, pieces, prompts


def failure(kind: FailureKind, detail: object) -> Failure:
    return Failure(kind=kind, detail=str(detail), attempts=1)


@dataclass(slots=True, kw_only=True)
class Scored:
    """A request whose prompts are being scored."""

    request: LoglikelihoodRequest | RollingRequest
    prompts: tuple[ScoredPrompt, ...]
    scores: dict[int, TokenScores] = field(default_factory=dict)
    """By the place of their prompt."""
    since: float | None = None
    """When its first batch began."""

    @property
    def complete(self) -> bool:
        return len(self.scores) == len(self.prompts)

    def answer(self, now: float) -> Response:
        """Sum the scores; values that are none make a Failure."""
        given = [self.scores[place] for place in range(len(self.prompts))]
        began = now if self.since is None else self.since
        try:
            return answer(self.request, self.prompts, given, latency=now - began)
        except ValueError as error:
            return failure("invalid_response", error)


@dataclass(slots=True, kw_only=True)
class Rows:
    """What a share of the requests comes to."""

    scoring: list[ScoringRow] = field(default_factory=list)
    generation: dict[Sampling, list[GenerationRow]] = field(default_factory=dict)
    """By their sampling less the seed, which each row has for itself."""
    scored: dict[int, Scored] = field(default_factory=dict)
    refused: dict[int, Response] = field(default_factory=dict)


def rows_of(causal: CausalModel, asked: Sequence[tuple[int, Request]], *, seed: int | None) -> Rows:
    """Encode requests, each with its index; what cannot be asked is refused.

    `seed` is for requests without one; None draws them.
    """
    rows = Rows()
    scoring = [(index, request) for index, request in asked if not isinstance(request, GenerateRequest)]
    _add_scoring(causal, scoring, rows)
    texts: list[tuple[int, GenerateRequest, Piece]] = []
    for index, request in asked:
        if isinstance(request, GenerateRequest):
            try:
                texts.append((index, request, _prompt(causal, request)))
            except _template_faults() as error:
                rows.refused[index] = failure("rejected", error)
    encoded = causal.encoder.encoded(piece for _, _, piece in texts)
    for index, request, piece in texts:
        try:
            row = _generation_row(causal, index, request, encoded[piece], seed)
        except ValueError as error:
            rows.refused[index] = failure("rejected", error)
        else:
            rows.generation.setdefault(row.sampling, []).append(row)
    return rows


def _add_scoring(
    causal: CausalModel, asked: Sequence[tuple[int, LoglikelihoodRequest | RollingRequest]], rows: Rows
) -> None:
    encoded = causal.encoder.encoded(piece for _, request in asked for piece in pieces(request))
    shared: dict[tuple[int, ...], list[tuple[ScoredPrompt, tuple[int, int]]]] = {}
    for index, request in asked:
        try:
            made = prompts(request, encoded, causal.vocabulary)
            if not made:
                raise ValueError("there is nothing to score")
        except ValueError as error:
            rows.refused[index] = failure("rejected", error)
            continue
        rows.scored[index] = Scored(request=request, prompts=made)
        for place, prompt in enumerate(made):
            # Nothing is asked of the last token's own logits: options of one token are one row.
            shared.setdefault(prompt.tokens[:-1], []).append((prompt, (index, place)))
    for inputs, users in shared.items():
        found, owners = zip(*users, strict=True)
        rows.scoring.append(ScoringRow(inputs=inputs, prompts=found, owners=owners))


def _template_faults() -> tuple[type[Exception], ...]:
    """Name what a chat template may raise for a conversation that it does not take."""
    import jinja2

    return (ValueError, TypeError, jinja2.TemplateError)


def _prompt(causal: CausalModel, request: GenerateRequest) -> Piece:
    if isinstance(request.prompt, str):
        return Piece(text=request.prompt, special=True)
    turns = [{"role": turn.role, "content": turn.content} for turn in request.prompt]
    text = causal.tokenizer.apply_chat_template(
        turns, add_generation_prompt=True, tokenize=False, **template_kwargs(request, None)
    )
    return Piece(text=text, special=False)


def _generation_row(
    causal: CausalModel, index: int, request: GenerateRequest, tokens: tuple[int, ...], seed: int | None
) -> GenerationRow:
    """Make a row; raises ValueError for a prompt that is empty or leaves no room."""
    sampling, cut = request.sampling, 0
    if request.truncate_prompt and isinstance(request.prompt, str):
        tokens, cut = left_truncated(tokens, max_new_tokens=sampling.max_tokens, max_model_len=causal.max_model_len)
    wanted = len(tokens) + sampling.max_tokens
    if not tokens:
        raise ValueError("the prompt has no tokens")
    if wanted > causal.max_model_len:
        raise ValueError(
            f"a prompt of {len(tokens)} tokens and max_tokens {sampling.max_tokens} make {wanted}, more than the "
            f"model's {causal.max_model_len}: raise max_model_len or lower max_tokens or num_fewshot"
        )
    own = sampling.seed if sampling.seed is not None else _drawn(seed, index)
    return GenerationRow(index=index, tokens=tokens, cut=cut, sampling=replace(sampling, seed=None), seed=own)


def _drawn(seed: int | None, index: int) -> int:
    return secrets.randbits(63) if seed is None else (seed * 1_000_003 + index) % 2**63
