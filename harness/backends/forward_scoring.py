"""Log probabilities of tokens that are already there: one forward pass over a batch of rows padded on the right."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from harness.backends.causal_model import CausalModel
from harness.backends.tokens import ScoredPrompt, TokenScores

CHUNK = 2**25
"""Logits that are turned into float32 log probabilities at once: 128 MiB."""
COMPILED_WIDTH = 64
"""A compiled model gets rows of a multiple of so many tokens: each new shape may cost a compilation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoringRow:
    """One input, and the prompts it answers: those that differ in their last token alone share it."""

    inputs: tuple[int, ...]
    prompts: tuple[ScoredPrompt, ...]
    owners: tuple[tuple[int, int], ...]
    """Of each prompt: its request's index and its place among that request's prompts."""

    @property
    def length(self) -> int:
        return len(self.inputs)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Spot:
    """A token to score, and the place in the batch whose logits foretell it."""

    row: int
    place: int
    token: int


def score_rows(causal: CausalModel, rows: Sequence[ScoringRow], *, compiled: bool) -> list[list[TokenScores]]:
    """Score all prompts of each row."""
    spots = [_spots(number, prompt) for number, row in enumerate(rows) for prompt in row.prompts]
    flat = [spot for group in spots for spot in group]
    first = min(spot.place for spot in flat)
    logits, offset = _logits(causal, rows, first, compiled=compiled)
    logprobs, likeliest = _log_probabilities(logits, flat, offset)
    scored = []
    begin = 0
    for group in spots:
        end = begin + len(group)
        scored.append(TokenScores(logprobs=tuple(logprobs[begin:end]), greedy=all(likeliest[begin:end])))
        begin = end
    answers = iter(scored)
    return [[next(answers) for _ in row.prompts] for row in rows]


def _spots(row: int, prompt: ScoredPrompt) -> list[_Spot]:
    places = range(prompt.first, len(prompt.tokens))
    return [_Spot(row=row, place=place - 1, token=prompt.tokens[place]) for place in places]


def _logits(causal: CausalModel, rows: Sequence[ScoringRow], first: int, *, compiled: bool) -> tuple[Any, int]:
    """Run the model; return its logits and the place in the rows that they begin at, at most `first`."""
    width = max(row.length for row in rows)
    if compiled:
        width = min(-(-width // COMPILED_WIDTH) * COMPILED_WIDTH, causal.max_model_len)
    batch = dict(causal.padded([row.inputs for row in rows], width=width, left=False))
    # Logits of a long context are many times larger than everything else, and nobody asked for them.
    keeps = "logits_to_keep" in inspect.signature(causal.model.forward).parameters
    if keeps:
        batch["logits_to_keep"] = width - first
    logits = causal.model(**batch, use_cache=False).logits
    return logits, width - logits.shape[1]


def _log_probabilities(logits: Any, spots: Sequence[_Spot], offset: int) -> tuple[list[float], list[bool]]:
    """Look up each spot's log probability in nats, and whether no other token has a larger one."""
    import torch

    rows = torch.tensor([spot.row for spot in spots], device=logits.device)
    places = torch.tensor([spot.place - offset for spot in spots], device=logits.device)
    tokens = torch.tensor([spot.token for spot in spots], device=logits.device)
    logprobs: list[float] = []
    likeliest: list[bool] = []
    at_once = max(1, CHUNK // logits.shape[-1])
    for chunk in range(0, len(spots), at_once):
        part = slice(chunk, chunk + at_once)
        values = logits[rows[part], places[part]].float()
        own = values.gather(1, tokens[part, None]).squeeze(1)
        logprobs += (own - values.logsumexp(dim=-1)).tolist()
        likeliest += (values.argmax(dim=-1) == tokens[part]).tolist()
    return logprobs, likeliest
